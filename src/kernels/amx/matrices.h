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
constexpr unsigned matrix_rows = 16, matrix_steps = 32;
constexpr std::size_t matrix_bytes = 1024;

// Matrices in memory, and what they lack, `low_at` bytes further; 0: it isn't stored.
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

// Weights of rows, w_stride apart: a row's steps are matrices one after the other.
LOWKV_INLINE void store_rows(const float* w, std::size_t w_stride, unsigned rows, unsigned steps,
                             const Matrices& to) {
    const std::size_t row_matrices = (steps + matrix_steps - 1) / matrix_steps;
    for (unsigned r = 0; r < rows; ++r) {
        const float* row = w + r * w_stride;
        std::size_t at = r / matrix_rows * row_matrices * matrix_bytes + r % matrix_rows * 64;
        for (unsigned s = 0; s < steps; s += matrix_steps, at += matrix_bytes)
            store_pairs(to, at, load(row + s), s + lanes < steps ? load(row + s + lanes) : set(0));
    }
}

// tile[step][lane]: 16 lanes' steps are matrices one after the other, and the next 16 lanes'
// `stride` bytes further.
LOWKV_INLINE void store_lanes(const float* tile, unsigned tile_lanes, unsigned steps,
                              std::size_t stride, const Matrices& to, std::size_t at) {
    for (unsigned lane = 0; lane < tile_lanes; lane += lanes, at += stride) {
        for (unsigned s = 0; s < steps; s += matrix_steps) {
            const float* first = tile + std::size_t{s} * tile_lanes + lane;
            const float* second = first + std::size_t{lanes} * tile_lanes;
            for (unsigned k = 0; k < lanes; ++k) {
                const std::size_t step = std::size_t{k} * tile_lanes;
                store_pairs(to, at + s * lanes * 2 + k * 64, load(first + step),
                            s + lanes < steps ? load(second + step) : set(0));
            }
        }
    }
}

// Sets up registers 0 to 3, sums, and 4, weights, for so many rows; 5 and 6 are for lanes.
LOWKV_INLINE void configure(unsigned rows) {
    struct alignas(64) {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64};
        std::uint8_t lines[16] = {};
    } config;
    for (unsigned i = 0; i < 7; ++i)
        config.lines[i] = static_cast<std::uint8_t>(i < 5 ? rows : matrix_rows);
    asm volatile("" : : "r"(&config) : "memory");  // GCC's instruction names its first bytes alone
    _tile_loadconfig(&config);
}

// Adds to the sums of up to four vectors of lanes.
LOWKV_INLINE void add_products(const std::byte* w, const std::byte* x, std::size_t stride,
                               unsigned vectors, unsigned matrices) {
    for (unsigned m = 0; m < matrices; ++m, w += matrix_bytes, x += matrix_bytes) {
        _tile_loadd(4, w, 64);
        _tile_loadd(5, x, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (vectors == 1) continue;
        _tile_loadd(6, x + stride, 64);
        _tile_dpbf16ps(1, 4, 6);
        if (vectors == 2) continue;
        _tile_loadd(5, x + 2 * stride, 64);
        _tile_dpbf16ps(2, 4, 5);
        if (vectors == 3) continue;
        _tile_loadd(6, x + 3 * stride, 64);
        _tile_dpbf16ps(3, 4, 6);
    }
}

// y[row][lane] = the products of the rows' weights with the lanes' steps, added to what is there
// unless it is new.
LOWKV_INLINE void multiply_matrices(const Matrices& w, unsigned rows, const Matrices& x,
                                    std::size_t stride, unsigned lane_count, unsigned matrices,
                                    bool is_new, float* y, std::size_t y_stride) {
    asm volatile("" ::: "memory");  // GCC's loads of matrices don't wait for what is stored
    configure(matrix_rows);
    for (unsigned lane = 0; lane < lane_count; lane += 4 * lanes) {
        const unsigned left = (lane_count - lane) / lanes, vectors = left < 4 ? left : 4;
        const std::byte* from = x.high + lane / lanes * stride;
        const std::byte* weights = w.high;
        for (unsigned r = 0; r < rows; r += matrix_rows, weights += matrices * matrix_bytes) {
            if (rows - r < matrix_rows) configure(rows - r);
            float* sums = y + r * y_stride + lane;
            const std::size_t line = y_stride * sizeof(float);
            if (is_new) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            } else {
                _tile_loadd(0, sums, line);
                if (vectors > 1) _tile_loadd(1, sums + lanes, line);
                if (vectors > 2) _tile_loadd(2, sums + 2 * lanes, line);
                if (vectors > 3) _tile_loadd(3, sums + 3 * lanes, line);
            }
            add_products(weights, from, stride, vectors, matrices);
            if (w.low_at != 0) {
                add_products(weights + w.low_at, from, stride, vectors, matrices);
                add_products(weights, from + x.low_at, stride, vectors, matrices);
            }
            _tile_stored(0, sums, line);
            if (vectors > 1) _tile_stored(1, sums + lanes, line);
            if (vectors > 2) _tile_stored(2, sums + 2 * lanes, line);
            if (vectors > 3) _tile_stored(3, sums + 3 * lanes, line);
        }
        if (rows % matrix_rows != 0) configure(matrix_rows);
    }
    _tile_release();
}

