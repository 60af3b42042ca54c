#include "codec/packing.h"

#include <cstring>

namespace lowkv::codec {
namespace {

using kernels::unit_lanes;
using kernels::unit_steps;

constexpr std::uint32_t tile_steps = 4;   // steps of a unit's tile: a lane's four bytes
constexpr std::size_t vector_bytes = 64;  // unit_lanes * tile_steps

std::size_t unit_number(const HeadShape& head, std::uint32_t lane, std::uint32_t step_block) {
    return std::size_t{lane / unit_lanes} * (head.steps / unit_steps) + step_block;
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
            out[4 * l + k] = quad.row[kernels::byte_of_step(k)][lane + l];
        }
    }
}

// 2, 4 and 8 bits, and the low 2 of 3.
template <unsigned Width>
void pack_low(const CodeTile& tile, std::uint32_t bits, const HeadShape& head,
              std::uint32_t step_block, std::uint8_t* codes) {
    constexpr unsigned per_byte = 8 / Width;
    for (unsigned v = 0; v < unit_steps / tile_steps / per_byte; ++v) {
        Quad quad;
        combine(tile, head.lanes, v * per_byte, per_byte, Width, 0, (1u << Width) - 1, quad);
        for (std::uint32_t lane = 0; lane < head.lanes; lane += unit_lanes) {
            const std::size_t unit = unit_number(head, lane, step_block);
            interleave(quad, lane, codes + kernels::unit_offset(bits, unit) + vector_bytes * v);
        }
    }
}

// The third bits of a pair of units share 64 bytes: the odd unit has the upper halves.
void pack_third(const CodeTile& tile, const HeadShape& head, std::uint32_t step_block,
                std::uint8_t* codes) {
    Quad quad;
    combine(tile, head.lanes, 0, unit_steps / tile_steps, 1, 2, 1, quad);
    for (std::uint32_t lane = 0; lane < head.lanes; lane += unit_lanes) {
        const std::size_t unit = unit_number(head, lane, step_block);
        std::uint8_t third[vector_bytes];
        interleave(quad, lane, third);
        std::uint8_t* out = codes + (unit / 2) * 192 + 128;
        const unsigned shift = unit % 2 == 0 ? 0 : 4;
        for (std::size_t b = 0; b < vector_bytes; ++b) {
            out[b] = static_cast<std::uint8_t>(out[b] | third[b] << shift);
        }
    }
}

template <unsigned Width>
void unpack_low(const std::uint8_t* codes, std::uint32_t bits, const HeadShape& head,
                std::uint32_t step_block, CodeTile& tile) {
    constexpr unsigned per_byte = 8 / Width;
    for (std::uint32_t lane = 0; lane < head.lanes; lane += unit_lanes) {
        const std::uint8_t* in =
            codes + kernels::unit_offset(bits, unit_number(head, lane, step_block));
        for (unsigned j = 0; j < unit_steps / tile_steps; ++j) {
            const std::uint8_t* vector = in + vector_bytes * (j / per_byte);
            const unsigned shift = Width * (j % per_byte);
            for (std::uint32_t b = 0; b < vector_bytes; ++b) {
                tile.row[tile_steps * j + kernels::byte_of_step(b % 4)][lane + b / 4] =
                    static_cast<std::uint8_t>((vector[b] >> shift) & ((1u << Width) - 1));
            }
        }
    }
}

void unpack_third(const std::uint8_t* codes, const HeadShape& head, std::uint32_t step_block,
                  CodeTile& tile) {
    for (std::uint32_t lane = 0; lane < head.lanes; lane += unit_lanes) {
        const std::size_t unit = unit_number(head, lane, step_block);
        const std::uint8_t* in = codes + (unit / 2) * 192 + 128;
        for (unsigned j = 0; j < unit_steps / tile_steps; ++j) {
            const unsigned shift = (unit % 2 == 0 ? 0u : 4u) + j;
            for (std::uint32_t b = 0; b < vector_bytes; ++b) {
                std::uint8_t& code =
                    tile.row[tile_steps * j + kernels::byte_of_step(b % 4)][lane + b / 4];
                code = static_cast<std::uint8_t>(code | ((in[b] >> shift) & 1) << 2);
            }
        }
    }
}

// Where a unit's tile of digits lies, and what a digit of it counts in its byte.
struct Digits {
    std::size_t offset;
    unsigned power;
};

