#pragma once
// The model that `lowkv plan` reckons with: known by name, or read from a GGUF file's header.

#include <cstdint>
#include <string>
#include <vector>

#include "lowkv/codec.h"

namespace lowkv::cli {

struct ModelShape {
    std::string name;
    std::vector<Shape> layers;      // in the model's order; kv_heads 0: that layer keeps nothing
    std::vector<bool> sliding;      // which of them see a window alone; empty: none
    std::uint64_t window = 0;       // its tokens
    std::uint64_t query_heads = 0;  // of all layers together; 0: not known
    double weights = 0;             // bytes
    std::uint64_t files = 1;        // that it is split into; weights are those of this one alone
    std::uint64_t context = 0;      // what it was trained for; 0: not known
    std::vector<std::string> notes;
};

// The cells that llama.cpp gives a sequence in a layer that slides: as many as the window and a
// micro-batch, by default of 512 tokens, need.
std::uint64_t sliding_cells(std::uint64_t window);

// A model by name, with f16 weights. Throws UsageError, which lists the names.
ModelShape named_shape(const std::string& name);
std::string shape_names();

// Reads the header. Throws Failure when the file can't be planned for.
ModelShape gguf_shape(const std::string& path);

}  // namespace lowkv::cli
