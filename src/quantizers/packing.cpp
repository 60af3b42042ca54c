#include "quantizers/packing.h"

#include <algorithm>
#include <cstring>

namespace lowkv::codec {
namespace {

using kernels::unit_lanes;
using kernels::unit_steps;

constexpr std::uint32_t tile_steps = 4;   // steps of a unit's tile: a lane's four bytes
constexpr std::size_t vector_bytes = 64;  // unit_lanes * tile_steps

std::uint32_t unit_of(const HeadShape& head, std::uint32_t lane, std::uint32_t step_block) {
    return lowkv_unit(head.steps, lane, step_block * unit_steps);
}

// Four rows of lanes, still to be interleaved to four bytes a lane.
struct Quad {
    alignas(64) std::uint8_t row[tile_steps][max_lanes];
};

// quad = OR over i < count of ((tile[first + i] >> drop) & mask) << (shift * i), tile j being rows
// 4j .. 4j+3. Eight codes at a time: no code ever crosses its byte.
void combine(const CodeTile& tile, std::uint32_t lanes, unsigned first, unsigned count,
             unsigned shift, unsigned drop, std::uint8_t mask, Quad& quad) {
    const std::uint64_t mask_word = mask * 0x0101010101010101u;
    for (unsigned k = 0; k < tile_steps; ++k) {
        for (std::uint32_t lane = 0; lane < lanes; lane += 8) {
            std::uint64_t word = 0;
            for (unsigned i = 0; i < count; ++i) {
                std::uint64_t codes = 0;
                std::memcpy(&codes, &tile.row[tile_steps * (first + i) + k][lane], sizeof codes);
                word |= ((codes >> drop) & mask_word) << (shift * i);
            }
            std::memcpy(&quad.row[k][lane], &word, sizeof word);
        }
    }
}

void interleave(const Quad& quad, std::uint32_t lane, std::uint8_t* __restrict out) {
    for (std::uint32_t l = 0; l < unit_lanes; ++l) {
        for (std::uint32_t k = 0; k < tile_steps; ++k) {
            out[4 * l + k] = quad.row[lowkv_byte_of_step(k)][lane + l];
        }
    }
}

// 2, 4 and 8 bits, and the low 2 of 3.
template <unsigned Bits>
void pack_low(const CodeTile& tile, Width width, const HeadShape& head, std::uint32_t step_block,
              std::uint8_t* codes) {
    constexpr unsigned per_byte = 8 / Bits;
    for (unsigned v = 0; v < unit_steps / tile_steps / per_byte; ++v) {
        Quad quad;
        combine(tile, head.lanes, v * per_byte, per_byte, Bits, 0, (1u << Bits) - 1, quad);
        for (std::uint32_t lane = 0; lane < head.lanes; lane += unit_lanes) {
            const std::size_t unit = unit_of(head, lane, step_block);
            interleave(quad, lane, codes + kernels::unit_offset(width, unit) + vector_bytes * v);
        }
    }
}

// Where single bits of a pair of units lie: third bits, or codes of one bit.
std::size_t pair_offset(Width width, std::size_t unit) {
    return width == Width::one ? kernels::unit_offset(width, unit) : kernels::third_offset(unit);
}

// Bit number `bit` of codes, of which a pair of units share 64 bytes: the odd unit has the upper
// halves.
void pack_bit(const CodeTile& tile, Width width, unsigned bit, const HeadShape& head,
              std::uint32_t step_block, std::uint8_t* codes) {
    Quad quad;
    combine(tile, head.lanes, 0, unit_steps / tile_steps, 1, bit, 1, quad);
    for (std::uint32_t lane = 0; lane < head.lanes; lane += unit_lanes) {
        const std::size_t unit = unit_of(head, lane, step_block);
        std::uint8_t bits[vector_bytes];
        interleave(quad, lane, bits);
        std::uint8_t* out = codes + pair_offset(width, unit);
        const unsigned shift = unit % 2 == 0 ? 0 : 4;
        for (std::size_t b = 0; b < vector_bytes; ++b) {
            out[b] = static_cast<std::uint8_t>(out[b] | bits[b] << shift);
        }
    }
}

template <unsigned Bits>
void unpack_low(const std::uint8_t* codes, Width width, const HeadShape& head,
                std::uint32_t step_block, CodeTile& tile) {
    constexpr unsigned per_byte = 8 / Bits;
    for (std::uint32_t lane = 0; lane < head.lanes; lane += unit_lanes) {
        const std::uint8_t* in =
            codes + kernels::unit_offset(width, unit_of(head, lane, step_block));
        for (unsigned j = 0; j < unit_steps / tile_steps; ++j) {
            const std::uint8_t* vector = in + vector_bytes * (j / per_byte);
            const unsigned shift = Bits * (j % per_byte);
            for (std::uint32_t b = 0; b < vector_bytes; ++b) {
                tile.row[tile_steps * j + lowkv_byte_of_step(b % 4)][lane + b / 4] =
                    static_cast<std::uint8_t>((vector[b] >> shift) & ((1u << Bits) - 1));
            }
        }
    }
}

// To codes whose bits from this one on are 0.
void unpack_bit(const std::uint8_t* codes, Width width, unsigned bit, const HeadShape& head,
                std::uint32_t step_block, CodeTile& tile) {
    for (std::uint32_t lane = 0; lane < head.lanes; lane += unit_lanes) {
        const std::size_t unit = unit_of(head, lane, step_block);
        const std::uint8_t* in = codes + pair_offset(width, unit);
        for (unsigned j = 0; j < unit_steps / tile_steps; ++j) {
            const unsigned shift = (unit % 2 == 0 ? 0u : 4u) + j;
            for (std::uint32_t b = 0; b < vector_bytes; ++b) {
                std::uint8_t& code =
                    tile.row[tile_steps * j + lowkv_byte_of_step(b % 4)][lane + b / 4];
                code = static_cast<std::uint8_t>(code | ((in[b] >> shift) & 1) << bit);
            }
        }
    }
}

// Units share bytes: their digits are added.
void pack_digits(const CodeTile& tile, Width width, const HeadShape& head, std::uint32_t step_block,
                 std::uint8_t* codes) {
    for (unsigned j = 0; j < unit_steps / tile_steps; ++j) {
        Quad quad;
        combine(tile, head.lanes, j, 1, 0, 0, 7, quad);
        for (std::uint32_t lane = 0; lane < head.lanes; lane += unit_lanes) {
            const kernels::TilePlace to =
                kernels::tile_place(width, unit_of(head, lane, step_block), j);
            const unsigned power = lowkv_power(kernels::base_of(width), to.digit);
            std::uint8_t digits[vector_bytes];
            interleave(quad, lane, digits);
            std::uint8_t* out = codes + to.offset;
            for (std::size_t b = 0; b < vector_bytes; ++b) {
                out[b] = static_cast<std::uint8_t>(out[b] + digits[b] * power);
            }
        }
    }
}

void unpack_digits(const std::uint8_t* codes, Width width, const HeadShape& head,
                   std::uint32_t step_block, CodeTile& tile) {
    const unsigned base = kernels::base_of(width);
    for (std::uint32_t lane = 0; lane < head.lanes; lane += unit_lanes) {
        for (unsigned j = 0; j < unit_steps / tile_steps; ++j) {
            const kernels::TilePlace from =
                kernels::tile_place(width, unit_of(head, lane, step_block), j);
            const unsigned power = lowkv_power(base, from.digit);
            const std::uint8_t* in = codes + from.offset;
            for (std::uint32_t b = 0; b < vector_bytes; ++b) {
                tile.row[tile_steps * j + lowkv_byte_of_step(b % 4)][lane + b / 4] =
                    static_cast<std::uint8_t>(in[b] / power % base);
            }
        }
    }
}

}  // namespace

void pack_tile(const CodeTile& tile, Width width, const HeadShape& head, std::uint32_t step_block,
               std::uint8_t* codes) noexcept {
    switch (width) {
        case Width::eight: return pack_low<8>(tile, width, head, step_block, codes);
        case Width::four: return pack_low<4>(tile, width, head, step_block, codes);
        case Width::one: return pack_bit(tile, width, 0, head, step_block, codes);
        case Width::three: pack_bit(tile, width, 2, head, step_block, codes); [[fallthrough]];
        case Width::two: return pack_low<2>(tile, width, head, step_block, codes);
        default: return pack_digits(tile, width, head, step_block, codes);
    }
}

void unpack_tile(const std::uint8_t* codes, Width width, const HeadShape& head,
                 std::uint32_t step_block, CodeTile& tile) noexcept {
    switch (width) {
        case Width::eight: return unpack_low<8>(codes, width, head, step_block, tile);
        case Width::four: return unpack_low<4>(codes, width, head, step_block, tile);
        case Width::two: return unpack_low<2>(codes, width, head, step_block, tile);
        case Width::three:
            unpack_low<2>(codes, width, head, step_block, tile);
            return unpack_bit(codes, width, 2, head, step_block, tile);
        case Width::one:
            for (auto& row : tile.row) std::fill_n(row, head.lanes, std::uint8_t{0});
            return unpack_bit(codes, width, 0, head, step_block, tile);
        default: return unpack_digits(codes, width, head, step_block, tile);
    }
}

void pack_tokens(const TokenCodes& codes, const CodesPart& layout, std::byte* section) noexcept {
    const HeadShape& head = layout.head;
    CodeTile tile;
    for (std::uint32_t block = 0; block < head.steps / unit_steps; ++block) {
        for (std::uint32_t s = 0; s < unit_steps; ++s) {
            const std::uint32_t step = block * unit_steps + s;
            for (std::uint32_t lane = 0; lane < head.lanes; ++lane) {
                tile.row[s][lane] =
                    layout.keys != 0 ? codes.token[lane][step] : codes.token[step][lane];
            }
        }
        pack_tile(tile, layout.codec.width, head, block,
                  reinterpret_cast<std::uint8_t*>(section + layout.codes_at));
    }
}

// From the last code of a word to the first, beginning with those that follow the last one.
void open_windows(CodeTile& tile, Width width, std::uint32_t lanes) noexcept {
    const std::uint32_t number = kernels::number_of(width), own = lowkv_own_bits(number);
    const std::uint32_t following = lowkv_window_codes(number) - 1;
    for (std::uint32_t lane = 0; lane < lanes; lane += LOWKV_WORD_LANES) {
        const auto at = [&](std::uint32_t i) -> std::uint8_t& {
            return tile.row[lowkv_word_step(i)][lane + lowkv_word_lane(i)];
        };
        std::uint32_t window = 0;
        const auto put_before = [&](std::uint32_t code) {
            const std::uint32_t links = window >> own << lowkv_linked_bits(number);
            window = (code | links << own) % LOWKV_WINDOWS;
        };
        for (std::uint32_t i = following; i-- > 0;) put_before(at(i));
        for (std::uint32_t i = std::uint32_t{LOWKV_WORD_CODES}; i-- > 0;) {
            put_before(at(i));
            at(i) = static_cast<std::uint8_t>(window);
        }
    }
}

}  // namespace lowkv::codec
