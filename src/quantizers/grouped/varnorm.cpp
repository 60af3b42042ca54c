// KVarN (Muller et al., "KVarN: Variance-Normalized KV-Cache Quantization", 2026, arXiv
// 2606.03458): a head's block is rotated, its tokens and channels are scaled until both have one
// variance, then cut into uniform steps. Its steps (PartShape) keep a scale and a zero each, its
// lanes a factor each: x^ = factor[lane] * (code * scale[step] + zero[step]), then the rotation
// undone.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/small_floats.h"
#include "codec/sum.h"
#include "codec/uniform.h"
#include "quantizers/grouped/grouped.h"
#include "quantizers/metadata.h"
#include "quantizers/packing.h"
#include "quantizers/token_view.h"

namespace lowkv::codec {
namespace {

using kernels::unit_steps;

constexpr std::uint32_t max_elements = max_lanes * 128;  // of a head: 576 channels x 128 tokens
// The paper's 16 are no better (docs/quality.md's protocol).
constexpr std::uint32_t iterations = 8;

class VarnormPart final : public RotatedPart {
  public:
    VarnormPart(const Codec& its_codec, const PartShape& its_shape, const PartInputs& inputs)
        : RotatedPart(its_codec, its_shape, inputs) {
        has_factors = true;
        set_on_devices();
        lay_out(*inputs.table);
    }

    void encode_head(const std::uint16_t* exact, std::uint32_t h, std::byte* packed,
                     const EncodeHints&) const noexcept override;
    void decode_head(const std::byte* packed, std::uint32_t h,
                     std::uint16_t* exact) const noexcept override;
};

// A head's elements, rotated, in the order of its part: row[step][lane]. On the stack, because
// every iteration reads them all.
struct Matrix {
    alignas(64) float element[max_elements];
    std::uint32_t steps, lanes;

    float* row(std::uint32_t step) noexcept { return element + std::size_t{step} * lanes; }
    const float* row(std::uint32_t step) const noexcept {
        return element + std::size_t{step} * lanes;
    }
    float& at(Part part, std::uint32_t token, std::uint32_t channel) noexcept {
        return part == Part::keys ? row(channel)[token] : row(token)[channel];
    }
};

void load(const std::uint16_t* rows, const VarnormPart& layout, Matrix& x) noexcept {
    const TokenView view(layout.shape().part, layout.head);
    x.steps = layout.head.steps;
    x.lanes = layout.head.lanes;
    float token[max_lanes];
    for (std::uint32_t t = 0; t < view.tokens(); ++t) {
        layout.load_token(view, rows, t, token);
        for (std::uint32_t c = 0; c < view.channels(); ++c)
            x.at(layout.shape().part, t, c) = token[c];
    }
}

// The standard deviation, 0 of zeros only: what has an offset and hardly varies is not blown up.
float deviation(float sum, float squares, std::uint32_t count) noexcept {
    const float share = 1.0f / static_cast<float>(count);
    const float mean = sum * share, power = squares * share;
    return std::sqrt(std::max(power - mean * mean, power * 0x1p-10f));
}

float inverse_of(float x) noexcept { return x > 0.0f ? 1.0f / x : 0.0f; }

// Of x[i] * weight[i]; count is a multiple of 16.
float weighted_deviation(const float* x, const float* weight, std::uint32_t count) noexcept {
    alignas(64) float y[max_lanes], squares[max_lanes];
    for (std::uint32_t i = 0; i < count; ++i) {
        y[i] = x[i] * weight[i];
        squares[i] = y[i] * y[i];
    }
    return deviation(fold(y, count), fold(squares, count), count);
}

// Only the factors' ratios count. Both sets of scales remove means of their own, so no pair of sets
// satisfies both: unchecked, each iteration makes the one larger and the other smaller, until f32
// overflows. A power of two, so that no logarithm's last bit depends on the platform.
void fix_gauge(float* factors, std::uint32_t count) noexcept {
    std::int32_t exponents = 0, used = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
        if (!(factors[i] > 0.0f)) continue;
        exponents += std::ilogb(factors[i]);
        ++used;
    }
    if (used == 0) return;
    const float gauge = std::ldexp(1.0f, -(exponents / used));
    for (std::uint32_t i = 0; i < count; ++i) factors[i] *= gauge;
}

// The lanes' factors with which steps and lanes have one variance. The steps' own are not needed
// afterwards: they would cancel out of a step's range and its scale. A lane of zeros gets 0.
void balance(const Matrix& x, float* factors) noexcept {
    float inverse[max_lanes];
    std::fill_n(inverse, x.lanes, 1.0f);
    for (std::uint32_t n = 0; n < iterations; ++n) {
        alignas(64) float sum[max_lanes] = {}, squares[max_lanes] = {};
        for (std::uint32_t s = 0; s < x.steps; ++s) {
            const float* row = x.row(s);
            const float weight = inverse_of(weighted_deviation(row, inverse, x.lanes));
            for (std::uint32_t lane = 0; lane < x.lanes; ++lane) {
                const float y = row[lane] * weight;
                sum[lane] += y;
                squares[lane] += y * y;
            }
        }
        for (std::uint32_t lane = 0; lane < x.lanes; ++lane) {
            factors[lane] = deviation(sum[lane], squares[lane], x.steps);
        }
        fix_gauge(factors, x.lanes);
        for (std::uint32_t lane = 0; lane < x.lanes; ++lane) {
            inverse[lane] = inverse_of(factors[lane]);
        }
    }
}

void write_factors(const VarnormPart& layout, std::byte* section, float* factors,
                   std::uint32_t lanes) noexcept {
    std::uint16_t halves[max_lanes];
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
        halves[lane] = f32_to_f16(factors[lane]);
        factors[lane] = f16_to_f32(halves[lane]);
    }
    std::memcpy(section + layout.factors_at, halves, lanes * sizeof *halves);
}

