#pragma once
// f32 rows into and out of an exact block: keys f16 [channels][block_tokens], values f16
// [block_tokens][channels].

#include <cstddef>
#include <cstdint>

#include "kernels/table.h"

namespace lowkv::cache {

struct ExactShape {
    std::uint32_t channels;
    std::uint32_t block_tokens;
};

// `count` rows, `row_stride` floats apart, to tokens [first, first + count), converted by the
// plan's kernels.
void store_keys(const kernels::Table& table, std::uint16_t* keys, ExactShape shape,
                std::uint32_t first, std::uint32_t count, const float* rows,
                std::size_t row_stride) noexcept;
void store_values(const kernels::Table& table, std::uint16_t* values, ExactShape shape,
                  std::uint32_t first, std::uint32_t count, const float* rows,
                  std::size_t row_stride) noexcept;

void load_key(const std::uint16_t* keys, ExactShape shape, std::uint32_t token,
              float* row) noexcept;
void load_value(const std::uint16_t* values, ExactShape shape, std::uint32_t token,
                float* row) noexcept;

// Zeros tokens [first, block_tokens).
void clear_keys(std::uint16_t* keys, ExactShape shape, std::uint32_t first) noexcept;
void clear_values(std::uint16_t* values, ExactShape shape, std::uint32_t first) noexcept;

}  // namespace lowkv::cache
