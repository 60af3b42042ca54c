#pragma once
// Keys whose channels are sorted and have unequal bits: what encode and the kernels know of a part.
// A head's section is that of lowkv/format.h, "a head's section of sorted keys".
//
// Levels of every width, a trellis' too, are kept in 8 bits and lie evenly about 127, so that
// products of codes of all widths add up as integers: y = (level - middle_level) * step * unit *
// scale.

#include <array>
#include <cstddef>
#include <cstdint>

#include "isa/table.h"
#include "lowkv/format.h"
#include "lowkv/quantizer.h"

namespace lowkv::codec {

inline constexpr std::uint32_t max_sorted_dim = 576;  // any head_dim
inline constexpr std::uint32_t sorted_group = LOWKV_SORTED_GROUP;
inline constexpr std::uint32_t max_sorted_groups = max_sorted_dim / sorted_group;
inline constexpr std::uint32_t max_exact_rows = 4;
inline constexpr float middle_level = 127.0f;

// What codes of so many bits stand for: from the lowest to the highest, the first 0, the last 254.
// Of more than 16 levels: the lower half of them, then what the fifth bit adds to each. A trellis:
// two tables of 16, whose entries a window adds (lowkv/format.h).
struct SortedLevels {
    std::array<std::uint8_t, 32> level{};
    float step = 0;
    kernels::EncodeTrellis encode = nullptr;  // null: no trellis
    kernels::FitGroup fit = nullptr;
    // What the paths are chosen by, by window: levels of N(0, 1).
    std::array<float, LOWKV_WINDOWS> path_level{};

    bool trellis() const noexcept { return encode != nullptr; }
    std::uint32_t count(std::uint32_t bits) const noexcept {
        return trellis() ? LOWKV_WINDOWS : 1u << bits;
    }
    // Of a code, of a trellis a window: 0 to 254.
    std::uint32_t number_of(std::uint32_t code) const noexcept {
        const std::uint32_t first = level[code & 15];
        if (trellis()) return first + level[16 + (code >> 2)];
        return code < 16 ? first : first + level[code];
    }
    float of(std::uint32_t code) const noexcept {
        return (static_cast<float>(number_of(code)) - middle_level) * step;
    }
};

// Consecutive groups of one width.
struct SortedRun {
    std::uint32_t bits = 0, first_group = 0, groups = 0;
    std::size_t codes = 0;  // from the section's first byte
};

struct SortedPart : PackedPart {
    lowkv_sorted_head head;
    lowkv_sorted_section section;
    std::array<SortedLevels, 6> levels;  // by bits
    std::array<SortedRun, 4> runs;       // those with bits
    std::uint32_t run_count = 0;
    std::uint32_t coded_groups = 0;  // groups that have bits: the first ones

    std::uint32_t bits(std::uint32_t group) const noexcept {
        return group < coded_groups ? lowkv_sorted_bits(head, group) : 0;
    }

  protected:
    SortedPart(const Codec& codec, const PartShape& its_shape, const kernels::Table& table);
};

}  // namespace lowkv::codec
