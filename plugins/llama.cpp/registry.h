#pragma once

#include "lowkv_ggml.h"

namespace lowkv::ggml {

// device() and backend_reg() are declared in lowkv_ggml.h.

// A new backend (one per llama_context) on the device; null with a message when it can't be.
ggml_backend_t new_backend();

bool supports_op(const ggml_tensor* op);
bool offload_op(const ggml_tensor* op);

// Called through get_proc_address().
void set_threads(ggml_backend_t backend, int threads);
void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void* data);

}  // namespace lowkv::ggml
