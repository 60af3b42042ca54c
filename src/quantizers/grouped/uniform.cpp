// Uniform groups (docs/methods/groups.md, "Uniform groups: KIVI and int"): the range of each group
// in even steps, its metadata rounded to its storage type first. Everything is compiled for the
// baseline CPU without fused multiply-add, so that a block has the same bytes wherever it was
// encoded.
//
// NaN and infinities are not stored: a range ends at +-65504, and a NaN gets any code.

#include <algorithm>
#include <cstring>
#include <limits>

#include "codec/small_floats.h"
#include "codec/uniform.h"
#include "quantizers/grouped/grouped.h"
#include "quantizers/metadata.h"
#include "quantizers/packing.h"

namespace lowkv::codec {
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

void ranges_along_lanes(const std::uint16_t* rows, const CodesPart& layout,
                        Groups& groups) noexcept {
    const HeadShape& head = layout.head;
    for (std::uint32_t step = 0; step < head.steps; ++step) {
        const std::uint16_t* row = rows + step * head.row_stride;
        for (std::uint32_t r = 0; r < layout.group_rows; ++r) {
            const std::uint32_t first = r * layout.group;
            const std::uint32_t count = std::min(layout.group, head.lanes - first);
            const Range range = range_of(row + first, count);
            set_range(groups, std::size_t{r} * layout.row_entries + step, range.low, range.high,
                      layout.top);
        }
    }
}

void ranges_along_steps(const std::uint16_t* rows, const CodesPart& layout,
                        Groups& groups) noexcept {
    const HeadShape& head = layout.head;
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
                      layout.top);
        }
    }
}

// Shortens each group's range to the share with the least squared error.
void search_ranges(const std::uint16_t* rows, const CodesPart& layout, Groups& groups) noexcept {
    const HeadShape& head = layout.head;
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
            const Grid grid =
                searched_grid(x, count, {groups.scale[g], groups.zero[g]}, layout.top);
            groups.scale[g] = grid.scale;
            groups.zero[g] = grid.zero;
        }
    }
}

// Calls f(lane, scale, zero) for a step's lanes.
template <class F>
void each_lane(std::uint32_t step, const CodesPart& layout, const Groups& groups, F f) noexcept {
    const HeadShape& head = layout.head;
    if (!head.groups_along_lanes) {
        const std::size_t first = std::size_t{step / layout.group} * layout.row_entries;
        const float* scales = groups.scale + first;
        const float* zeros = groups.zero + first;
        for (std::uint32_t lane = 0; lane < head.lanes; ++lane) f(lane, scales[lane], zeros[lane]);
        return;
    }
    for (std::uint32_t r = 0; r < layout.group_rows; ++r) {
        const std::size_t group = std::size_t{r} * layout.row_entries + step;
        const float scale = groups.scale[group], zero = groups.zero[group];
        const std::uint32_t first = r * layout.group;
        const std::uint32_t last = std::min(first + layout.group, head.lanes);
        for (std::uint32_t lane = first; lane < last; ++lane) f(lane, scale, zero);
    }
}

class UniformPart final : public CodesPart {
  public:
    UniformPart(const Codec& its_codec, const PartShape& its_shape, const PartInputs& inputs)
        : CodesPart(its_codec, its_shape) {
        set_on_devices();
        lay_out(*inputs.table);
    }

    void encode_head(const std::uint16_t* exact, std::uint32_t h, std::byte* packed,
                     const EncodeHints&) const noexcept override {
        const std::uint16_t* from = head_rows(exact, h);
        std::byte* section = packed + section_offset(h);
        std::memset(section, 0, head_bytes());
        Groups groups;
        const auto ranges = head.groups_along_lanes ? ranges_along_lanes : ranges_along_steps;
        ranges(from, *this, groups);
        if (codec.clip == Clip::search) search_ranges(from, *this, groups);
        write_metadata(*this, section, groups);

        auto* codes = reinterpret_cast<std::uint8_t*>(section + codes_at);
        CodeTile tile;
        for (std::uint32_t block = 0; block < head.steps / unit_steps; ++block) {
            for (std::uint32_t s = 0; s < unit_steps; ++s) {
                const std::uint32_t step = block * unit_steps + s;
                const std::uint16_t* row = from + step * head.row_stride;
                each_lane(step, *this, groups,
                          [row, to = tile.row[s], most = top](std::uint32_t lane, float scale,
                                                              float zero) {
                              to[lane] = lowkv_uniform_code(f16_to_f32(row[lane]), zero,
                                                            lowkv_divisor(scale), most);
                          });
            }
            pack_tile(tile, codec.width, head, block, codes);
        }
    }

    void decode_head(const std::byte* packed, std::uint32_t h,
                     std::uint16_t* exact) const noexcept override {
        const std::byte* section = packed + section_offset(h);
        Groups groups;
        read_metadata(*this, section, groups);
        const auto* codes = reinterpret_cast<const std::uint8_t*>(section + codes_at);
        CodeTile tile;
        for (std::uint32_t step = 0; step < head.steps; ++step) {
            if (step % unit_steps == 0) {
                unpack_tile(codes, codec.width, head, step / unit_steps, tile);
            }
            std::uint16_t* row = head_rows(exact, h) + step * head.row_stride;
            each_lane(step, *this, groups,
                      [row, from = tile.row[step % unit_steps]](std::uint32_t lane, float scale,
                                                                float zero) {
                          row[lane] = f32_to_f16(static_cast<float>(from[lane]) * scale + zero);
                      });
        }
    }
};

}  // namespace

std::shared_ptr<const PackedPart> make_uniform(const Codec& codec, const PartShape& shape,
                                               const PartInputs& inputs) {
    return std::make_shared<UniformPart>(codec, shape, inputs);
}

}  // namespace lowkv::codec
