#ifndef LOWKV_FORMAT_H
#define LOWKV_FORMAT_H
// What packed bytes mean, once for every device: the order of codes, rounding, and the small
// floating-point formats; where a head's section has what is in part.h. C99, so that it is also
// C++, CUDA and OpenCL C; the CPU's own code calls it. The arithmetic is in docs/methods.md, the
// layout of a block in docs/internals-blocks.md.
//
// Sizes and numbers of codes are uint32_t: a head's section is well below 4 GiB.

#if defined(__OPENCL_C_VERSION__)
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef int int32_t;
#define LOWKV_FN static inline
#define LOWKV_BYTES __global const uint8_t*
#elif defined(__cplusplus)
#include <cstdint>
#if defined(__CUDACC__)
#define LOWKV_FN __host__ __device__ constexpr inline
#else
#define LOWKV_FN constexpr inline
#endif
#define LOWKV_BYTES const uint8_t*
using std::int32_t;
using std::uint16_t;
using std::uint32_t;
using std::uint8_t;
#else
#include <stdint.h>
#define LOWKV_FN static inline
#define LOWKV_BYTES const uint8_t*
#endif

// A value converted, and its bits taken as another type.
#if defined(__OPENCL_C_VERSION__)
#define LOWKV_TO(type, x) ((type)(x))
#define LOWKV_BITS(x) as_int(x)
#define LOWKV_FLOAT(x) as_float(x)
#elif defined(__cplusplus)
#define LOWKV_TO(type, x) static_cast<type>(x)
#define LOWKV_BITS(x) __builtin_bit_cast(int32_t, static_cast<float>(x))
#define LOWKV_FLOAT(x) __builtin_bit_cast(float, static_cast<int32_t>(x))
#else
#define LOWKV_TO(type, x) ((type)(x))
typedef union {
    float number;
    int32_t bits;
} lowkv_word;
#define LOWKV_BITS(x) (((lowkv_word){.number = (x)}).bits)
#define LOWKV_FLOAT(x) (((lowkv_word){.bits = (x)}).number)
#endif

// ---- widths ----

// How wide a code is, numbered as lowkv::Width.
#define LOWKV_ONE 0u
#define LOWKV_TERNARY 1u  // three levels, 8/5 bits
#define LOWKV_TWO 2u
#define LOWKV_THREE 3u
#define LOWKV_FOUR 4u
#define LOWKV_EIGHT 5u

// Codes are 0 to lowkv_levels() - 1.
LOWKV_FN uint32_t lowkv_levels(uint32_t width) {
    return width == LOWKV_TERNARY ? 3
           : width == LOWKV_TWO   ? 4
           : width == LOWKV_THREE ? 8
           : width == LOWKV_FOUR  ? 16
           : width == LOWKV_ONE   ? 2
                                  : 256;
}

// A byte holds lowkv_digits() digits of base lowkv_base(), a code each. Of three bits the low two;
// the third ones lie apart, eight to a byte.
LOWKV_FN uint32_t lowkv_base(uint32_t width) {
    return width == LOWKV_THREE ? 4 : lowkv_levels(width);
}
LOWKV_FN uint32_t lowkv_digits(uint32_t width) {
    return width == LOWKV_TERNARY ? 5
           : width == LOWKV_FOUR  ? 2
           : width == LOWKV_EIGHT ? 1
           : width == LOWKV_ONE   ? 8
                                  : 4;
}

