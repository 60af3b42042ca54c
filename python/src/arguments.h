#pragma once
// What arguments from Python must be, said at the border.

#include <nanobind/ndarray.h>

#include <cstdint>

#include "lowkv/error.h"
#include "lowkv/serial.h"

namespace lowkv::python {

// The message is made of texts and numbers, where it is needed.
template <class... Parts>
void check(bool legal, const Parts&... message) {
    if (!legal) throw Error(ErrorCode::invalid_argument, message...);
}

template <class Array>
bool has_type(const Array& array, nanobind::dlpack::dtype_code code, unsigned bits) {
    const nanobind::dlpack::dtype type = array.dtype();
    return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
}

// Of the three types of elements that torch hands over.
template <class Array>
RowType row_type(const Array& array, const char* name) {
    using Code = nanobind::dlpack::dtype_code;
    if (has_type(array, Code::Float, 32)) return RowType::f32;
    if (has_type(array, Code::Float, 16)) return RowType::f16;
    if (has_type(array, Code::Bfloat, 16)) return RowType::bf16;
    throw Error(ErrorCode::invalid_argument, name, " must be float32, float16 or bfloat16");
}

}  // namespace lowkv::python
