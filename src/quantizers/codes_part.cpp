#include "quantizers/codes_part.h"

#include <cmath>
#include <string>

#include "codec/trellis.h"
#include "codec/units.h"
#include "isa/table.h"
#include "quantizers/metadata.h"

namespace lowkv::codec {
CodesPart::CodesPart(const Codec& its_codec, const PartShape& its_shape) noexcept
    : PackedPart(its_shape), codec(its_codec) {
    const bool by_channel = codec.axis == Axis::channel;
    const bool keys = its_shape.part == Part::keys;
    head = {its_shape.steps(), its_shape.lanes(), its_shape.exact_stride(), keys == by_channel};
    metadata_offset = codec.metadata == Metadata::fp8_e4m3 ? LOWKV_E4M3_HEADER : 0;
}

void CodesPart::lay_out(const kernels::Table& table) {
    const lowkv_section section =
        lowkv_lay_out({.width = kernels::number_of(codec.width),
                       .tokens = tokens(),
                       .head_dim = head_dim(),
                       .group = row_of(codec.group).size,
                       .by_channel = codec.axis == Axis::channel,
                       .keys = shape().part == Part::keys,
                       .has_zeros = has_zeros,
                       .has_mean = has_mean,
                       .has_factors = has_factors,
                       .metadata = static_cast<std::uint32_t>(codec.metadata)});
    group = section.group;
    group_rows = section.group_rows;
    row_entries = section.row_entries;
    mean_offset = section.mean;
    factors_offset = section.factors;
    codes_offset = section.codes;
    set_bytes(section.bytes);
    set_kernels(code_kernels(table));
}

void CodesPart::set_levels(std::span<const float> values) noexcept {
    // Ternary levels are even: the code is the level.
    const float steps = codec.width == Width::ternary ? 2.0f : 255.0f;
    level_zero = values.front();
    level_step = (values.back() - level_zero) / steps;
    for (std::size_t i = 0; i < values.size(); ++i) {
        levels[i] = static_cast<std::uint8_t>(std::lround((values[i] - level_zero) / level_step));
    }
}

void CodesPart::set_trellis() noexcept {
    const TrellisBook& book = trellis_book(trellis_bits(codec.width));
    levels = book.bytes();
    level_step = book.step;
    level_zero = -static_cast<float>(trellis_middle) * book.step;
}

const PartKernels& CodesPart::code_kernels(const kernels::Table& table) const {
    // Without a table of levels the code is the level. Six levels always have one, so that there
    // is one kernel for them.
    const bool even = codec.width == Width::ternary || codec.levels == Levels::uniform;
    const bool looks_up = codec.width == Width::senary || !even;
    std::string name(head.groups_along_lanes ? "folded-" : "unfolded-");
    name.append(row_of(codec.width).word);
    name.append(codec.levels == Levels::trellis ? "-trellis" : looks_up ? "-levels" : "");
    return kernels::find(table, name);
}

}  // namespace lowkv::codec
