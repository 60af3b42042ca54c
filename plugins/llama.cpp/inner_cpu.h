#pragma once
// The inner CPU backend: runs what we don't serve ourselves, on memory that it can read.

#include <vector>

#include "ggml-cpp.h"
#include "ggml.h"

namespace lowkv::ggml {

class InnerCpu {
  public:
    InnerCpu();  // throws lowkv::Error when ggml has no CPU device

    void set_threads(int threads);
    void set_abort_callback(ggml_abort_callback callback, void* data);

    ggml_status compute(ggml_cgraph* graph);
    ggml_status compute(ggml_tensor* node);

    // A copy of a node and its sources whose data may be pointed elsewhere. src[i] of the node
    // points to sources[i].
    struct Shadow {
        explicit Shadow(const ggml_tensor& original);

        ggml_tensor node;
        ggml_tensor sources[GGML_MAX_SRC];
    };

  private:
    ggml_backend_ptr backend_;
    std::vector<std::byte> graph_memory_;
};

}  // namespace lowkv::ggml
