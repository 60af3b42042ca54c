#include "cache/rows.h"

#include <algorithm>

#include "codec/float16.h"
#include "kernels/table.h"

namespace lowkv::cache {

using codec::f16_to_f32;

void store_keys(const kernels::Table& table, std::uint16_t* keys, ExactShape shape,
                std::uint32_t first, std::uint32_t count, const float* rows,
                std::size_t row_stride) noexcept {
    // Transposed by tiles, so that a channel's consecutive tokens are written together.
    constexpr std::uint32_t tile_tokens = 32, tile_channels = 64;
    std::uint16_t tile[tile_tokens][tile_channels];
    for (std::uint32_t t = 0; t < count; t += tile_tokens) {
        const std::uint32_t tokens = std::min(tile_tokens, count - t);
        for (std::uint32_t c = 0; c < shape.channels; c += tile_channels) {
            const std::uint32_t channels = std::min(tile_channels, shape.channels - c);
            for (std::uint32_t i = 0; i < tokens; ++i) {
                table.to_f16(rows + (t + i) * row_stride + c, tile[i], channels);
            }
            for (std::uint32_t j = 0; j < channels; ++j) {
                std::uint16_t* to = keys + std::size_t{c + j} * shape.block_tokens + first + t;
                for (std::uint32_t i = 0; i < tokens; ++i) to[i] = tile[i][j];
            }
        }
    }
}

void store_values(const kernels::Table& table, std::uint16_t* values, ExactShape shape,
                  std::uint32_t first, std::uint32_t count, const float* rows,
                  std::size_t row_stride) noexcept {
    for (std::uint32_t i = 0; i < count; ++i) {
        table.to_f16(rows + i * row_stride, values + std::size_t{first + i} * shape.channels,
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
