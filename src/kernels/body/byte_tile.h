// Exact rows of 8 bits: scale * (code - zero), both of a group of 32 channels of a head and a token
// (Plan::byte_rows()). Included inside an implementation's namespace, after head_part.h and
// exact_rows.h.

// A head's group of channels [first, first + count), its metadata by token.
struct ByteGroup {
    unsigned first, count;
    const std::uint16_t* scale;  // bf16
    const std::uint8_t* zero;
};
template <class Use>
LOWKV_INLINE void each_group(const HeadPart& x, const BlockView& block, Use use) {
    const unsigned channels = x.is_keys() ? x.step_count : x.lane_count;
    const unsigned tokens = x.is_keys() ? x.lane_count : x.step_count;
    const unsigned in_head = (channels + Plan::byte_group - 1) / Plan::byte_group;
    const std::size_t at = std::size_t{x.head} * in_head * tokens;
    const std::byte* const part = block.*(x.start);
    const auto* scale = reinterpret_cast<const std::uint16_t*>(part + x.scales_offset) + at;
    const auto* zero = reinterpret_cast<const std::uint8_t*>(part + x.zeros_offset) + at;
    for (unsigned first = 0; first < channels; first += Plan::byte_group) {
        const unsigned left = channels - first;
        use(ByteGroup{first, left < Plan::byte_group ? left : Plan::byte_group, scale, zero});
        scale += tokens;
        zero += tokens;
    }
}

// tile[step][lane] of tile_tokens tokens.
static void expand_bytes(const HeadPart& x, const BlockView& block, unsigned first_token,
                         float* tile) noexcept {
    const auto* codes = x.exact<std::uint8_t>(block);
    each_group(x, block, [&](const ByteGroup& group) LOWKV_INLINE_LAMBDA {
        const std::uint16_t* const scale = group.scale + first_token;
        const std::uint8_t* const zero = group.zero + first_token;
        if (x.is_keys()) {
            for (unsigned t = 0; t < tile_tokens; t += lanes) {
                const F its_scale = load_bf16(scale + t), its_zero = load_u8(zero + t);
                for (unsigned c = group.first; c < group.first + group.count; ++c) {
                    const F code = load_u8(codes + c * x.exact_stride + first_token + t);
                    store(tile + std::size_t{c} * tile_tokens + t,
                          mul(its_scale, sub(code, its_zero)));
                }
            }
            return;
        }
        alignas(64) float scales[tile_tokens], zeros[tile_tokens];
        for (unsigned t = 0; t < tile_tokens; t += lanes) {
            store(scales + t, load_bf16(scale + t));
            store(zeros + t, load_u8(zero + t));
        }
        for (unsigned t = 0; t < tile_tokens; ++t) {
            for (unsigned c = group.first; c < group.first + group.count; c += lanes) {
                const F code = load_u8(codes + (first_token + t) * x.exact_stride + c);
                store(tile + std::size_t{t} * x.lane_count + c,
                      mul(set(scales[t]), sub(code, set(zeros[t]))));
            }
        }
    });
}

// A group's channels are steps: y += scale * (w . codes - zero * (w . 1)), by token.
template <unsigned Rows>
LOWKV_INLINE void multiply_byte_keys(ExactProduct& product, const ByteGroup& group,
                                     const std::uint8_t* codes) {
    const std::size_t stride = product.x.exact_stride, y_stride = product.y_stride;
    const float* const w = product.w + group.first;
    float total[Rows] = {};
    for (unsigned r = 0; r < Rows; ++r) {
        for (unsigned c = 0; c < group.count; ++c) total[r] += w[r * product.w_stride + c];
    }
    each_vectors(0, product.lane_count, [&]<unsigned Vectors>(unsigned t) LOWKV_INLINE_LAMBDA {
        F sum[Rows][Vectors];
        for (unsigned r = 0; r < Rows; ++r) {
            for (unsigned v = 0; v < Vectors; ++v) sum[r][v] = set(0.0f);
        }
        add_products(codes + group.first * stride + t, stride, group.count, w, product.w_stride,
                     product.ahead, sum);
        for (unsigned v = 0; v < Vectors; ++v) {
            const unsigned at = t + v * lanes;
            const F scale = load_bf16(group.scale + at), zero = load_u8(group.zero + at);
            for (unsigned r = 0; r < Rows; ++r) {
                float* const to = product.y + r * y_stride + at;
                store(to, fma(scale, fnma(zero, set(total[r]), sum[r][v]), load(to)));
            }
        }
    });
}

// A group's channels are lanes: y += (w scale) . codes - (w scale) . zeros.
template <unsigned Rows>
LOWKV_INLINE void multiply_byte_values(ExactProduct& product, const ByteGroup& group,
                                       const std::uint8_t* codes) {
    const unsigned steps = product.step_count;
    alignas(64) float scaled[Rows][max_block_tokens];
    F lower[4];
    for (F& f : lower) f = set(0.0f);
    for (unsigned t = 0; t < steps; t += lanes) {  // beyond the last step weights are 0
        const F scale = load_bf16(group.scale + t), zero = load_u8(group.zero + t);
        for (unsigned r = 0; r < Rows; ++r) {
            const F weight = mul(load(product.w + r * product.w_stride + t), scale);
            store(scaled[r] + t, weight);
            lower[r] = fma(weight, zero, lower[r]);
        }
    }
    float below[4];
    reduce_add4(lower, below);
    const unsigned end = group.first + group.count;
    each_vectors(group.first, end, [&]<unsigned Vectors>(unsigned c) LOWKV_INLINE_LAMBDA {
        float* const y = product.y + c;
        F sum[Rows][Vectors];
        for (unsigned r = 0; r < Rows; ++r) {
            for (unsigned v = 0; v < Vectors; ++v) {
                sum[r][v] = sub(load(y + r * product.y_stride + v * lanes), set(below[r]));
            }
        }
        add_products(codes + c, product.x.exact_stride, steps, scaled[0], max_block_tokens,
                     product.ahead, sum);
        for (unsigned r = 0; r < Rows; ++r) {
            for (unsigned v = 0; v < Vectors; ++v) {
                store(y + r * product.y_stride + v * lanes, sum[r][v]);
            }
        }
    });
}

template <unsigned Rows>
void multiply_bytes(ExactProduct& product) noexcept {
    const auto* codes = product.x.exact<std::uint8_t>(product.block);
    each_group(product.x, product.block, [&](const ByteGroup& group) LOWKV_INLINE_LAMBDA {
        if (product.x.is_keys())
            multiply_byte_keys<Rows>(product, group, codes);
        else
            multiply_byte_values<Rows>(product, group, codes);
    });
}
