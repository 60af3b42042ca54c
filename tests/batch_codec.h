#pragma once
// What rows of a batch become by the codec alone, block by block.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "batch_common.h"
#include "lowkv/codec.h"

namespace batch_test {

struct Token {
    Row key, value;
};

// Also of what was packed and reopened before, which may be any f16 or bf16. Round to nearest even,
// subnormals included.
inline std::uint16_t nearest_half(float x) {
    const bool negative = std::signbit(x);
    x = std::fabs(x);
    if (x == 0) return negative ? 0x8000 : 0;
    int exponent = 0;
    std::frexp(x, &exponent);
    const int ulp = std::max(exponent - 11, -24);
    const auto units = static_cast<unsigned>(std::nearbyint(std::ldexp(x, -ulp)));
    const unsigned bits = ulp == -24 ? units : (static_cast<unsigned>(ulp + 24) << 10) + units;
    return static_cast<std::uint16_t>(bits | (negative ? 0x8000u : 0u));
}

// What is read of a row that is kept exact.
inline Row kept(const lowkv::Plan& plan, Row row) {
    for (float& x : row) {
        if (plan.rows() == lowkv::RowType::f16) x = f16_value(nearest_half(x));
        if (plan.rows() == lowkv::RowType::bf16) x = bf16_value(bf16_bits(x));
    }
    return row;
}

// What the plan's type makes of an f16 row.
inline Row widened(const lowkv::Plan& plan, const std::uint16_t* halves, std::size_t stride) {
    Row row(plan.shape().channels());
    for (std::size_t c = 0; c < row.size(); ++c) {
        row[c] = f16_value(halves[c * stride]);
        if (plan.rows() == lowkv::RowType::bf16) row[c] = bf16_value(bf16_bits(row[c]));
    }
    return row;
}

// Packs and decodes the block of tokens that begins at `first`.
inline void pack(const lowkv::Plan& plan, std::vector<Token>& tokens, std::uint32_t first) {
    const std::size_t channels = plan.shape().channels(), block = plan.block_tokens();
    std::vector<std::uint16_t> f16(plan.f16_bytes() / 2);
    std::uint16_t* const values = f16.data() + channels * block;
    for (std::size_t t = 0; t < block; ++t) {
        for (std::size_t c = 0; c < channels; ++c) {
            f16[c * block + t] = nearest_half(tokens[first + t].key[c]);
            values[t * channels + c] = nearest_half(tokens[first + t].value[c]);
        }
    }
    std::vector<std::byte> packed(plan.packed_bytes());
    encode_shared(plan, std::as_bytes(std::span(f16)).data(), packed.data());
    encode_block(plan, std::as_bytes(std::span(f16)).data(), packed.data(), 0,
                 plan.shape().kv_heads);
    decode_block(plan, packed.data(), std::as_writable_bytes(std::span(f16)).data());
    for (std::size_t t = 0; t < block; ++t) {
        tokens[first + t].key = widened(plan, f16.data() + t, block);
        tokens[first + t].value = widened(plan, values + t * channels, 1);
    }
}

}  // namespace batch_test
