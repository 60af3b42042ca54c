#include "families/sorted/sorted_part.h"

#include <cmath>

#include "codec/lloyd_max.h"

namespace lowkv::codec {
namespace {

// Decoded levels are drawn out by this, so that a token's groups keep their sizes: those of few
// bits shrink the most.
constexpr float gains[] = {0.0f, 1.25f, 1.065f, 1.018f, 1.005f};

SortedLevels levels_of(std::uint32_t bits) {
    const NormalCodebook& book = normal_codebook(1u << bits);
    const float top = book.level[book.count - 1];
    SortedLevels levels;
    for (std::uint32_t i = 0; i < book.count; ++i)
        levels.level[i] =
            static_cast<std::uint8_t>(std::lround((book.level[i] / top + 1) * middle_level));
    levels.step = gains[bits] * top / middle_level;
    return levels;
}

}  // namespace

SortedPart::SortedPart(const Codec& codec, const PartShape& its_shape) : PackedPart(its_shape) {
    const std::uint32_t head_dim = its_shape.layer.head_dim;
    head = {.tokens = its_shape.tokens, .head_dim = head_dim, .rows = codec.exact_rows, .bits = {}};
    for (unsigned q = 0; q < 4; ++q) head.bits[q] = codec.quarter_bits[q];
    section = lowkv_lay_out_sorted(head);
    for (std::uint32_t bits = 1; bits <= 4; ++bits) levels[bits] = levels_of(bits);
    for (std::uint32_t g = 0; g < section.groups; ++g) {
        const std::uint32_t its_bits = lowkv_sorted_bits(head, g);
        if (its_bits == 0) break;
        if (run_count == 0 || runs[run_count - 1].bits != its_bits)
            runs[run_count++] = {its_bits, g, 0, section.codes + lowkv_sorted_codes(head, g)};
        ++runs[run_count - 1].groups;
        ++coded_groups;
    }
    set_bytes(section.bytes);
    set_statistics();
}

}  // namespace lowkv::codec
