#pragma once
// A block for tests: f16 data to encode, and a reader of the packed bytes that follows the
// documented layout (quantizers/codes_part.h, codec/units.h) element by element, not the encoder's
// code.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "codec/small_floats.h"
#include "codec/units.h"
#include "lowkv/codec.h"
#include "quantizers/codes_part.h"
#ifdef LOWKV_GUESTS
#include "row/tests/row_reader.h"
#endif

namespace lowkv::test {

#ifndef LOWKV_GUESTS
struct RowReader {  // no part is a row codec's
    explicit RowReader(const PackedPart&) {}
    explicit operator bool() const { return false; }
    const Rope* rope() const { return nullptr; }
    std::optional<float> outlier(const std::byte*, std::uint32_t, std::uint32_t,
                                 std::uint32_t) const {
        return std::nullopt;
    }
    std::uint32_t group(std::uint32_t, std::uint32_t) const { return 0; }
    std::optional<float> fixed(std::uint32_t, std::uint32_t) const { return std::nullopt; }
};
#endif

using Which = Part;
inline constexpr Which both[] = {Which::keys, Which::values};

// Of a part that is not exact.
inline const codec::CodesPart& layout_of(const Plan& plan, Which which) {
    return dynamic_cast<const codec::CodesPart&>(plan.part(which));
}
inline const Codec& codec_of(const Plan& plan, Which which) {
    return which == Which::keys ? plan.scheme().key : plan.scheme().value;
}

struct Place {
    std::uint32_t head, channel, token;
};

// Reads the keys' or the values' part of a packed block.
struct PartReader {
    const Plan& plan;
    Which which;
    const std::byte* data;
    // Cast once: tests read element by element. Null: exact.
    const codec::CodesPart* codes_part = dynamic_cast<const codec::CodesPart*>(&plan.part(which));
    RowReader row{plan.part(which)};

    const codec::CodesPart& layout() const { return *codes_part; }

    std::uint8_t code(Place p) const {
        const auto* codes =
            reinterpret_cast<const std::uint8_t*>(section(p.head) + layout().codes_at);
        const Width width = layout().codec.width;
        const bool keys = which == Which::keys;
        const std::uint32_t steps = keys ? plan.shape().head_dim : plan.block_tokens();
        const std::uint32_t lane = keys ? p.token : p.channel, step = keys ? p.channel : p.token;
        if (layout().codec.levels == Levels::trellis)  // its window
            return static_cast<std::uint8_t>(
                lowkv_load_window(codes, kernels::number_of(width), steps, lane, step));
        return kernels::load_code(codes, width, steps, lane, step);
    }
    float scale(Place p) const { return metadata(p, 0); }
    float zero(Place p) const { return metadata(p, 1); }

    // What is stored for a channel, before the rotation is undone or the rope applied: the code's
    // level, scaled, the mean, an outlier's rest.
    double stored(Place p) const {
        const std::uint8_t c = code(p);
        const double level =
            layout().codec.levels == Levels::uniform
                ? c
                : layout().level_of(c) * double{layout().level_step} + layout().level_zero;
        const double value = level * double{scale(p)} + (layout().has_zeros ? zero(p) : 0.0f);
        if (row) return value + outlier(p).value_or(0.0f);
        return layout().codec.centred ? value + mean(p) : value;
    }
    std::uint32_t channel(Place p) const { return p.head * plan.shape().head_dim + p.channel; }
    // Row codecs: what is kept of a channel beside its code.
    std::optional<float> outlier(Place p) const {
        return row.outlier(data, p.head, p.channel, p.token);
    }
    std::int32_t position(std::uint32_t token) const {
        std::int32_t value = 0;
        std::memcpy(&value, data + layout().positions_offset() + std::size_t{4} * token,
                    sizeof value);
        return value;
    }
    float mean(Place p) const {
        std::uint16_t half = 0;
        std::memcpy(&half, section(p.head) + layout().mean_at + 2 * p.channel, sizeof half);
        return codec::f16_to_f32(half);
    }

    // fp8: what a section's stored scales (0) or zeros (1) are multiplied by.
    float multiplier(std::uint32_t head, std::uint32_t kind) const {
        if (layout().codec.metadata != Metadata::fp8_e4m3) return 1.0f;
        float value = 0;
        std::memcpy(&value, (row ? data : section(head)) + 4 * kind, sizeof value);
        return value;
    }

    // The group's number within its head.
    std::uint32_t group(Place p) const {
        if (row) return row.group(channel(p), p.token);
        const bool by_channel = layout().codec.axis == Axis::channel;
        const std::uint32_t group_row = (by_channel ? p.token : p.channel) / layout().group;
        return group_row * layout().row_entries + (by_channel ? p.channel : p.token);
    }

