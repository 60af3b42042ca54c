#include "quantizers/metadata.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "codec/small_floats.h"
#include "lowkv/part.h"

namespace lowkv::codec {
namespace {

struct Header {
    float scale_multiplier = 1.0f;
    float zero_multiplier = 1.0f;
};

// One value of a section, as stored: bits and the value that they mean.
struct Half {
    using Bits = std::uint16_t;
    static constexpr float smallest = 0x1p-24f;
    static Bits store(float value, float) noexcept { return f32_to_f16(value); }
    static float load(Bits bits, float) noexcept { return f16_to_f32(bits); }
};
struct Unsigned8 {
    using Bits = std::uint8_t;
    static constexpr float smallest = LOWKV_E5M3_SMALLEST;
    static Bits store(float value, float) noexcept { return lowkv_f32_to_e5m3(value); }
    static float load(Bits bits, float) noexcept { return lowkv_e5m3_to_f32(bits); }
};
struct Float8 {
    using Bits = std::uint8_t;
    static constexpr float smallest = LOWKV_E4M3_SMALLEST;
    // The multiplier is a power of two: dividing by it and multiplying are exact.
    static Bits store(float value, float multiplier) noexcept {
        return lowkv_f32_to_e4m3(value / multiplier);
    }
    static float load(Bits bits, float multiplier) noexcept {
        return lowkv_e4m3_to_f32(bits) * multiplier;
    }
};

float largest_magnitude(const float* values, std::size_t count) noexcept {
    float largest = 0.0f;
    for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
    return largest;
}

// A group that isn't constant keeps a scale above 0.
void raise_scales(float* scales, std::size_t count, float least) noexcept {
    const auto least_bits = std::bit_cast<std::int32_t>(least);
    for (std::size_t i = 0; i < count; ++i) {
        const auto bits = std::bit_cast<std::int32_t>(scales[i]);
        const std::int32_t raised = lowkv_choose(bits, least_bits, least_bits, bits);
        scales[i] = std::bit_cast<float>(lowkv_choose(bits, 1, bits, raised));
    }
}

// Normal levels: what is stored is their unit; their scale and zero follow from it.
void spread_unit(const CodesPart& layout, float* scales, float* zeros) noexcept {
    for (std::size_t e = 0; e < layout.row_entries; ++e) {
        zeros[e] = scales[e] * layout.level_zero;
        scales[e] *= layout.level_step;
    }
}

// Calls move(values, multiplier) for what a section stores, in its order.
template <class Move>
void each_row(const CodesPart& layout, const Header& header, Groups& groups, Move move) noexcept {
    for (std::size_t row = 0; row < layout.group_rows; ++row) {
        float* scales = groups.scale + row * layout.row_entries;
        float* zeros = groups.zero + row * layout.row_entries;
        move(scales, header.scale_multiplier);
        if (layout.has_zeros)
            move(zeros, header.zero_multiplier);
        else
            spread_unit(layout, scales, zeros);
    }
}

template <class Type>
void write_rows(const CodesPart& layout, std::byte* section, const Header& header,
                Groups& groups) noexcept {
    const std::size_t entries = layout.row_entries;
    std::byte* out = section + layout.metadata_at;
    raise_scales(groups.scale, layout.group_rows * entries,
                 Type::smallest * header.scale_multiplier);
    each_row(layout, header, groups, [&](float* values, float multiplier) {
        typename Type::Bits stored[max_lanes];
        for (std::size_t i = 0; i < entries; ++i) {
            stored[i] = Type::store(values[i], multiplier);
            values[i] = Type::load(stored[i], multiplier);
        }
        std::memcpy(out, stored, entries * sizeof *stored);
        out += entries * sizeof *stored;
    });
}

template <class Type>
void read_rows(const CodesPart& layout, const std::byte* section, const Header& header,
               Groups& groups) noexcept {
    const std::size_t entries = layout.row_entries;
    const std::byte* in = section + layout.metadata_at;
    each_row(layout, header, groups, [&](float* values, float multiplier) {
        typename Type::Bits stored[max_lanes];
        std::memcpy(stored, in, entries * sizeof *stored);
        in += entries * sizeof *stored;
        for (std::size_t i = 0; i < entries; ++i) values[i] = Type::load(stored[i], multiplier);
    });
}

}  // namespace

void write_metadata(const CodesPart& layout, std::byte* section, Groups& groups) noexcept {
    switch (layout.codec.metadata) {
        case Metadata::fp16: return write_rows<Half>(layout, section, Header{}, groups);
        case Metadata::fp8_e5m3: return write_rows<Unsigned8>(layout, section, Header{}, groups);
        case Metadata::fp8_e4m3: break;
    }
    const std::size_t count = std::size_t{layout.group_rows} * layout.row_entries;
    const Header header{
        lowkv_e4m3_multiplier(largest_magnitude(groups.scale, count)),
        layout.has_zeros ? lowkv_e4m3_multiplier(largest_magnitude(groups.zero, count)) : 1.0f};
    std::memcpy(section, &header, sizeof header);
    write_rows<Float8>(layout, section, header, groups);
}

void read_metadata(const CodesPart& layout, const std::byte* section, Groups& groups) noexcept {
    switch (layout.codec.metadata) {
        case Metadata::fp16: return read_rows<Half>(layout, section, Header{}, groups);
        case Metadata::fp8_e5m3: return read_rows<Unsigned8>(layout, section, Header{}, groups);
        case Metadata::fp8_e4m3: break;
    }
    Header header;
    std::memcpy(&header, section, sizeof header);
    read_rows<Float8>(layout, section, header, groups);
}

}  // namespace lowkv::codec
