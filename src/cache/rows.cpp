#include "cache/rows.h"

#include <algorithm>
#include <limits>

#include "codec/float16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lowkv::cache {
namespace {

using codec::f16_to_f32;
using codec::f32_to_f16;

// n is a multiple of 8, because head_dim is a multiple of 16.
using Convert = void (*)(const float* from, std::uint16_t* to, std::uint32_t n) noexcept;

void convert_plain(const float* from, std::uint16_t* to, std::uint32_t n) noexcept {
    for (std::uint32_t i = 0; i < n; ++i) to[i] = f32_to_f16(from[i]);
}

#if defined(__x86_64__)
// The same in hardware, saturation included: prefill converts every key and value of every layer,
// and the plain loop would be a percent or two of it.
__attribute__((target("avx,f16c"))) void convert_f16c(const float* from, std::uint16_t* to,
                                                      std::uint32_t n) noexcept {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256 infinity = _mm256_set1_ps(std::numeric_limits<float>::infinity());
    const __m256 high = _mm256_set1_ps(codec::f16_max);
    const __m256 low = _mm256_set1_ps(-codec::f16_max);
    for (std::uint32_t i = 0; i < n; i += 8) {
        const __m256 x = _mm256_loadu_ps(from + i);
        const __m256 infinite = _mm256_cmp_ps(_mm256_andnot_ps(sign, x), infinity, _CMP_EQ_OQ);
        // min and max return their second operand where one is NaN.
        const __m256 clamped = _mm256_max_ps(low, _mm256_min_ps(high, x));
        const __m256 y = _mm256_blendv_ps(clamped, x, infinite);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
    }
}
#endif

Convert pick_convert() noexcept {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c")) return convert_f16c;
#endif
    return convert_plain;
}

}  // namespace

void store_keys(std::uint16_t* keys, ExactShape shape, std::uint32_t first, std::uint32_t count,
                const float* rows, std::size_t row_stride) noexcept {
    const Convert convert = pick_convert();
    // Transposed by tiles, so that a channel's consecutive tokens are written together.
    constexpr std::uint32_t tile_tokens = 32, tile_channels = 64;
    std::uint16_t tile[tile_tokens][tile_channels];
    for (std::uint32_t t = 0; t < count; t += tile_tokens) {
        const std::uint32_t tokens = std::min(tile_tokens, count - t);
        for (std::uint32_t c = 0; c < shape.channels; c += tile_channels) {
            const std::uint32_t channels = std::min(tile_channels, shape.channels - c);
            for (std::uint32_t i = 0; i < tokens; ++i) {
                convert(rows + (t + i) * row_stride + c, tile[i], channels);
            }
            for (std::uint32_t j = 0; j < channels; ++j) {
                std::uint16_t* to = keys + std::size_t{c + j} * shape.block_tokens + first + t;
                for (std::uint32_t i = 0; i < tokens; ++i) to[i] = tile[i][j];
            }
        }
    }
}

void store_values(std::uint16_t* values, ExactShape shape, std::uint32_t first, std::uint32_t count,
                  const float* rows, std::size_t row_stride) noexcept {
    const Convert convert = pick_convert();
    for (std::uint32_t i = 0; i < count; ++i) {
        convert(rows + i * row_stride, values + std::size_t{first + i} * shape.channels,
                shape.channels);
    }
}

void load_key(const std::uint16_t* keys, ExactShape shape, std::uint32_t token,
              float* row) noexcept {
    for (std::uint32_t c = 0; c < shape.channels; ++c) {
        row[c] = f16_to_f32(keys[std::size_t{c} * shape.block_tokens + token]);
    }
}

void load_value(const std::uint16_t* values, ExactShape shape, std::uint32_t token,
                float* row) noexcept {
    for (std::uint32_t c = 0; c < shape.channels; ++c) {
        row[c] = f16_to_f32(values[std::size_t{token} * shape.channels + c]);
    }
}

void clear_keys(std::uint16_t* keys, ExactShape shape, std::uint32_t first) noexcept {
    for (std::uint32_t c = 0; c < shape.channels; ++c) {
        std::uint16_t* channel = keys + std::size_t{c} * shape.block_tokens;
        std::fill(channel + first, channel + shape.block_tokens, std::uint16_t{0});
    }
}

void clear_values(std::uint16_t* values, ExactShape shape, std::uint32_t first) noexcept {
    std::fill(values + std::size_t{first} * shape.channels,
              values + std::size_t{shape.block_tokens} * shape.channels, std::uint16_t{0});
}

}  // namespace lowkv::cache
