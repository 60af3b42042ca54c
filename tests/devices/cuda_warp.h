#pragma once
// What a warp does together (devices/tensor/words.h), on the host: threads meet in cuda_group.cpp
// and read what the others have left there.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "cuda_words.h"
#include "lowkv/format.h"

namespace lowkv::test {

// Leaves up to eight words for the warp's other threads, waits for all of them, and returns what
// lane `i` left at of(i). It holds until the one after the next exchange.
struct Exchanged {
    const std::uint32_t (*lanes)[8];
    const std::uint32_t* of(std::uint32_t lane) const { return lanes[lane]; }
};
Exchanged exchange(const std::uint32_t* words, std::uint32_t count);

// A group's dynamic shared memory, as much as an H100 has. As there, its first address is no
// multiple of a page.
std::uint8_t* dynamic_memory();
inline constexpr std::uint32_t dynamic_begin = 1024;

inline float bits_to_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t float_to_bits(float x) { return std::bit_cast<std::uint32_t>(x); }
inline float half_of_word(std::uint32_t word, int high) {
    return lowkv_f16_to_f32(static_cast<std::uint16_t>(high ? word >> 16 : word));
}

}  // namespace lowkv::test

#define MEMBER inline
#define NO_UNROLL
#define SLOW [[gnu::noinline]] static

namespace lowkv::test {

// sums += A B, as the warp's threads give their words of both; add(a, b) is the product of two
// words.
template <class Add>
void multiply_words(float* sums, const std::uint32_t (&own)[6], Add add) {
    const Exchanged all = exchange(own, 6);
    const std::uint32_t lane = thread_place.x % 32, g = lane / 4, c = lane % 4;
    for (std::uint32_t i = 0; i < 4; ++i) {
        double sum = sums[i];
        for (std::uint32_t k = 0; k < 4; ++k) {
            const std::uint32_t* row = all.of(4 * g + k);
            const std::uint32_t* column = all.of(4 * (2 * c + i % 2) + k);
            for (std::uint32_t upper = 0; upper < 2; ++upper)
                sum += add(row[2 * upper + i / 2], column[4 + upper]);
        }
        sums[i] = static_cast<float>(sum);
    }
}

}  // namespace lowkv::test

inline void multiply_halves(float* sums, std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                            std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
    using lowkv::test::half_of_word;
    lowkv::test::multiply_words(sums, {a0, a1, a2, a3, b0, b1},
                                [](std::uint32_t a, std::uint32_t b) {
                                    return double{half_of_word(a, 0)} * half_of_word(b, 0) +
                                           double{half_of_word(a, 1)} * half_of_word(b, 1);
                                });
}
inline void multiply_floats(float* sums, float a0, float a1, float a2, float a3, float b0,
                            float b1) {
    using namespace lowkv::test;
    const auto upper = [](float x) { return float_to_bits(x) & 0xffffe000u; };
    multiply_words(sums, {upper(a0), upper(a1), upper(a2), upper(a3), upper(b0), upper(b1)},
                   [](std::uint32_t a, std::uint32_t b) {
                       return double{bits_to_float(a)} * bits_to_float(b);
                   });
}

inline float of_lane(float x, std::uint32_t lane) {
    using namespace lowkv::test;
    const std::uint32_t own = float_to_bits(x);
    return bits_to_float(*exchange(&own, 1).of(lane % 32));
}
inline float other_lane(float x, std::uint32_t change) {
    return of_lane(x, lowkv::test::thread_place.x % 32 ^ change);
}
inline int any_lane(int x) {
    using namespace lowkv::test;
    const auto own = static_cast<std::uint32_t>(x != 0);
    const Exchanged all = exchange(&own, 1);
    std::uint32_t any = 0;
    for (std::uint32_t lane = 0; lane < 32; ++lane) any |= *all.of(lane);
    return static_cast<int>(any);
}
inline void wait_for_warp() { lowkv::test::exchange(nullptr, 0); }

inline std::uint32_t two_halves(float low, float high) {
    return lowkv_f32_to_f16(low) | std::uint32_t{lowkv_f32_to_f16(high)} << 16;
}
inline float low_half(std::uint32_t both) { return lowkv::test::half_of_word(both, 0); }
inline float high_half(std::uint32_t both) { return lowkv::test::half_of_word(both, 1); }
inline std::uint32_t larger_halves(std::uint32_t x, std::uint32_t y) {
    return std::max(x & 0xffffu, y & 0xffffu) | std::max(x >> 16, y >> 16) << 16;
}
inline std::uint32_t halves_product(std::uint32_t x, std::uint32_t y) {
    return two_halves(low_half(x) * low_half(y), high_half(x) * high_half(y));
}
inline std::uint32_t halves_fused(std::uint32_t x, std::uint32_t y, std::uint32_t z) {
    return two_halves(std::fma(low_half(x), low_half(y), low_half(z)),
                      std::fma(high_half(x), high_half(y), high_half(z)));
}
inline const std::uint8_t* kept_address(const std::uint8_t* from) { return from; }
inline std::uint32_t lost_halves(std::uint32_t x, std::uint32_t y, std::uint32_t product) {
    return halves_fused(x, y, product ^ 0x80008000u);
}
inline std::uint32_t halves_sum(std::uint32_t x, std::uint32_t y) {
    return two_halves(low_half(x) + low_half(y), high_half(x) + high_half(y));
}
inline float power_of_two(float exponent) { return std::exp2(exponent); }
inline float fused(float x, float y, float z) { return std::fma(x, y, z); }

inline std::uint32_t pick_bytes(std::uint32_t x, std::uint32_t y, std::uint32_t which) {
    const std::uint64_t both = std::uint64_t{y} << 32 | x;
    std::uint32_t picked = 0;
    for (std::uint32_t i = 0; i < 4; ++i)
        picked |= static_cast<std::uint32_t>(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    return picked;
}
inline std::uint32_t shifted_pair(std::uint32_t low, std::uint32_t high, std::uint32_t by) {
    return static_cast<std::uint32_t>((std::uint64_t{high} << 32 | low) >> (by & 31));
}

inline uint4 load_line(const std::uint8_t* from) { return *reinterpret_cast<const uint4*>(from); }
inline void fetch_ahead(const std::uint8_t*) {}

inline std::uint8_t* dynamic_shared() { return lowkv::test::dynamic_memory(); }
inline std::uint32_t shared_address(const std::uint8_t* place) {
    return static_cast<std::uint32_t>(place - lowkv::test::dynamic_memory()) +
           lowkv::test::dynamic_begin;
}
inline std::uint8_t* shared_place(std::uint32_t address) {
    return lowkv::test::dynamic_memory() + (address - lowkv::test::dynamic_begin);
}
template <std::uint32_t BEHIND>
std::uint32_t load_shared(std::uint32_t address) {
    return *reinterpret_cast<const std::uint32_t*>(shared_place(address + BEHIND));
}
inline void store_shared(std::uint32_t address, std::uint32_t x) {
    *reinterpret_cast<std::uint32_t*>(shared_place(address)) = x;
}
inline void store_shared_four(std::uint32_t address, std::uint32_t x) {
    for (std::uint32_t i = 0; i < 16; i += 4) store_shared(address + i, x);
}

#define TENSOR_ENTRY(name) static void name
#define THREADS (blockDim.x)
#define TENSOR_LAY(name) static void name
#define gridDim lowkv::test::grid_size
#define TENSOR_WIDE 1
#define TENSOR_NARROW 1
#define DYNAMIC_SHARED() dynamic_shared()
