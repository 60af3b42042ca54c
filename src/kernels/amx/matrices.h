// Products of rows with expanded tokens, by AMX: of bf16, summed in f32.
//
// A register holds a matrix of 16 lines of 64 bytes: 16 rows' sums of 16 lanes, 16 rows' weights of
// 32 steps, or 32 steps of 16 lanes. A line of steps is 16 pairs, of steps k and k + 16; a lane's
// steps are 16 lines, of its pairs.
//
// bf16 has 8 significant bits. That is enough for packed tokens, which were rounded a hundred times
// as much. Unquantized ones, and the weights that meet them, are the sum of two: with the product
// of high halves and those of a high and a low one, what is left out is 2^-16 of a product.

constexpr bool multiplies_matrices = true;
constexpr unsigned prefill_rows = prefill_max_rows;  // what is stored of a span serves all of them
constexpr unsigned rows_at_once = 32;                // whose scores stay in the nearest cache
constexpr unsigned matrix_rows = 16, matrix_steps = 32, matrix_bytes = 1024;

// Matrices in memory, rounded to bf16. `low_at` bytes further lies what that rounding took away; if
// `low_at` is 0, that isn't stored.
struct Matrices {
    std::byte* high;
    std::size_t low_at;
};

LOWKV_INLINE I pairs_of(F a, F b) {
    const I order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                     23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, __builtin_bit_cast(I, _mm512_cvtne2ps_pbh(b, a)));
}
LOWKV_INLINE void store_pairs(const Matrices& to, std::size_t at, F a, F b) {
    const I high = pairs_of(a, b);
    _mm512_storeu_si512(to.high + at, high);
    if (to.low_at == 0) return;
    const F low_a = sub(a, as_float(shift_left(high, 16)));
    const F low_b = sub(b, as_float(bit_and(high, set_int(static_cast<int>(0xffff0000u)))));
    _mm512_storeu_si512(to.high + to.low_at + at, pairs_of(low_a, low_b));
}

// Lines of a matrix, `stride` floats apart, whose second half is `far` floats behind the first, or
// 0.
LOWKV_INLINE void store_matrix(const float* x, std::size_t stride, std::size_t far, bool whole,
                               unsigned lines, const Matrices& to, std::size_t at) {
    for (unsigned line = 0; line < lines; ++line, x += stride, at += 64)
        store_pairs(to, at, load(x), whole ? load(x + far) : set(0));
}

// Weights of rows, w_stride apart: a row's steps are matrices one after the other.
LOWKV_INLINE void store_rows(const float* w, std::size_t w_stride, unsigned rows, unsigned steps,
                             const Matrices& to) {
    std::size_t at = 0;
    for (unsigned r = 0; r < rows; r += matrix_rows)
        for (unsigned s = 0; s < steps; s += matrix_steps, at += matrix_bytes)
            store_matrix(w + r * w_stride + s, w_stride, lanes, s + lanes < steps,
                         rows - r < matrix_rows ? rows - r : matrix_rows, to, at);
}

// tile[step][lane]: 16 lanes' steps are matrices one after the other, and the next 16 lanes'
// `stride` bytes further.
LOWKV_INLINE void store_lanes(const float* tile, std::size_t tile_lanes, unsigned steps,
                              std::size_t stride, const Matrices& to) {
    for (std::size_t lane = 0, at = 0; lane < tile_lanes; lane += lanes, at += stride)
        for (unsigned s = 0; s < steps; s += matrix_steps)
            store_matrix(tile + s * tile_lanes + lane, tile_lanes, lanes * tile_lanes,
                         s + lanes < steps, matrix_rows, to, at + s / matrix_steps * matrix_bytes);
}

// Registers 0 and 1 are sums of two vectors of lanes, of up to 16 rows, whose weights are in 4; 2,
// 3 and 5 those of the next rows; 6 and 7 are the lanes' steps.
LOWKV_INLINE void configure(unsigned rows) {
    alignas(64) std::uint8_t config[64] = {1};  // the palette; at 16 bytes of lines, at 48 lines
    const unsigned first = rows < matrix_rows ? rows : matrix_rows;
    const unsigned next = rows > matrix_rows ? rows - matrix_rows : matrix_rows;
    const unsigned lines[] = {first, first, next, next, first, next, matrix_rows, matrix_rows};
    for (unsigned i = 0; i < 8; ++i) {
        config[16 + 2 * i] = 64;
        config[48 + i] = static_cast<std::uint8_t>(lines[i]);
    }
    asm volatile("" : : "r"(config) : "memory");  // GCC's instruction names its first bytes alone
    _tile_loadconfig(config);
}