// ---- the order of codes ----
//
// 16 x 16 units, so that one 64-byte load yields operands of a 4-way integer dot product (vpdpbusd
// and its kin) after a shift and a mask. A head's codes are a matrix of `lanes` x `steps`: a lane
// is what a vector lane holds, a step is what a dot product sums over. Keys: lane = token, step =
// channel. Values: lane = channel, step = token. Both counts are multiples of 16, and lanes * steps
// of 512.
//
//   unit    16 lanes x 16 steps. Number: lane_block * (steps / 16) + step_block.
//   tile    4 steps of a unit (tile j: steps 4j .. 4j+3) as 64 bytes: a lane's four bytes are its
//           steps 0, 2, 1, 3, so that a mask of 16-bit halves leaves neighbours
//   1.5     ternary digits: all tiles of a head in the order of their units, five to 64 bytes:
//           byte b = tile[0][b] + 3 tile[1][b] + 9 tile[2][b] + 27 tile[3][b] + 81 tile[4][b]
//   8 bits  tiles 0..3, 256 bytes a unit
//   4 bits  2 x 64 bytes: byte b of the v-th = tile[2v][b] | tile[2v+1][b] << 4
//   2 bits  64 bytes: byte b = tile[0][b] | tile[1][b] << 2 | tile[2][b] << 4 | tile[3][b] << 6
//   3 bits  a pair of units (2p, 2p+1) in 192 bytes: the low 2 bits of unit 2p, of unit 2p+1 (as
//           2 bits above), then 64 bytes of third bits: bit j of byte b is unit 2p's tile j, bit
//           4+j is unit 2p+1's tile j
//   1 bit   a pair of units in 64 bytes, laid out as third bits
//
// It is a permutation of the logical order (docs/methods/bytes.md, "Codes in bytes");
// tests/codec_layout.cpp checks that every bit of every code has a place of its own.

#define LOWKV_UNIT_LANES 16u
#define LOWKV_UNIT_STEPS 16u
#define LOWKV_UNIT_TILES 4u
#define LOWKV_TILE_BYTES 64u

LOWKV_FN uint32_t lowkv_unit(uint32_t steps, uint32_t lane, uint32_t step) {
    return lane / LOWKV_UNIT_LANES * (steps / LOWKV_UNIT_STEPS) + step / LOWKV_UNIT_STEPS;
}

// Where the 64 bytes of a unit's tile lie from the start of a head's codes. Of three bits: the low
// two.
LOWKV_FN uint32_t lowkv_tile_offset(uint32_t width, uint32_t unit, uint32_t tile) {
    const uint32_t digits = lowkv_digits(width);
    if (width == LOWKV_TERNARY || width == LOWKV_ONE)  // units share bytes
        return (unit * LOWKV_UNIT_TILES + tile) / digits * LOWKV_TILE_BYTES;
    if (width == LOWKV_THREE) return unit / 2 * 3 * LOWKV_TILE_BYTES + unit % 2 * LOWKV_TILE_BYTES;
    return (unit * (LOWKV_UNIT_TILES / digits) + tile / digits) * LOWKV_TILE_BYTES;
}

// Which digit of each of those bytes is the tile's.
LOWKV_FN uint32_t lowkv_tile_digit(uint32_t width, uint32_t unit, uint32_t tile) {
    const uint32_t digits = lowkv_digits(width);
    if (width == LOWKV_TERNARY || width == LOWKV_ONE)
        return (unit * LOWKV_UNIT_TILES + tile) % digits;
    return tile % digits;
}

// Three bits: where the third bits of a pair of units lie.
LOWKV_FN uint32_t lowkv_third_offset(uint32_t unit) {
    return unit / 2 * 3 * LOWKV_TILE_BYTES + 2 * LOWKV_TILE_BYTES;
}

// Where a lane's four bytes hold step `step` of a tile, and the step that byte `step` holds.
LOWKV_FN uint32_t lowkv_byte_of_step(uint32_t step) { return (step & 1) << 1 | (step & 2) >> 1; }

LOWKV_FN uint32_t lowkv_codes_bytes(uint32_t width, uint32_t lanes, uint32_t steps) {
    const uint32_t digits = lowkv_digits(width);
    const uint32_t tiles = lanes * steps / LOWKV_TILE_BYTES;
    const uint32_t third = width == LOWKV_THREE ? tiles / 8 * LOWKV_TILE_BYTES : 0;
    return (tiles + digits - 1) / digits * LOWKV_TILE_BYTES + third;
}

LOWKV_FN uint32_t lowkv_power(uint32_t base, uint32_t exponent) {
    uint32_t power = 1;
    while (exponent-- > 0) power *= base;
    return power;
}

