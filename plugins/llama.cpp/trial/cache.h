#pragma once
// A cache as llama.cpp makes it, and the graphs that llama.cpp computes on it, by ggml's public
// functions alone: for the trial of a ggml that nobody knows (trial.cpp), and for tests.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ggml-cpp.h"

namespace lowkv::ggml::trial {

using Cells = std::vector<std::uint32_t>;
using Bytes = std::vector<std::byte>;

using Context = ggml_context_ptr;
using Buffer = ggml_backend_buffer_ptr;

// Throws std::runtime_error.
void require(bool holds, const char* what);

Context new_context();
Buffer host_memory(ggml_context* context);

struct Heads {
    int head_dim, queries, kv;
    int channels() const { return head_dim * kv; }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
    std::size_t row_bytes() const {
        return static_cast<std::size_t>(channels()) * sizeof(ggml_fp16_t);
    }
};

class Cache {
  public:
    Cache(ggml_backend_dev_t device, Heads heads, std::uint32_t cells, int streams, int layers);
    virtual ~Cache() = default;
    Cache(Cache&&) = default;

    ggml_backend_t backend() const { return backend_.get(); }
    ggml_backend_buffer_t buffer() const { return buffer_.get(); }
    void clear() { ggml_backend_buffer_clear(buffer_.get(), 0); }

    // In the order in which llama.cpp saves and restores them.
    std::vector<ggml_tensor*> tensors() const;
    ggml_tensor* keys(std::size_t layer) const { return keys_[layer]; }
    ggml_tensor* values(std::size_t layer) const { return values_[layer]; }

    // A stream of a tensor as attention reads it.
    ggml_tensor* view(ggml_context* context, ggml_tensor* cache, int stream = 0) const;

    virtual ggml_status compute(ggml_cgraph* graph);

    // The layers learn their heads when llama.cpp asks whether their attention is served.
    void ask() const;

    // Tokens written to `where` in a stream, in all layers, which attend then. fill(input,
    // numbers): of each layer keys and values, [token][channel], and queries,
    // [head][token][channel]. show(token, row): the cells that it sees, as zeros.
    using Fill = std::function<void(std::size_t, std::span<float>)>;
    using Show = std::function<void(std::size_t, ggml_fp16_t*)>;
    ggml_status step(const Cells& where, const Fill& fill, const Show& show, int stream = 0);
    // What the last step's attention gave: of each layer [token][head][channel].
    const std::vector<float>& result() const { return result_; }

    // A context shift: cell i's keys (of all streams) are turned by shifts[i] positions, in all
    // layers.
    ggml_status shift(const std::vector<std::int32_t>& shifts, int pairs = GGML_ROPE_TYPE_NORMAL);

  private:
    ggml_backend_dev_t device_;
    Heads heads_;
    ggml_backend_ptr backend_;
    Context context_ = new_context();
    std::uint32_t cells_;
    std::vector<ggml_tensor*> keys_, values_;
    Buffer buffer_;
    std::vector<float> result_;
};

}  // namespace lowkv::ggml::trial
