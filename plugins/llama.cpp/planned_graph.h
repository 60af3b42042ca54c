#pragma once
// Whose graph llama.cpp's scheduler plans in this thread. It asks about one operation after the
// other; what tells the models apart is which of them stores rows behind the norm of its queries.
//
// Layers that store nothing attend to another layer's cache: the last ones of Gemma 3n and Gemma 4,
// and all of Gemma 4's assistant, a draft model that reads its target's.

#include <cstdint>

struct ggml_tensor;

namespace lowkv::ggml {

// A model's layer stores rows: the norm that was asked about before, if it is that layer's, is too.
void note_stored(std::uint64_t model, int layer);

// Whether the layer with this weight in its queries' norm stores nothing and reads a cache of ours.
bool reads_another_layer(const ggml_tensor* norm, int layer);

// Its last cache is freed.
void forget_norms(std::uint64_t model);

}  // namespace lowkv::ggml
