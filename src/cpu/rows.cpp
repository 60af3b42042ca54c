#include "cpu/rows.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/host_rows.h"
#include "isa/table.h"

namespace lowkv::cpu {
namespace {

using cache::bytes_of;
using cache::convert;

// Up to 64 channels of a head at a time, so that what they are transposed through stays in the
// nearest cache.
constexpr std::uint32_t tile_tokens = 32, tile_channels = 64;

// Heads whose channels follow each other are one.
struct Pieces {
    std::uint32_t heads, channels;
};
Pieces pieces(const ExactShape& shape, std::size_t head_stride) noexcept {
    if (head_stride == shape.head_dim) return {1, shape.channels()};
    return {shape.kv_heads, shape.head_dim};
}

// Calls f(channel, channels, offset in a host's row), channel by channel tile.
template <class F>
void each_tile(const ExactShape& shape, std::size_t head_stride, F f) noexcept {
    const Pieces split = pieces(shape, head_stride);
    for (std::uint32_t head = 0; head < split.heads; ++head) {
        for (std::uint32_t c = 0; c < split.channels; c += tile_channels)
            f(head * split.channels + c, std::min(tile_channels, split.channels - c),
              head * head_stride + c);
    }
}

// T: an element's bits.
template <class T>
std::size_t store_keys_as(const kernels::Table& table, T* keys, const ExactShape& shape,
                          std::uint32_t first, std::uint32_t count, const Rows& rows) noexcept {
    const auto* data = static_cast<const std::byte*>(rows.data);
    const std::size_t bytes = bytes_of(rows.type);
    T tile[tile_tokens][tile_channels];
    std::size_t changed = 0;
    for (std::uint32_t t = 0; t < count; t += tile_tokens) {
        const std::uint32_t tokens = std::min(tile_tokens, count - t);
        each_tile(shape, rows.head_stride,
                  [&](std::uint32_t c, std::uint32_t channels, std::size_t offset) {
                      for (std::uint32_t i = 0; i < tokens; ++i) {
                          convert(table, rows.type,
                                  data + ((t + i) * rows.token_stride + offset) * bytes, shape.type,
                                  reinterpret_cast<std::byte*>(tile[i]), channels);
                          changed += saturate(shape.type, tile[i], channels);
                      }
                      for (std::uint32_t j = 0; j < channels; ++j) {
                          T* to = keys + std::size_t{c + j} * shape.block_tokens + first + t;
                          for (std::uint32_t i = 0; i < tokens; ++i) to[i] = tile[i][j];
                      }
                  });
    }
    return changed;
}

template <class T>
void load_keys_as(const T* keys, const ExactShape& shape, std::uint32_t first, std::uint32_t count,
                  const RowsOut& rows) noexcept {
    auto* data = static_cast<T*>(rows.data);
    for (std::uint32_t t = 0; t < count; t += tile_tokens) {
        const std::uint32_t tokens = std::min(tile_tokens, count - t);
        each_tile(shape, rows.head_stride,
                  [&](std::uint32_t c, std::uint32_t channels, std::size_t offset) {
                      for (std::uint32_t i = 0; i < tokens; ++i) {
                          T* to = data + (t + i) * rows.token_stride + offset;
                          const T* from =
                              keys + std::size_t{c} * shape.block_tokens + first + t + i;
                          for (std::uint32_t j = 0; j < channels; ++j)
                              to[j] = from[std::size_t{j} * shape.block_tokens];
                      }
                  });
    }
}

// T: as wide as the bits, signed, which is what every instruction set compares. Magnitudes are in
// the order of their bits; those from `counted` on count.
template <class T>
std::size_t saturate_as(T* x, std::size_t count, T largest, T infinity, T counted) noexcept {
    constexpr T magnitude = std::numeric_limits<T>::max();
    T top = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const T size = static_cast<T>(x[i] & magnitude);
        top = size > top ? size : top;
    }
    if (top < counted) [[likely]]
        return 0;
    std::size_t changed = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const T size = static_cast<T>(x[i] & magnitude);
        if (size < counted) continue;
        ++changed;
        const T sign = static_cast<T>(x[i] & ~magnitude);
        x[i] = static_cast<T>(sign | (size > infinity ? T{0} : largest));
    }
    return changed;
}

}  // namespace

std::size_t saturate(RowType type, void* bits, std::size_t count) noexcept {
    auto* halves = static_cast<std::int16_t*>(bits);
    if (type == RowType::f16)
        return saturate_as<std::int16_t>(halves, count, 0x7bff, 0x7c00, 0x7bff);
    if (type == RowType::bf16)
        return saturate_as<std::int16_t>(halves, count, 0x477f, 0x7f80, 0x4780);
    return saturate_as<std::int32_t>(static_cast<std::int32_t*>(bits), count, 0x477fe000,
                                     0x7f800000, 0x477fe001);
}

std::size_t store_keys(const kernels::Table& table, std::byte* keys, const ExactShape& shape,
                       std::uint32_t first, std::uint32_t count, const Rows& rows) noexcept {
    if (shape.type == RowType::f32)
        return store_keys_as(table, reinterpret_cast<std::uint32_t*>(keys), shape, first, count,
                             rows);
    return store_keys_as(table, reinterpret_cast<std::uint16_t*>(keys), shape, first, count, rows);
}

std::size_t store_values(const kernels::Table& table, std::byte* values, const ExactShape& shape,
                         std::uint32_t first, std::uint32_t count, const Rows& rows) noexcept {
    const Pieces split = pieces(shape, rows.head_stride);
    std::size_t changed = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
        std::byte* to = values + std::size_t{first + i} * shape.channels() * shape.bytes();
        const auto* from =
            static_cast<const std::byte*>(cache::rows_at(rows, i * rows.token_stride).data);
        for (std::uint32_t head = 0; head < split.heads; ++head) {
            convert(table, rows.type, from + head * rows.head_stride * bytes_of(rows.type),
                    shape.type, to + std::size_t{head} * split.channels * shape.bytes(),
                    split.channels);
        }
        changed += saturate(shape.type, to, shape.channels());
    }
    return changed;
}

void load_keys(const std::byte* keys, const ExactShape& shape, std::uint32_t first,
               std::uint32_t count, const RowsOut& rows) noexcept {
    if (shape.type == RowType::f32)
        load_keys_as(reinterpret_cast<const std::uint32_t*>(keys), shape, first, count, rows);
    else
        load_keys_as(reinterpret_cast<const std::uint16_t*>(keys), shape, first, count, rows);
}

void load_values(const std::byte* values, const ExactShape& shape, std::uint32_t first,
                 std::uint32_t count, const RowsOut& rows) noexcept {
    const Pieces split = pieces(shape, rows.head_stride);
    const std::size_t bytes = shape.bytes();
    auto* data = static_cast<std::byte*>(rows.data);
    for (std::uint32_t i = 0; i < count; ++i) {
        const std::byte* from = values + std::size_t{first + i} * shape.channels() * bytes;
        for (std::uint32_t head = 0; head < split.heads; ++head) {
            std::memcpy(data + (i * rows.token_stride + head * rows.head_stride) * bytes,
                        from + std::size_t{head} * split.channels * bytes, split.channels * bytes);
        }
    }
}

}  // namespace lowkv::cpu
