#pragma once
// A part whose heads have metadata (scales and zeros of groups) and codes in units: what the
// grouped and the row quantizer have in common, and what the code kernels
// read.
//
// A head's section is that of lowkv/format.h. Normal levels have no zeros; centred, rotated keys
// have a mean; a balanced code stands for factor * (code * scale + zero). The row quantizer has
// header and metadata in the section that its heads share.
//
// A code stands for level(code) * scale + zero. Levels that are not uniform are kept in 8 bits, so
// that kernels multiply integers: level(code) = levels[code] * level_step + level_zero.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "codec/uniform.h"
#include "lowkv/format.h"
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

struct CodesPart : PackedPart {
    Codec codec;
    // Uniform levels: the codes. A trellis adds two: see level_of().
    std::array<std::uint8_t, 32> levels{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float level_step = 1.0f;
    float level_zero = 0.0f;
    bool has_zeros = true;
    bool has_mean = false;
    bool has_factors = false;
    bool by_token = false;  // a token's numbers are changed before they are coded
    HeadShape head;
    std::uint32_t group = 0;          // elements: codec.group, at most head_dim along channels
    std::uint32_t group_rows = 0;     // metadata rows per head
    std::uint32_t row_entries = 0;    // scales per row
    std::size_t metadata_offset = 0;  // within a section, as those below
    std::size_t mean_offset = 0;
    std::size_t factors_offset = 0;
    std::size_t codes_offset = 0;

    // On the grid of 8 bits. A trellis: of a window (lowkv/format.h), whose two halves overlap.
    std::uint8_t level_of(std::uint32_t code) const noexcept {
        if (codec.levels != Levels::trellis) return levels[code];
        return static_cast<std::uint8_t>(levels[code & 15] + levels[16 + (code >> 2)]);
    }
    // Of a code: 0 to top().
    float top() const noexcept { return static_cast<float>(codec.level_count() - 1); }
    std::uint32_t tokens() const noexcept { return shape().tokens; }
    std::uint32_t head_dim() const noexcept { return shape().layer.head_dim; }
    // Where a head begins in the exact and in the packed part.
    const std::uint16_t* rows(const std::uint16_t* exact, std::uint32_t h) const noexcept {
        return exact + shape().exact_offset(h);
    }
    std::uint16_t* rows(std::uint16_t* exact, std::uint32_t h) const noexcept {
        return exact + shape().exact_offset(h);
    }
    // The section that has a head's metadata.
    const std::byte* metadata_section(const PackedHead& x) const noexcept {
        return shared_bytes() > 0 ? x.shared : x.section;
    }

  protected:
    CodesPart(const Codec& its_codec, const PartShape& its_shape) noexcept;

    // A section of groups of its own, kernels included. has_zeros, has_mean and has_factors are set
    // before it.
    void lay_out(const kernels::Table& table);
    // From the lowest to the highest, on a grid of 8 bits.
    void set_levels(std::span<const float> values) noexcept;
    void set_trellis() noexcept;
    // By name: "folded-2", "unfolded-3-levels", "folded-2-trellis". Folded: scales vary along a
    // product's sum.
    const PartKernels& code_kernels(const kernels::Table& table) const;
};

}  // namespace lowkv::codec