struct Ternary {
    static constexpr unsigned base = 3;
    static Digits digits(std::size_t unit, unsigned tile) {
        const std::size_t number = unit * kernels::unit_tiles + tile;
        return {number / kernels::tiles_of_ternary_vector * vector_bytes,
                kernels::powers_of_3[number % kernels::tiles_of_ternary_vector]};
    }
};

struct Senary {
    static constexpr unsigned base = 6;
    static Digits digits(std::size_t unit, unsigned tile) {
        const kernels::SenaryPlace place = kernels::senary_place(unit, tile);
        return {place.offset, kernels::powers_of_6[place.digit]};
    }
};

// Units share bytes: their digits are added.
template <class Radix>
void pack_digits(const CodeTile& tile, const HeadShape& head, std::uint32_t step_block,
                 std::uint8_t* codes) {
    for (unsigned j = 0; j < unit_steps / tile_steps; ++j) {
        Quad quad;
        combine(tile, head.lanes, j, 1, 0, 0, 7, quad);
        for (std::uint32_t lane = 0; lane < head.lanes; lane += unit_lanes) {
            const Digits to = Radix::digits(unit_number(head, lane, step_block), j);
            std::uint8_t digits[vector_bytes];
            interleave(quad, lane, digits);
            std::uint8_t* out = codes + to.offset;
            for (std::size_t b = 0; b < vector_bytes; ++b) {
                out[b] = static_cast<std::uint8_t>(out[b] + digits[b] * to.power);
            }
        }
    }
}

template <class Radix>
void unpack_digits(const std::uint8_t* codes, const HeadShape& head, std::uint32_t step_block,
                   CodeTile& tile) {
    for (std::uint32_t lane = 0; lane < head.lanes; lane += unit_lanes) {
        for (unsigned j = 0; j < unit_steps / tile_steps; ++j) {
            const Digits from = Radix::digits(unit_number(head, lane, step_block), j);
            const std::uint8_t* in = codes + from.offset;
            for (std::uint32_t b = 0; b < vector_bytes; ++b) {
                tile.row[tile_steps * j + kernels::byte_of_step(b % 4)][lane + b / 4] =
                    static_cast<std::uint8_t>(in[b] / from.power % Radix::base);
            }
        }
    }
}

}  // namespace

void pack_tile(const CodeTile& tile, std::uint32_t bits, const HeadShape& head,
               std::uint32_t step_block, std::uint8_t* codes) noexcept {
    switch (bits) {
        case 8: return pack_low<8>(tile, bits, head, step_block, codes);
        case 4: return pack_low<4>(tile, bits, head, step_block, codes);
        case kernels::ternary_bits: return pack_digits<Ternary>(tile, head, step_block, codes);
        case kernels::senary_bits: return pack_digits<Senary>(tile, head, step_block, codes);
        case 3: pack_third(tile, head, step_block, codes); [[fallthrough]];
        default: return pack_low<2>(tile, bits, head, step_block, codes);
    }
}

void unpack_tile(const std::uint8_t* codes, std::uint32_t bits, const HeadShape& head,
                 std::uint32_t step_block, CodeTile& tile) noexcept {
    switch (bits) {
        case 8: return unpack_low<8>(codes, bits, head, step_block, tile);
        case 4: return unpack_low<4>(codes, bits, head, step_block, tile);
        case 2: return unpack_low<2>(codes, bits, head, step_block, tile);
        case kernels::ternary_bits: return unpack_digits<Ternary>(codes, head, step_block, tile);
        case kernels::senary_bits: return unpack_digits<Senary>(codes, head, step_block, tile);
        default:
            unpack_low<2>(codes, bits, head, step_block, tile);
            return unpack_third(codes, head, step_block, tile);
    }
}

void pack_tokens(const TokenCodes& codes, Part part, std::uint32_t bits, const HeadShape& head,
                 std::uint8_t* out) noexcept {
    CodeTile tile;
    for (std::uint32_t block = 0; block < head.steps / unit_steps; ++block) {
        for (std::uint32_t s = 0; s < unit_steps; ++s) {
            const std::uint32_t step = block * unit_steps + s;
            for (std::uint32_t lane = 0; lane < head.lanes; ++lane) {
                tile.row[s][lane] =
                    part == Part::keys ? codes.token[lane][step] : codes.token[step][lane];
            }
        }
        pack_tile(tile, bits, head, block, out);
    }
}

}  // namespace lowkv::codec