// One code, where speed doesn't matter.
LOWKV_FN uint32_t lowkv_load_code(LOWKV_BYTES codes, uint32_t width, uint32_t steps, uint32_t lane,
                                  uint32_t step) {
    const uint32_t unit = lowkv_unit(steps, lane, step);
    const uint32_t tile = step % LOWKV_UNIT_STEPS / 4;
    const uint32_t byte = 4 * (lane % LOWKV_UNIT_LANES) + lowkv_byte_of_step(step % 4);
    const uint32_t base = lowkv_base(width);
    const uint32_t code = codes[lowkv_tile_offset(width, unit, tile) + byte] /
                          lowkv_power(base, lowkv_tile_digit(width, unit, tile)) % base;
    if (width != LOWKV_THREE) return code;
    return code | (codes[lowkv_third_offset(unit) + byte] >> (4 * (unit % 2) + tile) & 1u) << 2;
}

// ---- trellis levels ----
//
// Codes of one, two or three bits, whose levels depend on what follows them: a level is that of a
// window of six bits, the code lowest.
//   1 bit   the code and the next five
//   2 bits  the code and the next two
//   3 bits  the code and the third bits of the next three
// What follows what is said by words of 64 codes, four lanes x 16 steps of a unit: tiles 0 to 3 of
// a lane's byte, then those of the next byte; after the last code comes the first. At two bits a
// window is bits that lie side by side, turned round in 128.
//   level(window) = first[window % 16] + second[window / 4]

#define LOWKV_WORD_CODES 64u
#define LOWKV_WORD_LANES 4u
#define LOWKV_WINDOW_BITS 6u
#define LOWKV_WINDOWS 64u

// A code's low bits that are in no other one's window, and its bits above them, that are.
LOWKV_FN uint32_t lowkv_own_bits(uint32_t width) { return width == LOWKV_THREE ? 2 : 0; }
LOWKV_FN uint32_t lowkv_linked_bits(uint32_t width) { return width == LOWKV_TWO ? 2 : 1; }
// The codes of a window.
LOWKV_FN uint32_t lowkv_window_codes(uint32_t width) {
    return (LOWKV_WINDOW_BITS - lowkv_own_bits(width)) / lowkv_linked_bits(width);
}

// Of the code number `i` of a word: its lane, of four, and its step, of 16; and the way back.
LOWKV_FN uint32_t lowkv_word_lane(uint32_t i) { return i / 16; }
LOWKV_FN uint32_t lowkv_word_step(uint32_t i) { return i % 4 * 4 + lowkv_byte_of_step(i / 4 % 4); }
LOWKV_FN uint32_t lowkv_word_code(uint32_t lane, uint32_t step) {
    return lane % LOWKV_WORD_LANES * 16 + lowkv_byte_of_step(step % 4) * 4 +
           step % LOWKV_UNIT_STEPS / 4;
}

// One window, where speed doesn't matter.
LOWKV_FN uint32_t lowkv_load_window(LOWKV_BYTES codes, uint32_t width, uint32_t steps,
                                    uint32_t lane, uint32_t step) {
    const uint32_t own = lowkv_own_bits(width);
    uint32_t window = 0;
    for (uint32_t k = 0; k < lowkv_window_codes(width); ++k) {
        const uint32_t i = (lowkv_word_code(lane, step) + k) % LOWKV_WORD_CODES;
        const uint32_t at_lane = lane / LOWKV_WORD_LANES * LOWKV_WORD_LANES + lowkv_word_lane(i);
        const uint32_t at_step = step / LOWKV_UNIT_STEPS * LOWKV_UNIT_STEPS + lowkv_word_step(i);
        const uint32_t code = lowkv_load_code(codes, width, steps, at_lane, at_step);
        window |= k == 0 ? code : code >> own << (own + lowkv_linked_bits(width) * k);
    }
    return window;
}

// An exact block: keys [channel][token], then values [token][channel].
LOWKV_FN uint32_t lowkv_exact_key(uint32_t tokens, uint32_t channel, uint32_t token) {
    return channel * tokens + token;
}
LOWKV_FN uint32_t lowkv_exact_value(uint32_t channels, uint32_t channel, uint32_t token) {
    return token * channels + channel;
}

// ---- rounding ----
//
// In integer arithmetic and selects only, so that compilers vectorize loops of them on any CPU,
// that they give the same bits on every device, and that a host's flush-to-zero mode changes
// nothing.