void read_factors(const VarnormPart& layout, const std::byte* section, float* factors,
                  std::uint32_t lanes) noexcept {
    std::uint16_t halves[max_lanes];
    std::memcpy(halves, section + layout.factors_at, lanes * sizeof *halves);
    for (std::uint32_t lane = 0; lane < lanes; ++lane) factors[lane] = f16_to_f32(halves[lane]);
}

void VarnormPart::encode_head(const std::uint16_t* exact, std::uint32_t h, std::byte* packed,
                              const EncodeHints&) const noexcept {
    std::byte* section = packed + section_offset(h);
    std::memset(section, 0, head_bytes());
    Matrix x;
    load(head_rows(exact, h), *this, x);
    float factors[max_lanes], inverse[max_lanes];
    balance(x, factors);
    write_factors(*this, section, factors, x.lanes);
    for (std::uint32_t lane = 0; lane < x.lanes; ++lane) inverse[lane] = inverse_of(factors[lane]);

    Groups groups;
    for (std::uint32_t s = 0; s < x.steps; ++s) {
        float* row = x.row(s);
        for (std::uint32_t lane = 0; lane < x.lanes; ++lane) row[lane] *= inverse[lane];
        const Grid grid = full_grid(row, x.lanes, top);
        groups.scale[s] = grid.scale;
        groups.zero[s] = grid.zero;
    }
    write_metadata(*this, section, groups);
    auto* codes = reinterpret_cast<std::uint8_t*>(section + codes_at);
    CodeTile tile;
    for (std::uint32_t s = 0; s < x.steps; ++s) {
        quantize_uniform(x.row(s), x.lanes, {groups.scale[s], groups.zero[s]}, top,
                         tile.row[s % unit_steps]);
        if ((s + 1) % unit_steps == 0) {
            pack_tile(tile, codec.width, head, s / unit_steps, codes);
        }
    }
}

void VarnormPart::decode_head(const std::byte* packed, std::uint32_t h,
                              std::uint16_t* exact) const noexcept {
    const std::byte* section = packed + section_offset(h);
    Matrix x;
    x.steps = head.steps;
    x.lanes = head.lanes;
    float factors[max_lanes];
    read_factors(*this, section, factors, x.lanes);
    Groups groups;
    read_metadata(*this, section, groups);
    const auto* codes = reinterpret_cast<const std::uint8_t*>(section + codes_at);
    CodeTile tile;
    for (std::uint32_t s = 0; s < x.steps; ++s) {
        if (s % unit_steps == 0) {
            unpack_tile(codes, codec.width, head, s / unit_steps, tile);
        }
        const std::uint8_t* code = tile.row[s % unit_steps];
        for (std::uint32_t lane = 0; lane < x.lanes; ++lane) {
            const float y = static_cast<float>(code[lane]) * groups.scale[s] + groups.zero[s];
            x.row(s)[lane] = factors[lane] * y;
        }
    }
    const TokenView view(shape().part, head);
    float token[max_lanes];
    for (std::uint32_t t = 0; t < view.tokens(); ++t) {
        for (std::uint32_t c = 0; c < view.channels(); ++c) token[c] = x.at(shape().part, t, c);
        store_token(view, token, t, head_rows(exact, h));
    }
}

}  // namespace

std::shared_ptr<const PackedPart> make_varnorm(const Codec& codec, const PartShape& shape,
                                               const PartInputs& inputs) {
    return std::make_shared<VarnormPart>(codec, shape, inputs);
}

}  // namespace lowkv::codec
