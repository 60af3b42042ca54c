#pragma once
// What one layer computed while the model read the calibration text.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowkv/codec.h"
#include "lowkv/rope.h"

namespace lowkv::calibration {

struct LayerSamples {
    Shape shape;
    std::uint32_t q_heads = 0;
    // The text is read in windows of `context` tokens, each from position 0 on; row r of the arrays
    // below is position r % context of window r / context.
    std::uint32_t context = 0;
    std::vector<std::uint16_t> keys;    // f16 [rows][channels], as cached (after RoPE)
    std::vector<std::uint16_t> values;  // f16 [rows][channels]
    Rope rope;                          // without frequencies: none

    // Some of the queries: their rows, after RoPE, and what the mask adds to their scores
    // (-infinity: hidden).
    std::vector<std::uint32_t> query_rows;
    std::vector<float> queries;  // [query][q_heads][head_dim]
    std::vector<float> mask;     // [query][context]
    float scale = 1.0f;          // of q.k
    float softcap = 0.0f;        // 0: none
    std::vector<float> slopes;   // [q_heads], what the mask is multiplied by (ALiBi); empty: 1
    std::vector<float> sinks;    // [q_heads], a score that no token has; empty: none

    std::size_t rows() const { return keys.size() / shape.channels(); }
};

}  // namespace lowkv::calibration