// value < limit ? below : otherwise, for value and limit >= 0. As a mask, because gcc moves the
// computation of a ternary's operands into branches, and then finds that a floating-point operation
// under a branch may trap and that the loop can't be vectorized.
LOWKV_FN int32_t lowkv_choose(int32_t value, int32_t limit, int32_t below, int32_t otherwise) {
    const int32_t mask = (value - limit) >> 31;
    return (below & mask) | (otherwise & ~mask);
}

LOWKV_FN float lowkv_f16_to_f32(uint16_t f16) {
    const int32_t bias = (127 - 15) << 23;
    const int32_t sign = LOWKV_TO(int32_t, LOWKV_TO(uint32_t, f16 & 0x8000u) << 16);
    const int32_t magnitude = LOWKV_TO(int32_t, f16 & 0x7fffu) << 13;
    const int32_t normal = magnitude + bias;
    // 2^-14 (1 + m/1024) - 2^-14: a subnormal without a subnormal operand.
    const float shifted = LOWKV_FLOAT(normal + (1 << 23)) - 0x1p-14f;
    const int32_t finite = lowkv_choose(magnitude, 0x0400 << 13, LOWKV_BITS(shifted), normal);
    return LOWKV_FLOAT(lowkv_choose(magnitude, 0x7c00 << 13, finite, normal + bias) | sign);
}

// Round to nearest even. A finite value beyond the range saturates to +-65504; infinities and NaN
// stay what they are.
LOWKV_FN uint16_t lowkv_f32_to_f16(float value) {
    const int32_t bits = LOWKV_BITS(value);
    const int32_t magnitude = bits & 0x7fffffff;
    const int32_t largest = LOWKV_BITS(65504.0f);
    const int32_t in_range = lowkv_choose(magnitude, largest, magnitude, largest);
    const int32_t odd = (in_range >> 13) & 1;
    const int32_t normal = (in_range - ((127 - 15) << 23) + 0xfff + odd) >> 13;
    // Adding 0.5, whose unit in the last place is 2^-24, rounds to a multiple of the half's own.
    const float shifted = LOWKV_FLOAT(in_range) + 0.5f;
    const int32_t subnormal = LOWKV_BITS(shifted) - LOWKV_BITS(0.5f);
    const int32_t finite = lowkv_choose(in_range, (127 - 14) << 23, subnormal, normal);
    const int32_t special = lowkv_choose(magnitude, 0x7f800001, 0x7c00, 0x7e00);
    const int32_t result = lowkv_choose(magnitude, 0x7f800000, finite, special);
    return LOWKV_TO(uint16_t, result | ((bits >> 16) & 0x8000));
}

// FP8-E4M3 (OCP 8-bit floating point): 4 exponent bits with bias 7, 3 mantissa bits, no infinities.
#define LOWKV_E4M3_MAX 448.0f
#define LOWKV_E4M3_SMALLEST 0x1p-9f

LOWKV_FN float lowkv_e4m3_to_f32(uint8_t byte) {
    const int32_t sign = LOWKV_TO(int32_t, LOWKV_TO(uint32_t, byte & 0x80u) << 24);
    const int32_t magnitude = (byte & 0x7f) << 20;
    const int32_t normal = magnitude + ((127 - 7) << 23);
    // 2^-6 (1 + m/8) - 2^-6, as above.
    const float shifted = LOWKV_FLOAT(normal + (1 << 23)) - 0x1p-6f;
    const int32_t finite = lowkv_choose(magnitude, 1 << 23, LOWKV_BITS(shifted), normal);
    return LOWKV_FLOAT(lowkv_choose(magnitude, 0x7f << 20, finite, 0x7fc00000) | sign);
}

// Round to nearest even; everything beyond 448, infinities included, saturates. NaN stays NaN.
LOWKV_FN uint8_t lowkv_f32_to_e4m3(float value) {
    const int32_t bits = LOWKV_BITS(value);
    const int32_t magnitude = bits & 0x7fffffff;
    const int32_t largest = LOWKV_BITS(LOWKV_E4M3_MAX);
    const int32_t in_range = lowkv_choose(magnitude, largest, magnitude, largest);
    const int32_t odd = (in_range >> 20) & 1;
    const int32_t normal = (in_range - ((127 - 7) << 23) + 0x7ffff + odd) >> 20;
    // Adding 2^14, whose unit in the last place is 2^-9, rounds to a multiple of the smallest.
    const float shifted = LOWKV_FLOAT(in_range) + 0x1p14f;
    const int32_t subnormal = LOWKV_BITS(shifted) - LOWKV_BITS(0x1p14f);
    const int32_t finite = lowkv_choose(in_range, (127 - 6) << 23, subnormal, normal);
    const int32_t result = lowkv_choose(magnitude, 0x7f800001, finite, 0x7f);
    return LOWKV_TO(uint8_t, result | ((bits >> 24) & 0x80));
}

