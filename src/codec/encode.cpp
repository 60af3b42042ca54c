// Exact block -> packed block, methods.md section 1: ranges of all groups, their metadata rounded
// to its storage type, then codes. Everything is compiled for the baseline CPU without fused
// multiply-add, so that a block has the same bytes wherever it was encoded.
//
// NaN and infinities are not stored: a range ends at +-65504, and a NaN gets any code.

#include <algorithm>
#include <cstring>
#include <limits>

#include "codec/balanced_codec.h"
#include "codec/float16.h"
#include "codec/head.h"
#include "codec/metadata.h"
#include "codec/packing.h"
#include "codec/row_codec.h"
#include "codec/token_codec.h"
#include "codec/uniform.h"

namespace lowkv {
namespace codec {
namespace {

using kernels::unit_steps;

// Halves compare like these integers, eight to an SSE register.
std::int16_t ordered(std::uint16_t half) noexcept {
    const auto bits = static_cast<std::int16_t>(half);
    return static_cast<std::int16_t>(bits ^ ((bits >> 15) & 0x7fff));
}
constexpr std::int16_t ordered_max = 0x7bff;                              // 65504
constexpr std::int16_t ordered_min = static_cast<std::int16_t>(~0x7bff);  // -65504

float finite_value(std::int16_t order) noexcept {
    const std::int16_t finite = std::clamp(order, ordered_min, ordered_max);
    return f16_to_f32(static_cast<std::uint16_t>(finite ^ ((finite >> 15) & 0x7fff)));
}

void set_range(Groups& groups, std::size_t group, std::int16_t low, std::int16_t high,
               float levels) noexcept {
    const float min = finite_value(low);
    groups.zero[group] = min;
    groups.scale[group] = (finite_value(high) - min) / levels;
}

struct Range {
    std::int16_t low, high;
};

// `count` is a multiple of 16.
Range range_of(const std::uint16_t* halves, std::uint32_t count) noexcept {
    constexpr std::uint32_t width = 8;
    std::int16_t low[width];
    std::int16_t high[width];
    for (std::uint32_t j = 0; j < width; ++j) low[j] = high[j] = ordered(halves[j]);
    for (std::uint32_t i = width; i < count; i += width) {
        for (std::uint32_t j = 0; j < width; ++j) {
            const std::int16_t value = ordered(halves[i + j]);
            low[j] = std::min(low[j], value);
            high[j] = std::max(high[j], value);
        }
    }
    for (std::uint32_t half = width / 2; half > 0; half /= 2) {
        for (std::uint32_t j = 0; j < half; ++j) {
            low[j] = std::min(low[j], low[j + half]);
            high[j] = std::max(high[j], high[j + half]);
        }
    }
    return {low[0], high[0]};
}

void ranges_along_lanes(const std::uint16_t* rows, const HeadShape& head, const PartLayout& layout,
                        float levels, Groups& groups) noexcept {
    for (std::uint32_t step = 0; step < head.steps; ++step) {
        const std::uint16_t* row = rows + step * head.row_stride;
        for (std::uint32_t r = 0; r < layout.group_rows; ++r) {
            const std::uint32_t first = r * layout.group;
            const std::uint32_t count = std::min(layout.group, head.lanes - first);
            const Range range = range_of(row + first, count);
            set_range(groups, std::size_t{r} * layout.row_entries + step, range.low, range.high,
                      levels);
        }
    }
}

void ranges_along_steps(const std::uint16_t* rows, const HeadShape& head, const PartLayout& layout,
                        float levels, Groups& groups) noexcept {
    for (std::uint32_t r = 0; r < layout.group_rows; ++r) {
        const std::uint32_t first = r * layout.group;
        const std::uint32_t last = std::min(first + layout.group, head.steps);
        std::int16_t low[max_lanes];
        std::int16_t high[max_lanes];
        std::fill_n(low, head.lanes, std::numeric_limits<std::int16_t>::max());
        std::fill_n(high, head.lanes, std::numeric_limits<std::int16_t>::min());
        for (std::uint32_t step = first; step < last; ++step) {
            const std::uint16_t* row = rows + step * head.row_stride;
            for (std::uint32_t lane = 0; lane < head.lanes; ++lane) {
                const std::int16_t value = ordered(row[lane]);
                low[lane] = std::min(low[lane], value);
                high[lane] = std::max(high[lane], value);
            }
        }
        for (std::uint32_t lane = 0; lane < head.lanes; ++lane) {
            set_range(groups, std::size_t{r} * layout.row_entries + lane, low[lane], high[lane],
                      levels);
        }
    }
}

// Shortens each group's range to the share with the least squared error.
void search_ranges(const std::uint16_t* rows, const HeadShape& head, const PartLayout& layout,
                   float levels, Groups& groups) noexcept {
    const bool by_lanes = head.groups_along_lanes;
    const std::uint32_t grouped = by_lanes ? head.lanes : head.steps;
    const std::size_t stride = by_lanes ? 1 : head.row_stride;
    const std::size_t entry_stride = by_lanes ? head.row_stride : 1;
    for (std::uint32_t r = 0; r < layout.group_rows; ++r) {
        const std::uint32_t first = r * layout.group;
        const std::uint32_t count = std::min(layout.group, grouped - first);
        for (std::uint32_t e = 0; e < layout.row_entries; ++e) {
            const std::uint16_t* from = rows + e * entry_stride + first * stride;
            float x[max_lanes];
            for (std::uint32_t i = 0; i < count; ++i) x[i] = f16_to_f32(from[i * stride]);
            const std::size_t g = std::size_t{r} * layout.row_entries + e;
            const Steps steps = searched_steps(x, count, {groups.scale[g], groups.zero[g]}, levels);
            groups.scale[g] = steps.scale;
            groups.zero[g] = steps.zero;
        }
    }
}

void quantize_along_lanes(const std::uint16_t* row, std::uint32_t step, const HeadShape& head,
                          const PartLayout& layout, float levels, const Groups& groups,
                          std::uint8_t* __restrict codes) noexcept {
    for (std::uint32_t r = 0; r < layout.group_rows; ++r) {
        const std::size_t group = std::size_t{r} * layout.row_entries + step;
        const float zero = groups.zero[group];
        const float scale = divisor(groups.scale[group]);
        const std::uint32_t first = r * layout.group;
        const std::uint32_t last = std::min(first + layout.group, head.lanes);
        for (std::uint32_t lane = first; lane < last; ++lane) {
            codes[lane] = uniform_code(f16_to_f32(row[lane]), zero, scale, levels);
        }
    }
}

void quantize_along_steps(const std::uint16_t* row, std::uint32_t step, const HeadShape& head,
                          const PartLayout& layout, float levels, const Groups& groups,
                          std::uint8_t* __restrict codes) noexcept {
    const std::size_t first = std::size_t{step / layout.group} * layout.row_entries;
    const float* zeros = groups.zero + first;
    const float* scales = groups.scale + first;
    for (std::uint32_t lane = 0; lane < head.lanes; ++lane) {
        codes[lane] =
            uniform_code(f16_to_f32(row[lane]), zeros[lane], divisor(scales[lane]), levels);
    }
}

void encode_head(const std::uint16_t* rows, const HeadShape& head, const PartLayout& layout,
                 std::byte* section) noexcept {
    const std::uint32_t bits = layout.codec.bits;
    const auto levels = static_cast<float>(layout.codec.level_count() - 1);
    std::memset(section, 0, layout.head_bytes);
    Groups groups;
    const auto ranges = head.groups_along_lanes ? ranges_along_lanes : ranges_along_steps;
    ranges(rows, head, layout, levels, groups);
    if (layout.codec.clip == Clip::search) search_ranges(rows, head, layout, levels, groups);
    write_metadata(layout, section, groups);

    const auto quantize = head.groups_along_lanes ? quantize_along_lanes : quantize_along_steps;
    auto* codes = reinterpret_cast<std::uint8_t*>(section + layout.codes_offset);
    CodeTile tile;
    for (std::uint32_t block = 0; block < head.steps / unit_steps; ++block) {
        for (std::uint32_t s = 0; s < unit_steps; ++s) {
            const std::uint32_t step = block * unit_steps + s;
            quantize(rows + step * head.row_stride, step, head, layout, levels, groups,
                     tile.row[s]);
        }
        pack_tile(tile, bits, head, block, codes);
    }
}

void copy_exact_head(const std::uint16_t* rows, const HeadShape& head, std::byte* part) noexcept {
    std::byte* out = part + head.offset * sizeof *rows;
    for (std::uint32_t step = 0; step < head.steps; ++step) {
        std::memcpy(out + step * head.row_stride * sizeof *rows, rows + step * head.row_stride,
                    head.lanes * sizeof *rows);
    }
}

}  // namespace
}  // namespace codec

void encode_rows(const Plan& plan, const std::byte* exact, std::byte* packed) noexcept {
    const auto* positions =
        reinterpret_cast<const std::int32_t*>(exact + plan.exact_positions_offset());
    for (const codec::Part part : {codec::Part::keys, codec::Part::values}) {
        if (codec::layout_of(plan, part).row == nullptr) continue;
        codec::encode_shared_rows(
            plan, part,
            reinterpret_cast<const std::uint16_t*>(exact + codec::exact_offset(plan, part)),
            plan.has_positions() ? positions : nullptr, packed + codec::packed_offset(plan, part));
    }
}

void encode_block(const Plan& plan, const std::byte* exact, std::byte* packed,
                  std::uint32_t first_head, std::uint32_t last_head) noexcept {
    for (const codec::Part part : {codec::Part::keys, codec::Part::values}) {
        const PartLayout& layout = codec::layout_of(plan, part);
        const auto* in =
            reinterpret_cast<const std::uint16_t*>(exact + codec::exact_offset(plan, part));
        std::byte* out = packed + codec::packed_offset(plan, part);
        for (std::uint32_t h = first_head; h < last_head; ++h) {
            const codec::HeadShape head = codec::head_shape(plan, part, h);
            if (layout.codec.exact()) {
                codec::copy_exact_head(in + head.offset, head, out);
            } else if (layout.row != nullptr) {
                codec::encode_row_head(plan, part, h, in, out);
            } else if (layout.codec.balanced) {
                codec::encode_balanced_head(in + head.offset, head, part, layout,
                                            out + h * layout.head_bytes);
            } else if (codec::is_token_codec(layout.codec)) {
                codec::encode_token_head(in + head.offset, head, part, layout,
                                         out + h * layout.head_bytes);
            } else {
                codec::encode_head(in + head.offset, head, layout, out + h * layout.head_bytes);
            }
        }
    }
}

}  // namespace lowkv
