#pragma once
// The three types of elements that torch hands over.

#include <nanobind/ndarray.h>

#include <bit>
#include <cstdint>
#include <string>

#include "lowkv/error.h"
#include "lowkv/float16.h"

namespace lowkv::python {

struct BFloat16 {
    std::uint16_t bits;
};
struct Float16 {
    std::uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
inline float to_float(Float16 x) { return codec::f16_to_f32(x.bits); }

template <class Array>
bool has_type(const Array& array, nanobind::dlpack::dtype_code code, unsigned bits) {
    const nanobind::dlpack::dtype type = array.dtype();
    return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
}

// Calls f with the array's data as float, Float16 or BFloat16; const where the array is.
template <class Array, class F>
void with_floats(const Array& array, const char* name, F&& f) {
    using Code = nanobind::dlpack::dtype_code;
    using Void = std::remove_pointer_t<decltype(array.data())>;
    const auto as = [&]<class T>(T*) {
        using Element = std::conditional_t<std::is_const_v<Void>, const T, T>;
        return static_cast<Element*>(array.data());
    };
    if (has_type(array, Code::Float, 32)) return f(as(static_cast<float*>(nullptr)));
    if (has_type(array, Code::Float, 16)) return f(as(static_cast<Float16*>(nullptr)));
    if (has_type(array, Code::Bfloat, 16)) return f(as(static_cast<BFloat16*>(nullptr)));
    throw Error(ErrorCode::invalid_argument,
                std::string(name) + " must be float32, float16 or bfloat16");
}

}  // namespace lowkv::python