// The power of two by which a section's scales (or zeros) are divided before they become E4M3: the
// smallest with which the largest magnitude still rounds to at most 448. 464, halfway to what would
// come after 448, still does.
LOWKV_FN float lowkv_e4m3_multiplier(float largest) {
    const int32_t bits = LOWKV_BITS(largest);
    // Above .90625 * 2^n, n being the exponent with a fraction below 1, it takes one more.
    const int32_t more = (bits & 0x7fffff) > 0x680000 ? 1 : 0;
    const int32_t exponent = (bits >> 23) - 8 + more;
    if (largest == 0.0f) return 1.0f;
    return LOWKV_FLOAT((exponent < 1 ? 1 : exponent) << 23);
}

// Magnitudes in a byte, the upper half of f16's bits without the sign: 5 exponent bits with bias
// 15, 3 mantissa bits, 2^-17 .. 61440.
#define LOWKV_E5M3_SMALLEST 0x1p-17f

LOWKV_FN float lowkv_e5m3_to_f32(uint8_t byte) {
    return lowkv_f16_to_f32(LOWKV_TO(uint16_t, byte << 7));
}

// Round to nearest even; everything beyond 61440, infinity included, saturates, and what is below 0
// becomes 0. NaN stays NaN.
LOWKV_FN uint8_t lowkv_f32_to_e5m3(float value) {
    const int32_t bits = LOWKV_BITS(value);
    const int32_t largest = LOWKV_BITS(61440.0f);
    const int32_t magnitude = bits & 0x7fffffff;
    const int32_t in_range = lowkv_choose(magnitude, largest, magnitude, largest);
    const int32_t odd = (in_range >> 20) & 1;
    const int32_t normal = (in_range - ((127 - 15) << 23) + 0x7ffff + odd) >> 20;
    // Adding 2^6, whose unit in the last place is 2^-17, rounds to a multiple of the smallest.
    const float shifted = LOWKV_FLOAT(in_range) + 0x1p6f;
    const int32_t subnormal = LOWKV_BITS(shifted) - LOWKV_BITS(0x1p6f);
    const int32_t finite = lowkv_choose(in_range, (127 - 14) << 23, subnormal, normal);
    const int32_t result = lowkv_choose(magnitude, 0x7f800001, finite, 0xff);
    return LOWKV_TO(uint8_t, result & ~(bits >> 31) & 0xff);
}

// What to divide by for lowkv_uniform_code(): a scale of 0 divides as infinity does, every code is
// 0.
LOWKV_FN float lowkv_divisor(float scale) {
    const int32_t bits = LOWKV_BITS(scale);
    return LOWKV_FLOAT(bits > 0 ? bits : 0x7f800000);
}

// Clamped to [0, top] as integers, in whose order floats above 0 are: comparing floats may trap,
// which keeps gcc from vectorizing. A NaN becomes something in the range.
LOWKV_FN float lowkv_clamp_level(float level, float top) {
    const int32_t exact = LOWKV_BITS(level);
    const int32_t positive = exact > 0 ? exact : 0;
    const int32_t top_bits = LOWKV_BITS(top);
    return LOWKV_FLOAT(positive < top_bits ? positive : top_bits);
}

// 1.5 * 2^23: the sum's unit in the last place is 1, so that adding rounds half to even and leaves
// the integer in the low bits.
#define LOWKV_ROUND_TO_INTEGER 0x1.8p23f

// The code n, up to `top`, whose n * scale + zero is nearest to x.
LOWKV_FN uint8_t lowkv_uniform_code(float x, float zero, float divisor, float top) {
    const float level = lowkv_clamp_level((x - zero) / divisor, top);
    return LOWKV_TO(uint8_t, LOWKV_BITS(level + LOWKV_ROUND_TO_INTEGER) & 0xff);
}

#endif
