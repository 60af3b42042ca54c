#include "families/codes_part.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "families/metadata.h"
#include "kernels/table.h"
#include "kernels/units.h"

namespace lowkv::codec {
namespace {

constexpr std::size_t fp8_header_bytes = 16;  // two f32, padded so that metadata stays aligned

}  // namespace

CodesPart::CodesPart(const Codec& its_codec, const PartShape& its_shape) noexcept
    : PackedPart(its_shape), codec(its_codec) {
    const bool by_channel = codec.axis == Axis::channel;
    const bool keys = its_shape.part == Part::keys;
    head = {its_shape.steps(), its_shape.lanes(), its_shape.exact_stride(), keys == by_channel};
    f16_metadata = codec.metadata == Metadata::fp16;
    metadata_offset = f16_metadata ? 0 : fp8_header_bytes;
}

void CodesPart::lay_out(const kernels::Table& table) {
    const bool by_channel = codec.axis == Axis::channel;
    const std::uint32_t grouped = by_channel ? tokens() : head_dim();
    const std::uint32_t size = row_of(codec.group).size;
    group = size == 0 ? grouped : std::min(size, grouped);
    group_rows = ceil_div(grouped, group);
    row_entries = by_channel ? head_dim() : tokens();
    const std::size_t entries = std::size_t{group_rows} * row_entries;
    mean_offset = metadata_offset + (has_zeros ? 2 : 1) * entries * metadata_bytes(codec.metadata);
    factors_offset = mean_offset + (has_mean ? std::size_t{2} * head_dim() : 0);
    const std::size_t factors = has_factors ? std::size_t{2} * grouped : 0;
    codes_offset = round_up(factors_offset + factors, cache_line);
    set_bytes(codes_offset + kernels::codes_bytes(codec.width, head.lanes, head.steps));
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

const PartKernels& CodesPart::code_kernels(const kernels::Table& table) const {
    // Without a table of levels the code is the level. Six levels always have one, so that there
    // is one kernel for them.
    const bool even = codec.width == Width::ternary || codec.levels == Levels::uniform;
    const bool looks_up = codec.width == Width::senary || !even;
    std::string name(head.groups_along_lanes ? "folded-" : "unfolded-");
    name.append(row_of(codec.width).word).append(looks_up ? "-levels" : "");
    return kernels::find(table, name);
}

}  // namespace lowkv::codec
