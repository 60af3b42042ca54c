#include "quantizers/sorted/sorted_part.h"

#include <cmath>

#include "codec/lloyd_max.h"
#include "codec/trellis.h"
#include "isa/table.h"

namespace lowkv::codec {
namespace {

// Decoded levels are drawn out by this, so that a token's groups keep their sizes: those of few
// bits shrink the most. `mse`: what they lose of N(0, 1).
float gain(double mse) { return static_cast<float>(1 / std::sqrt(1 - mse)); }

SortedLevels normal_levels(std::uint32_t bits) {
    const NormalCodebook& book = normal_codebook(1u << bits);
    const float top = book.level[book.count - 1];
    SortedLevels levels;
    for (std::uint32_t i = 0; i < book.count; ++i)
        levels.level[i] =
            static_cast<std::uint8_t>(std::lround((book.level[i] / top + 1) * middle_level));
    for (std::uint32_t i = 16; i < book.count; ++i)
        levels.level[i] = static_cast<std::uint8_t>(levels.level[i] - levels.level[i - 16]);
    levels.step = gain(book.mse) * top / middle_level;
    return levels;
}

SortedLevels trellis_levels(std::uint32_t bits, const kernels::Table& table) {
    const TrellisBook& book = trellis_book(bits);
    SortedLevels levels{.level = book.bytes(),
                        .step = gain(book.mse) * book.step,
                        .encode = table.encode_trellis[bits - 1]};
    for (std::uint32_t window = 0; window < LOWKV_WINDOWS; ++window)
        levels.path_level[window] = static_cast<float>(book.level(window)) * book.step;
    return levels;
}
static_assert(trellis_middle == middle_level);

}  // namespace

SortedPart::SortedPart(const Codec& codec, const PartShape& its_shape, const kernels::Table& table)
    : PackedPart(its_shape) {
    const std::uint32_t head_dim = its_shape.layer.head_dim;
    head = {.tokens = its_shape.tokens,
            .head_dim = head_dim,
            .rows = codec.exact_rows,
            .bits = {},
            .weighted = codec.weighted};
    for (unsigned q = 0; q < 4; ++q) head.bits[q] = codec.quarter_bits[q];
    section = lowkv_lay_out_sorted(head);
    for (std::uint32_t bits = 1; bits < levels.size(); ++bits) {
        levels[bits] = codec.levels == Levels::trellis && bits <= std::size(trellis_books)
                           ? trellis_levels(bits, table)
                           : normal_levels(bits);
        levels[bits].fit = table.fit_group[bits - 1];
    }
    for (std::uint32_t g = 0; g < section.groups; ++g) {
        const std::uint32_t its_bits = lowkv_sorted_bits(head, g);
        if (its_bits == 0) break;
        if (run_count == 0 || runs[run_count - 1].bits != its_bits)
            runs[run_count++] = {its_bits, g, 0, section.codes + lowkv_sorted_codes(head, g)};
        ++runs[run_count - 1].groups;
        ++coded_groups;
    }
    set_bytes(section.bytes);
    set_statistics(codec.weighted);
}

}  // namespace lowkv::codec
