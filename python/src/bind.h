#pragma once

#include <nanobind/nanobind.h>

namespace lowkv::python {

// parse_scheme() and what it gives, presets, plans.
void bind_scheme(nanobind::module_& m);
// Stores, batches and their images.
void bind_batch(nanobind::module_& m);
// A layer in pages of a host's memory.
void bind_paged(nanobind::module_& m);
// quantize_keys() and its kin: KIVI's 2-bit arithmetic on plain tensors.
void bind_quantize(nanobind::module_& m);

}  // namespace lowkv::python
