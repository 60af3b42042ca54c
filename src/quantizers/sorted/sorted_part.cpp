#include "quantizers/sorted/sorted_part.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "isa/table.h"
#include "lowkv/codebook.h"

namespace lowkv::codec {
namespace {

// Decoded levels are drawn out by this, so that a token's groups keep their sizes: those of few
// bits shrink the most. `mse`: what they lose of N(0, 1).
float gain(double mse) { return static_cast<float>(1 / std::sqrt(1 - mse)); }

void set_normal(lowkv_sorted_levels& levels) noexcept {
    const NormalCodebook& book = normal_codebook(levels.count);
    const float top = book.level[book.count - 1];
    for (std::uint32_t i = 0; i < book.count; ++i) {
        levels.level[i] =
            static_cast<std::uint32_t>(std::lround((book.level[i] / top + 1) * middle_level));
        levels.bytes[i] = static_cast<std::uint8_t>(
            i < 16 ? levels.level[i] : levels.level[i] - levels.level[i - 16]);
    }
    levels.step = gain(book.mse) * top / middle_level;
}

void set_trellis(lowkv_sorted_levels& levels, std::uint32_t bits) noexcept {
    const TrellisBook& book = trellis_book(bits);
    levels.trellis = 1;
    std::ranges::copy(book.bytes(), levels.bytes);
    std::ranges::copy(book.bytes(), levels.level);
    levels.step = gain(book.mse) * book.step;
    levels.path = path_costs(bits);
}
static_assert(trellis_middle == middle_level);

}  // namespace

SortedPart::SortedPart(const Codec& codec, const PartShape& its_shape)
    : PackedPart(its_shape), lowkv_sorted{}, plain_part{} {
    const std::uint32_t head_dim = its_shape.layer.head_dim;
    head = {.tokens = its_shape.tokens,
            .head_dim = head_dim,
            .rows = codec.exact_rows,
            .bits = {},
            .weighted = codec.weighted};
    for (unsigned q = 0; q < 4; ++q) head.bits[q] = codec.quarter_bits[q];
    section = lowkv_lay_out_sorted(head);
    for (std::uint32_t bits = 1; bits < std::size(levels); ++bits) {
        const NormalCodebook& book = normal_codebook(1u << bits);
        levels[bits].count = book.count;
        std::ranges::copy(book.level, levels[bits].nearest);
        std::ranges::copy(book.boundary, levels[bits].boundary);
        if (codec.levels == Levels::trellis && bits <= std::size(trellis_books)) {
            set_trellis(levels[bits], bits);
        } else {
            set_normal(levels[bits]);
        }
    }
    for (std::uint32_t g = 0; g < section.groups; ++g) {
        const std::uint32_t its_bits = lowkv_sorted_bits(head, g);
        if (its_bits == 0) break;
        const std::uint32_t codes = section.codes + lowkv_sorted_codes(head, g);
        groups[g] = {its_bits, codes};
        if (run_count == 0 || runs[run_count - 1].bits != its_bits)
            runs[run_count++] = {its_bits, g, 0, codes};
        ++runs[run_count - 1].groups;
        ++coded_groups;
    }
    set_bytes(section.bytes);
    set_statistics(codec.weighted);
    plain_part.sorted = head;
    // What tells it from another plan's: all else follows from the head.
    plain_part.levels =
        codec.levels == Levels::trellis ? LOWKV_TRELLIS_LEVELS : LOWKV_NORMAL_LEVELS;
    plain_part.row_entries = its_shape.tokens;
    plain_part.group_rows = 1;
    set_plain(&plain_part, this);
}

}  // namespace lowkv::codec
