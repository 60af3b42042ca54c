#pragma once

#include <nanobind/nanobind.h>

namespace lowkv::python {

// quantize_keys() and its kin: KIVI's 2-bit arithmetic on plain tensors.
void bind_quantize(nanobind::module_& m);

}  // namespace lowkv::python