// As multiply_tiles, but that scores are new: 0 of tiles that nobody sees.
static void multiply_by_matrices(const HeadPart& x, const Tiles& tiles, unsigned rows,
                                 const float* exact_w, const float* packed_w, std::size_t w_stride,
                                 float* exact_y, float* packed_y, std::size_t y_stride, float* tile,
                                 std::byte* memory) {
    constexpr std::size_t rows_plane = std::size_t{prefill_max_rows} * max_head_dim * 2;
    constexpr std::size_t lanes_plane = std::size_t{span_tokens} * max_head_dim * 2;
    const bool keys = x.is_keys();
    const unsigned tile_lanes = keys ? tile_tokens : x.lane_count;
    const unsigned tile_steps = keys ? x.step_count : tile_tokens;
    const std::size_t most_steps = keys ? x.step_count : span_tokens;
    const std::size_t stride = (most_steps + matrix_steps - 1) / matrix_steps * matrix_bytes;
    const auto block_of = [&](unsigned at) LOWKV_INLINE_LAMBDA -> const BlockView& {
        return tiles.blocks[at / tiles.block_tokens];
    };
    for (unsigned at = 0; at < tiles.count;) {
        if (!tiles.visible[at / tile_tokens]) {
            if (keys) clear_scores(exact_y + at, rows, tile_tokens);
            at += tile_tokens;
            continue;
        }
        const bool exact = x.is_exact(block_of(at));
        const Matrices w = {memory, exact ? rows_plane : 0};
        const Matrices lanes_of = {memory + 2 * rows_plane, exact ? lanes_plane : 0};
        const unsigned first = at;
        do {
            const unsigned token = at - first;
            expand(x, block_of(at), at % tiles.block_tokens, tile);
            store_lanes(tile, tile_lanes, tile_steps, stride, lanes_of,
                        keys ? token / lanes * stride : token / matrix_steps * matrix_bytes);
            at += tile_tokens;
        } while (at < tiles.count && tiles.visible[at / tile_tokens] &&
                 x.is_exact(block_of(at)) == exact);
        const unsigned steps = keys ? x.step_count : at - first;
        store_rows((exact ? exact_w : packed_w) + (keys ? 0 : first), w_stride, rows, steps, w);
        multiply_matrices(w, rows, lanes_of, stride, keys ? at - first : x.lane_count,
                          (steps + matrix_steps - 1) / matrix_steps, keys,
                          (exact ? exact_y : packed_y) + (keys ? first : 0), y_stride);
    }
}
