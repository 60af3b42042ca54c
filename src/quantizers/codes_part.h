#pragma once
// A part whose heads have metadata (scales and zeros of groups) and codes in units: what the
// grouped and the row quantizer have in common. Kernels read its lowkv_part.
//
// A head's section is that of lowkv/part.h. Normal levels have no zeros; centred, rotated keys
// have a mean. The row quantizer has header and metadata in the section that its heads share.
//
// A code stands for level(code) * scale + zero. Levels that are not uniform are kept in 8 bits, so
// that kernels multiply integers: level(code) = level[code] * level_step + level_zero.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "codec/uniform.h"
#include "lowkv/part.h"
#include "lowkv/quantizer.h"
#include "round.h"

namespace lowkv::codec {

inline constexpr std::uint32_t max_groups = 4096;  // of a section: 128 tokens x 32 groups of a row
inline constexpr std::size_t cache_line = LOWKV_CACHE_LINE;

// One head of an exact part, seen as the matrix whose codes are packed: `steps` rows of
// `lanes` contiguous f16.
struct HeadShape {
    std::uint32_t steps = 0, lanes = 0;
    std::size_t row_stride = 0;       // elements from one step to the next
    bool groups_along_lanes = false;  // one group is `group` lanes of a step; else steps of a lane
};

struct CodesPart : PackedPart, lowkv_part {
    using PackedPart::exact, PackedPart::head_bytes, PackedPart::rotation;
    Codec codec;
    HeadShape head;

    // On the grid of 8 bits. A trellis: of a window (lowkv/format.h), whose two halves overlap.
    std::uint8_t level_of(std::uint32_t code) const noexcept {
        if (codec.levels != Levels::trellis) return level[code % 32];
        return static_cast<std::uint8_t>(level[code & 15] + level[16 + (code >> 2)]);
    }
    // Where a head begins in the exact and in the packed part.
    const std::uint16_t* head_rows(const std::uint16_t* from, std::uint32_t h) const noexcept {
        return from + shape().exact_offset(h);
    }
    std::uint16_t* head_rows(std::uint16_t* from, std::uint32_t h) const noexcept {
        return from + shape().exact_offset(h);
    }

  protected:
    CodesPart(const Codec& its_codec, const PartShape& its_shape) noexcept;

    // A section of groups of its own, kernels included. has_zeros and has_mean are set before it.
    void lay_out(const kernels::Table& table);
    // From the lowest to the highest, on a grid of 8 bits.
    void set_levels(std::span<const float> values) noexcept;
    void set_trellis() noexcept;
    // By name: "folded-2", "unfolded-3-levels", "folded-2-trellis". Folded: scales vary along a
    // product's sum.
    const PartKernels& code_kernels(const kernels::Table& table) const;
};

}  // namespace lowkv::codec
