// KIVI's arithmetic (Liu et al., 2024, section 3) on plain tensors, with the shapes of the Intel
// package kivi_sycl. The cache does not use it: its blocks have another layout.
//
//   scale = (max - min) / 3, zero = min, code = round((x - zero) / scale), four codes to a byte,
//   the first in the lowest bits

#include <nanobind/ndarray.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "lowkv/part.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lowkv::python {
namespace {

constexpr std::size_t codes_per_byte = 4;
constexpr float highest_code = 3.0f;

using Array = nb::ndarray<nb::device::cpu>;

struct BFloat16 {
    std::uint16_t bits;
};
struct Float16 {
    std::uint16_t bits;
};

float to_float(float x) { return x; }
float to_float(BFloat16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
float to_float(Float16 x) { return lowkv_f16_to_f32(x.bits); }
void set(float& to, float x) { to = x; }
void set(BFloat16& to, float x) {  // to the nearest, ties to even; x is finite
    const auto bits = std::bit_cast<std::uint32_t>(x);
    to.bits = static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
void set(Float16& to, float x) { to.bits = lowkv_f32_to_f16(x); }

// Calls f with the array's data as a pointer to its type of elements.
template <class F>
void with_floats(const Array& array, const char* name, F&& f) {
    switch (row_type(array, name)) {
        case RowType::f32: return f(static_cast<float*>(array.data()));
        case RowType::f16: return f(static_cast<Float16*>(array.data()));
        case RowType::bf16: return f(static_cast<BFloat16*>(array.data()));
    }
}

std::string text(const std::vector<std::size_t>& shape) {
    std::string out = "[";
    for (const std::size_t n : shape) out += (out.size() > 1 ? ", " : "") + std::to_string(n);
    return out + "]";
}

std::vector<std::size_t> shape_of(const Array& array) {
    std::vector<std::size_t> shape(array.ndim());
    for (std::size_t i = 0; i < shape.size(); ++i) shape[i] = array.shape(i);
    return shape;
}

void check_layout(const Array& array, const char* name, const std::vector<std::size_t>& shape) {
    check(shape_of(array) == shape,
          std::string(name) + " must have shape " + text(shape) + ", not " + text(shape_of(array)));
    std::int64_t stride = 1;
    for (std::size_t i = array.ndim(); i-- > 0;) {
        check(array.shape(i) <= 1 || array.stride(i) == stride,
              std::string(name) + " must be contiguous: call contiguous() first");
        stride *= static_cast<std::int64_t>(array.shape(i));
    }
}

// `groups` groups of `size` consecutive elements, and what belongs to them.
struct Groups {
    std::size_t groups, size;
    std::uint8_t* packed;
    float* scales;
    float* zeros;
};

// The last dimension is the one that groups run along: tokens for keys, channels for values.
Groups check_arguments(const Array& full, const char* name, const Array& packed,
                       const Array& scales, const Array& zeros, std::size_t group, bool one_group) {
    const std::vector<std::size_t> shape = shape_of(full);
    check(shape.size() == 4,
          std::string(name) + " must have 4 dimensions, not " + std::to_string(shape.size()));
    check_layout(full, name, shape);
    const std::size_t last = shape[3];
    check(group > 0 && group % codes_per_byte == 0 && last % group == 0,
          "group_size " + std::to_string(group) + " must be a multiple of 4 that divides " +
              std::to_string(last) + ", the last dimension of " + name);
    check(!one_group || last == group,
          "keys are quantized one group at a time: " + std::to_string(last) +
              " tokens were given, group_size is " + std::to_string(group));
    check(has_type(packed, nb::dlpack::dtype_code::UInt, 8), "packed must be uint8");
    check_layout(packed, "packed", {shape[0], shape[1], shape[2], last / codes_per_byte});
    std::vector<std::size_t> of_groups = {shape[0], shape[1], shape[2]};
    if (!one_group) of_groups.push_back(last / group);
    for (const auto& [array, label] : {std::pair{&scales, "scales"}, std::pair{&zeros, "zeros"}}) {
        check(has_type(*array, nb::dlpack::dtype_code::Float, 32),
              std::string(label) + " must be float32");
        check_layout(*array, label, of_groups);
    }
    return {shape[0] * shape[1] * shape[2] * (last / group), group,
            static_cast<std::uint8_t*>(packed.data()), static_cast<float*>(scales.data()),
            static_cast<float*>(zeros.data())};
}

template <class T>
void quantize_groups(const T* x, const Groups& to) {
    for (std::size_t g = 0; g < to.groups; ++g, x += to.size) {
        float low = std::numeric_limits<float>::infinity(), high = -low;
        bool finite = true;
        for (std::size_t i = 0; i < to.size; ++i) {
            const float value = to_float(x[i]);
            finite &= std::isfinite(value);
            low = std::min(low, value);
            high = std::max(high, value);
        }
        check(finite, "the input has infinite or NaN elements");
        const float scale = high / highest_code - low / highest_code;  // high - low may overflow
        std::uint8_t* codes = to.packed + g * (to.size / codes_per_byte);
        std::fill_n(codes, to.size / codes_per_byte, std::uint8_t{0});
        for (std::size_t i = 0; i < to.size && scale > 0; ++i) {
            const float code = std::nearbyint((to_float(x[i]) - low) / scale);
            const auto bits = static_cast<unsigned>(std::clamp(code, 0.0f, highest_code));
            codes[i / codes_per_byte] |=
                static_cast<std::uint8_t>(bits << (2 * (i % codes_per_byte)));
        }
        to.scales[g] = scale;
        to.zeros[g] = low;
    }
}

template <class T>
void dequantize_groups(const Groups& from, T* x) {
    for (std::size_t g = 0; g < from.groups; ++g) {
        const std::uint8_t* codes = from.packed + g * (from.size / codes_per_byte);
        for (std::size_t i = 0; i < from.size; ++i) {
            const unsigned code = (codes[i / codes_per_byte] >> (2 * (i % codes_per_byte))) & 3u;
            set(*x++, static_cast<float>(code) * from.scales[g] + from.zeros[g]);
        }
    }
}

void quantize(const Array& input, const Array& packed, const Array& scales, const Array& zeros,
              std::size_t group, bool one_group) {
    const Groups groups = check_arguments(input, "input", packed, scales, zeros, group, one_group);
    with_floats(input, "input", [&](const auto* x) {
        const nb::gil_scoped_release unlocked;
        quantize_groups(x, groups);
    });
}

void dequantize(const Array& packed, const Array& scales, const Array& zeros, const Array& output,
                std::size_t group, bool one_group) {
    const Groups groups =
        check_arguments(output, "output", packed, scales, zeros, group, one_group);
    with_floats(output, "output", [&](auto* x) {
        const nb::gil_scoped_release unlocked;
        dequantize_groups(groups, x);
    });
}

void check_head_dim(const Array& values, std::size_t head_dim) {
    check(values.ndim() == 4 && values.shape(3) == head_dim,
          "head_dim " + std::to_string(head_dim) + " is not the last dimension of the values");
}

}  // namespace

void bind_quantize(nb::module_& m) {
    m.def(
        "quantize_keys",
        [](const Array& input, const Array& packed, const Array& scales, const Array& zeros,
           std::size_t group) { quantize(input, packed, scales, zeros, group, true); },
        "input"_a, "packed"_a, "scales"_a, "zeros"_a, "group_size"_a,
        "One group of tokens, per channel: input [B, H, D, T], T being group_size, float32, "
        "float16 "
        "or bfloat16. Writes packed [B, H, D, T / 4] uint8, scales and zeros [B, H, D] float32.");
    m.def(
        "dequantize_keys",
        [](const Array& packed, const Array& scales, const Array& zeros, const Array& output,
           std::size_t group) { dequantize(packed, scales, zeros, output, group, true); },
        "packed"_a, "scales"_a, "zeros"_a, "output"_a, "group_size"_a,
        "The inverse of quantize_keys(): writes output [B, H, D, T].");
    m.def(
        "quantize_values",
        [](const Array& input, const Array& packed, const Array& scales, const Array& zeros,
           std::size_t head_dim, std::size_t group) {
            check_head_dim(input, head_dim);
            quantize(input, packed, scales, zeros, group, false);
        },
        "input"_a, "packed"_a, "scales"_a, "zeros"_a, "head_dim"_a, "group_size"_a,
        "Per token, in groups of channels: input [B, H, T, D] float32, float16 or bfloat16. Writes "
        "packed [B, H, T, D / 4] uint8, scales and zeros [B, H, T, D / group_size] float32.");
    m.def(
        "dequantize_values",
        [](const Array& packed, const Array& scales, const Array& zeros, const Array& output,
           std::size_t head_dim, std::size_t group) {
            check_head_dim(output, head_dim);
            dequantize(packed, scales, zeros, output, group, false);
        },
        "packed"_a, "scales"_a, "zeros"_a, "output"_a, "head_dim"_a, "group_size"_a,
        "The inverse of quantize_values(): writes output [B, H, T, D].");
}

}  // namespace lowkv::python
