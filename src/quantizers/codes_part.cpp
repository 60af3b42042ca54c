#include "quantizers/codes_part.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "codec/units.h"
#include "isa/table.h"
#include "lowkv/codebook.h"
#include "quantizers/metadata.h"

namespace lowkv::codec {
namespace {

template <class Enum>
constexpr std::uint32_t number(Enum value) {
    return static_cast<std::uint32_t>(value);
}
static_assert(number(Levels::uniform) == LOWKV_EVEN_LEVELS &&
              number(Levels::normal) == LOWKV_NORMAL_LEVELS &&
              number(Levels::trellis) == LOWKV_TRELLIS_LEVELS);
static_assert(number(Metadata::fp16) == LOWKV_F16 && number(Metadata::fp8_e4m3) == LOWKV_E4M3 &&
              number(Metadata::fp8_e5m3) == LOWKV_E5M3);
static_assert(number(Rotate::none) == LOWKV_NOT_ROTATED &&
              number(Rotate::hadamard) == LOWKV_HADAMARD && number(Fit::norm) == LOWKV_FIT_NORM &&
              number(Fit::unbiased) == LOWKV_FIT_UNBIASED && number(Fit::least) == LOWKV_FIT_LEAST);

}  // namespace

CodesPart::CodesPart(const Codec& its_codec, const PartShape& its_shape) noexcept
    : PackedPart(its_shape), lowkv_part{}, codec(its_codec) {
    by_channel = codec.axis == Axis::channel ? 1 : 0;
    keys = its_shape.part == Part::keys ? 1 : 0;
    tokens = its_shape.tokens;
    head_dim = its_shape.layer.head_dim;
    head = {its_shape.steps(), its_shape.lanes(), its_shape.exact_stride(), keys == by_channel};
    width = kernels::number_of(codec.width);
    metadata = number(codec.metadata);
    metadata_at = codec.metadata == Metadata::fp8_e4m3 ? LOWKV_E4M3_HEADER : 0;
    levels = number(codec.levels);
    fit = number(codec.fit);
    lowkv_part::rotation = number(codec.rotation);
    search = codec.clip == Clip::search ? 1 : 0;
    has_zeros = 1;
    top = static_cast<float>(codec.level_count() - 1);
    level_step = 1;
    for (std::uint8_t code = 0; code < 16; ++code) level[code] = code;
    set_plain(this);
}

void CodesPart::lay_out(const kernels::Table& table) {
    const lowkv_section section = lowkv_lay_out({.width = width,
                                                 .tokens = tokens,
                                                 .head_dim = head_dim,
                                                 .group = row_of(codec.group).size,
                                                 .by_channel = by_channel,
                                                 .keys = keys,
                                                 .has_zeros = has_zeros,
                                                 .has_mean = has_mean,
                                                 .metadata = metadata});
    group = section.group;
    group_rows = section.group_rows;
    row_entries = section.row_entries;
    mean_at = section.mean;
    codes_at = section.codes;
    set_bytes(section.bytes);
    set_kernels(code_kernels(table));
}

void CodesPart::set_levels(std::span<const float> values) noexcept {
    // Ternary levels are even: the code is the level.
    const float steps = codec.width == Width::ternary ? 2.0f : 255.0f;
    level_zero = values.front();
    level_step = (values.back() - level_zero) / steps;
    for (std::size_t i = 0; i < values.size(); ++i) {
        level[i] = static_cast<std::uint8_t>(std::lround((values[i] - level_zero) / level_step));
    }
}

void CodesPart::set_trellis() noexcept {
    const TrellisBook& book = trellis_book(trellis_bits(codec.width));
    std::ranges::copy(book.bytes(), level);
    level_step = book.step;
    level_zero = -static_cast<float>(trellis_middle) * book.step;
}

const PartKernels& CodesPart::code_kernels(const kernels::Table& table) const {
    // Without a table of levels the code is the level.
    const bool even = codec.width == Width::ternary || codec.levels == Levels::uniform;
    std::string name(head.groups_along_lanes ? "folded-" : "unfolded-");
    name.append(row_of(codec.width).word);
    name.append(codec.levels == Levels::trellis ? "-trellis" : !even ? "-levels" : "");
    return kernels::find(table, name);
}

}  // namespace lowkv::codec
