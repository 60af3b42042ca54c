#include "quantizers/sorted/section.h"

namespace lowkv::codec {
namespace {

constexpr std::uint32_t sorted_tokens = kernels::max_block_tokens;

// A group's codes lie as those of a head of 16 channels.
constexpr HeadShape group_shape{sorted_group, sorted_tokens, sorted_tokens};

Width width_of(std::uint32_t bits) noexcept {
    return static_cast<Width>(lowkv_width_of_bits(bits));
}

// Where fifth bits begin, behind the low four.
std::uint32_t fifth_bits() noexcept { return lowkv_sorted_fifth_bits(sorted_tokens); }

}  // namespace

void pack_group(const CodeTile& tile, std::uint32_t bits, std::uint8_t* codes) noexcept {
    pack_tile(tile, width_of(bits), group_shape, 0, codes);
    if (bits < 5) return;
    CodeTile fifth;
    for (std::uint32_t i = 0; i < sorted_group; ++i)
        for (std::uint32_t t = 0; t < sorted_tokens; ++t)
            fifth.row[i][t] = static_cast<std::uint8_t>(tile.row[i][t] >> 4);
    pack_tile(fifth, Width::one, group_shape, 0, codes + fifth_bits());
}

void unpack_group(const std::uint8_t* codes, std::uint32_t bits, bool trellis,
                  CodeTile& tile) noexcept {
    unpack_tile(codes, width_of(bits), group_shape, 0, tile);
    if (trellis) open_windows(tile, width_of(bits), sorted_tokens);
    if (bits < 5) return;
    CodeTile fifth;
    unpack_tile(codes + fifth_bits(), Width::one, group_shape, 0, fifth);
    for (std::uint32_t i = 0; i < sorted_group; ++i)
        for (std::uint32_t t = 0; t < sorted_tokens; ++t)
            tile.row[i][t] = static_cast<std::uint8_t>(tile.row[i][t] | fifth.row[i][t] << 4);
}

}  // namespace lowkv::codec
