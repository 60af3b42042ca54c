// Packed block -> exact block: x^ = code * scale + zero, rounded to f16.

#include <algorithm>
#include <cstring>

#include "codec/balanced_codec.h"
#include "codec/float16.h"
#include "codec/head.h"
#include "codec/metadata.h"
#include "codec/packing.h"
#include "codec/row_codec.h"
#include "codec/token_codec.h"

namespace lowkv {
namespace codec {
namespace {

using kernels::unit_steps;

void dequantize_along_lanes(const std::uint8_t* codes, std::uint32_t step, const HeadShape& head,
                            const PartLayout& layout, const Groups& groups,
                            std::uint16_t* __restrict row) noexcept {
    for (std::uint32_t r = 0; r < layout.group_rows; ++r) {
        const std::size_t group = std::size_t{r} * layout.row_entries + step;
        const float scale = groups.scale[group];
        const float zero = groups.zero[group];
        const std::uint32_t first = r * layout.group;
        const std::uint32_t last = std::min(first + layout.group, head.lanes);
        for (std::uint32_t lane = first; lane < last; ++lane) {
            row[lane] = f32_to_f16(static_cast<float>(codes[lane]) * scale + zero);
        }
    }
}

void dequantize_along_steps(const std::uint8_t* codes, std::uint32_t step, const HeadShape& head,
                            const PartLayout& layout, const Groups& groups,
                            std::uint16_t* __restrict row) noexcept {
    const std::size_t first = std::size_t{step / layout.group} * layout.row_entries;
    const float* scales = groups.scale + first;
    const float* zeros = groups.zero + first;
    for (std::uint32_t lane = 0; lane < head.lanes; ++lane) {
        row[lane] = f32_to_f16(static_cast<float>(codes[lane]) * scales[lane] + zeros[lane]);
    }
}

void decode_head(const std::byte* section, const HeadShape& head, const PartLayout& layout,
                 std::uint16_t* rows) noexcept {
    Groups groups;
    read_metadata(layout, section, groups);
    const auto dequantize =
        head.groups_along_lanes ? dequantize_along_lanes : dequantize_along_steps;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(section + layout.codes_offset);
    CodeTile tile;
    for (std::uint32_t step = 0; step < head.steps; ++step) {
        if (step % unit_steps == 0) {
            unpack_tile(codes, layout.codec.bits, head, step / unit_steps, tile);
        }
        dequantize(tile.row[step % unit_steps], step, head, layout, groups,
                   rows + step * head.row_stride);
    }
}

}  // namespace
}  // namespace codec

void decode_block(const Plan& plan, const std::byte* packed, std::byte* exact) noexcept {
    for (const codec::Part part : {codec::Part::keys, codec::Part::values}) {
        const PartLayout& layout = codec::layout_of(plan, part);
        const std::byte* in = packed + codec::packed_offset(plan, part);
        std::byte* out = exact + codec::exact_offset(plan, part);
        if (layout.codec.exact()) {
            std::memcpy(out, in, layout.bytes);
            continue;
        }
        for (std::uint32_t h = 0; h < plan.shape().kv_heads; ++h) {
            const codec::HeadShape head = codec::head_shape(plan, part, h);
            if (layout.row != nullptr) {
                codec::decode_row_head(plan, part, h, in, reinterpret_cast<std::uint16_t*>(out));
                continue;
            }
            const std::byte* section = in + h * layout.head_bytes;
            auto* rows = reinterpret_cast<std::uint16_t*>(out) + head.offset;
            if (layout.codec.balanced) {
                codec::decode_balanced_head(section, head, part, layout, rows);
            } else if (codec::is_token_codec(layout.codec)) {
                codec::decode_token_head(section, head, part, layout, rows);
            } else {
                codec::decode_head(section, head, layout, rows);
            }
        }
    }
    if (!plan.has_positions()) return;
    std::memcpy(exact + plan.exact_positions_offset(), packed + plan.keys().positions_offset,
                sizeof(std::int32_t) * plan.block_tokens());
}

}  // namespace lowkv
