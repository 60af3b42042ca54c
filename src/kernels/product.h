#pragma once
// What the kernels of an instruction set multiply: one head of one block as a matrix. Shared by its
// translation units, and the same for all.

#include <cstddef>
#include <cstdint>

#include "kernels/table.h"

namespace lowkv::kernels {

struct Matrix {
    const std::byte* data = nullptr;  // a head's section; exact: its f16 elements, steps of lanes
    const PartLayout* layout = nullptr;
    unsigned lane_count = 0, step_count = 0;
    std::size_t exact_stride = 0;  // elements between steps
    bool exact = false;
    bool folded = false;
    bool keys = false;
    const std::byte* metadata = nullptr;  // the section that has it: the head's, or all heads'
    unsigned first_channel = 0;           // of the head
    const std::uint16_t* mean = nullptr;  // centred keys: one f16 a step
};

// What a head's packed keys are less: its block's mean, or nothing.
inline const std::uint16_t* mean_of(const PartLayout& layout, const std::byte* section) {
    if (!layout.codec.centred) return nullptr;
    return reinterpret_cast<const std::uint16_t*>(section + layout.mean_offset);
}

// A balanced head's factors, one f16 a lane (codec.h).
inline const std::uint16_t* factors_of(const PartLayout& layout, const std::byte* section) {
    return reinterpret_cast<const std::uint16_t*>(section + layout.factors_offset);
}

// A span's packed blocks are multiplied together, so that one's preparation overlaps with
// another's products. `ahead` is what will be needed next, fetched meanwhile.
struct Product {
    Matrix x;
    const float* w = nullptr;
    float* y = nullptr;
    const std::byte* ahead = nullptr;
    std::size_t ahead_bytes = 0;
};
inline constexpr unsigned max_products = span_tokens / tile_tokens;

using Multiply = void (*)(const Product* products, unsigned count, std::size_t w_stride,
                          std::size_t y_stride) noexcept;

}  // namespace lowkv::kernels