// Adds to the sums, of two vectors of lanes or, twice, of one.
LOWKV_INLINE void add_products(const std::byte* w, std::size_t w_stride, const std::byte* x,
                               std::size_t x_stride, bool two, unsigned matrices) {
    for (unsigned m = 0; m < matrices; ++m, w += matrix_bytes, x += matrix_bytes) {
        _tile_loadd(4, w, 64);
        _tile_loadd(6, x, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, x + x_stride, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (!two) continue;
        _tile_loadd(5, w + w_stride, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// y[row][lane] += the products of up to 32 rows' weights with the lanes' steps.
LOWKV_INLINE void multiply_matrices(const Matrices& w, unsigned rows, const Matrices& x,
                                    std::size_t stride, unsigned lane_count, unsigned matrices,
                                    float* y, std::size_t y_stride) {
    asm volatile("" ::: "memory");  // GCC's loads of matrices don't wait for what is stored
    const bool two = rows > matrix_rows;
    const std::size_t line = y_stride * sizeof(float), w_stride = matrices * matrix_bytes;
    for (unsigned lane = 0; lane < lane_count; lane += 2 * lanes) {
        const bool pair = lane + lanes < lane_count;
        const std::byte* from = x.high + lane / lanes * stride;
        const std::size_t next = pair ? stride : 0;
        float* const sums = y + lane;
        float* const second = pair ? sums + lanes : sums;  // stored first, if it is not there
        float* const below = sums + matrix_rows * y_stride;
        _tile_loadd(0, sums, line);
        _tile_loadd(1, second, line);
        if (two) _tile_loadd(2, below, line);
        if (two) _tile_loadd(3, below + (second - sums), line);
        add_products(w.high, w_stride, from, next, two, matrices);
        if (w.low_at != 0) {
            add_products(w.high + w.low_at, w_stride, from, next, two, matrices);
            add_products(w.high, w_stride, from + x.low_at, next, two, matrices);
        }
        _tile_stored(1, second, line);
        _tile_stored(0, sums, line);
        if (two) _tile_stored(3, below + (second - sums), line);
        if (two) _tile_stored(2, below, line);
    }
}

// The tiles of a span that are multiplied: runs of neighbours of one kind, as matrices.
struct SpanMatrices {
    struct Run {
        unsigned first, end;  // cells
        bool exact;
    } runs[span_tokens / tile_tokens];
    unsigned count;
    std::size_t stride;  // from 16 lanes to the next
    std::byte* memory;
    static constexpr std::size_t plane = std::size_t{span_tokens} * max_head_dim * 2;
    static constexpr std::size_t rows_plane = std::size_t{rows_at_once} * max_head_dim * 2;

    // In memory: rows' weights, then keys, then values.
    void store(const HeadPart& x, const Tiles& tiles, float* tile, std::byte* all) {
        count = 0;
        const bool keys = x.is_keys();
        const unsigned tile_lanes = keys ? tile_tokens : x.lane_count;
        const unsigned tile_steps = keys ? x.step_count : tile_tokens;
        const unsigned steps = keys ? x.step_count : span_tokens;
        stride = (steps + matrix_steps - 1) / matrix_steps * matrix_bytes;
        memory = all + 2 * rows_plane + (keys ? 0 : 2 * plane);
        for (unsigned at = 0; at < tiles.count; at += tile_tokens) {
            if (!tiles.visible[at / tile_tokens]) continue;
            const BlockView& block = tiles.blocks[at / tiles.block_tokens];
            const bool exact = x.is_exact(block);
            if (count == 0 || runs[count - 1].end != at || runs[count - 1].exact != exact)
                runs[count++] = {at, at, exact};
            runs[count - 1].end = at + tile_tokens;
            expand(x, block, at % tiles.block_tokens, tile);
            store_lanes(tile, tile_lanes, tile_steps, stride, matrices(exact, keys, at));
        }
    }

    // As multiply_tiles, of at most rows_at_once rows.
    void multiply(const HeadPart& x, unsigned rows, const float* exact_w, const float* packed_w,
                  std::size_t w_stride, float* exact_y, float* packed_y, std::size_t y_stride,
                  std::byte* all) const {
        const bool keys = x.is_keys();
        configure(rows);
        for (unsigned i = 0; i < count; ++i) {
            const auto& [first, end, exact] = runs[i];
            const Matrices w = {all, exact ? rows_plane : 0};
            const unsigned steps = keys ? x.step_count : end - first;
            store_rows((exact ? exact_w : packed_w) + (keys ? 0 : first), w_stride, rows, steps, w);
            multiply_matrices(w, rows, matrices(exact, keys, first), stride,
                              keys ? end - first : x.lane_count,
                              (steps + matrix_steps - 1) / matrix_steps,
                              (exact ? exact_y : packed_y) + (keys ? first : 0), y_stride);
        }
        _tile_release();
    }

    // From a cell on.
    Matrices matrices(bool exact, bool keys, unsigned cell) const {
        const std::size_t at = keys ? cell / lanes * stride : cell / matrix_steps * matrix_bytes;
        return {memory + at, exact ? plane : 0};
    }
};
