// Prefill: many query rows share a tile, so a tile of codes is expanded to f32 once, in scratch
// that stays in the nearest caches, and multiplied by all rows.

// A head's keys or values in any block, exact or packed. Assembled from scalars where it is used: a
// copy of what was just written by parts would wait for it.
struct HeadPart {
    const PackedPart& part;
    const std::byte* BlockView::* start;
    unsigned head, lane_count, step_count;
    std::size_t section_offset, exact_offset, exact_stride;

    HeadPart(const PackedPart& its_part, const std::byte* BlockView::* its_start, unsigned its_head)
        : part(its_part),
          start(its_start),
          head(its_head),
          lane_count(part.shape().lanes()),
          step_count(part.shape().steps()),
          section_offset(part.section_offset(head)),
          exact_offset(part.shape().exact_offset(head)),
          exact_stride(part.shape().exact_stride()) {}

    bool is_keys() const { return part.shape().part == Part::keys; }
    bool is_exact(const BlockView& block) const { return !block.packed || part.exact(); }
    // f16, steps of lanes.
    const std::uint16_t* exact(const BlockView& block) const {
        return reinterpret_cast<const std::uint16_t*>(block.*start) + exact_offset;
    }
    PackedHead packed(const BlockView& block) const {
        const std::byte* data = block.*start;
        return {&part, data + section_offset, data, head, lane_count, step_count};
    }
};

// tile[step][lane] of tile_tokens tokens.
LOWKV_INLINE void expand(const HeadPart& x, const BlockView& block, unsigned first_token,
                         float* tile) {
    if (!x.is_exact(block)) return x.part.kernels().expand(x.packed(block), first_token, tile);
    const unsigned tile_lanes = x.is_keys() ? tile_tokens : x.lane_count;
    const unsigned tile_steps = x.is_keys() ? x.step_count : tile_tokens;
    const std::uint16_t* first = x.exact(block) + first_token * (x.is_keys() ? 1 : x.exact_stride);
    for (unsigned step = 0; step < tile_steps; ++step) {
        const std::uint16_t* from = first + step * x.exact_stride;
        for (unsigned lane = 0; lane < tile_lanes; lane += lanes) {
            store(tile + std::size_t{step} * tile_lanes + lane, load_f16(from + lane));
        }
    }
}

template <unsigned Rows>
void multiply_exact(const HeadPart& x, const BlockView& block, const float* w, std::size_t w_stride,
                    float* y, std::size_t y_stride) noexcept {
    const std::uint16_t* elements = x.exact(block);
    for (unsigned lane = 0; lane < x.lane_count; lane += 2 * lanes) {
        // 16-lane vectors may leave one over (head_dim 80): a pair, then a single.
        const bool pair = lane + lanes < x.lane_count;
        F first[Rows], second[Rows];
        for (unsigned r = 0; r < Rows; ++r) {
            first[r] = load(y + r * y_stride + lane);
            second[r] = pair ? load(y + r * y_stride + lane + lanes) : set(0.0f);
        }
        for (unsigned s = 0; s < x.step_count; ++s) {
            const std::uint16_t* p = elements + s * x.exact_stride + lane;
            const F a = load_f16(p);
            const F b = pair ? load_f16(p + lanes) : a;
#pragma GCC unroll 4
            for (unsigned r = 0; r < Rows; ++r) {
                const F weight = set(w[r * w_stride + s]);
                first[r] = fma(weight, a, first[r]);
                second[r] = fma(weight, b, second[r]);
            }
        }
        for (unsigned r = 0; r < Rows; ++r) {
            store(y + r * y_stride + lane, first[r]);
            if (pair) store(y + r * y_stride + lane + lanes, second[r]);
        }
    }
}

LOWKV_INLINE void multiply_exact(const HeadPart& x, const BlockView& block, unsigned rows,
                                 const float* w, std::size_t w_stride, float* y,
                                 std::size_t y_stride) {
    switch (rows) {
        case 1: return multiply_exact<1>(x, block, w, w_stride, y, y_stride);
        case 2: return multiply_exact<2>(x, block, w, w_stride, y, y_stride);
        case 3: return multiply_exact<3>(x, block, w, w_stride, y, y_stride);
        default: return multiply_exact<4>(x, block, w, w_stride, y, y_stride);
    }
}
