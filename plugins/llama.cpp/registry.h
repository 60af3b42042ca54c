#pragma once
#include <cstddef>

#include "lowkv_ggml.h"

namespace lowkv::ggml {

// device() and backend_reg() are declared in lowkv_ggml.h.

// A new backend (one per llama_context) on the device; null with a message when it can't be.
ggml_backend_t new_backend();

bool supports_op(const ggml_tensor* op);
bool offload_op(const ggml_tensor* op);
// How many layers have a cache elsewhere, as plain f16, although their context has the device.
std::size_t layers_elsewhere();
// With a first cache of ours nothing is known of another's layers any more.
void forget_layers_elsewhere();

// Called through get_proc_address().
void set_threads(ggml_backend_t backend, int threads);
// The threads that graphs were last computed with, for what is done between graphs; before the
// first graph as many as the machine has, at most 4.
unsigned host_threads() noexcept;
void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void* data);

}  // namespace lowkv::ggml