  private:
    const std::byte* section(std::uint32_t head) const {
        return data + layout().section_offset(head);
    }
    float metadata(Place p, std::uint32_t kind) const {
        const codec::CodesPart& part = layout();
        if (row) {
            if (const auto fixed = row.fixed(channel(p), kind)) return *fixed;
        }
        const std::uint32_t g = group(p);
        const std::size_t kinds = part.has_zeros ? 2 : 1;
        const std::size_t item =
            (g / part.row_entries * kinds + kind) * part.row_entries + g % part.row_entries;
        const std::byte* base = (row ? data : section(p.head)) + part.metadata_at;
        if (part.codec.metadata == Metadata::fp16) {
            std::uint16_t half = 0;
            std::memcpy(&half, base + 2 * item, sizeof half);
            return codec::f16_to_f32(half);
        }
        if (part.codec.metadata == Metadata::fp8_e5m3)
            return lowkv_e5m3_to_f32(static_cast<std::uint8_t>(base[item]));
        return lowkv_e4m3_to_f32(static_cast<std::uint8_t>(base[item])) * multiplier(p.head, kind);
    }
};

class Block {
  public:
    Block(const std::string& scheme, Shape shape, const LayerInputs& inputs = {})
        : plan(parse_scheme(scheme).base, shape, {}, 0, inputs),
          exact(plan.exact_bytes() / 2),
          packed(plan.packed_bytes(), std::byte{0xa5}) {
        for (const Which w : both) {
            codes_parts[w == Which::values] = dynamic_cast<const codec::CodesPart*>(&plan.part(w));
        }
    }

    Plan plan;
    // Of keys and values, which copies of the plan share; null as in PartReader.
    const codec::CodesPart* codes_parts[2];
    RowReader rows[2]{RowReader(plan.keys()), RowReader(plan.values())};
    std::vector<std::uint16_t> exact;
    std::vector<std::byte> packed;

    // Calls f(place) for every element of a part.
    template <class F>
    void each(F f) const {
        for (std::uint32_t h = 0; h < plan.shape().kv_heads; ++h) {
            for (std::uint32_t c = 0; c < plan.shape().head_dim; ++c) {
                for (std::uint32_t t = 0; t < plan.block_tokens(); ++t) f(Place{h, c, t});
            }
        }
    }

    const codec::CodesPart& layout(Which w) const { return *codes_parts[w == Which::values]; }

    std::size_t index(Which w, Place p) const {
        const std::size_t channel = std::size_t{p.head} * plan.shape().head_dim + p.channel;
        if (w == Which::keys) return channel * plan.block_tokens() + p.token;
        return plan.exact_part_bytes() / 2 + std::size_t{p.token} * plan.shape().channels() +
               channel;
    }

    void set(Which w, Place p, float x) { exact[index(w, p)] = codec::f32_to_f16(x); }
    float get(Which w, Place p) const { return codec::f16_to_f32(exact[index(w, p)]); }

    void encode() {
        encode_shared(plan, reinterpret_cast<const std::byte*>(exact.data()), packed.data());
        encode_heads(0, plan.shape().kv_heads);
    }
    void encode_heads(std::uint32_t first, std::uint32_t last) {
        encode_block(plan, reinterpret_cast<const std::byte*>(exact.data()), packed.data(), first,
                     last);
    }
    Block decoded() const {
        Block result = *this;
        decode_block(plan, packed.data(), reinterpret_cast<std::byte*>(result.exact.data()));
        return result;
    }

    PartReader part(Which w) const {
        const bool values = w == Which::values;
        return {plan, w, packed.data() + (values ? plan.keys().bytes() : 0), codes_parts[values],
                rows[values]};
    }
    std::uint8_t code(Which w, Place p) const { return part(w).code(p); }
    double stored(Which w, Place p) const { return part(w).stored(p); }
    float scale(Which w, Place p) const { return part(w).scale(p); }
    float zero(Which w, Place p) const { return part(w).zero(p); }
    float multiplier(Which w, std::uint32_t head, std::uint32_t kind) const {
        return part(w).multiplier(head, kind);
    }
    std::uint32_t group(Which w, Place p) const { return part(w).group(p); }
};

// Attention of one query over the exact state of some blocks' first head, not normalised: a
// direction. q has head_dim channels.
inline std::vector<double> attend(const std::vector<Block>& blocks, const std::vector<double>& q) {
    const auto head_dim = static_cast<std::uint32_t>(q.size());
    std::vector<double> out(q.size());
    for (const Block& block : blocks) {
        for (std::uint32_t t = 0; t < block.plan.block_tokens(); ++t) {
            double score = 0;
            for (std::uint32_t c = 0; c < head_dim; ++c) {
                score += q[c] * double{block.get(Which::keys, {0, c, t})};
            }
            const double weight = std::exp(score / std::sqrt(static_cast<double>(head_dim)));
            for (std::uint32_t c = 0; c < head_dim; ++c) {
                out[c] += weight * double{block.get(Which::values, {0, c, t})};
            }
        }
    }
    return out;
}

}  // namespace lowkv::test
