#pragma once
// What a model computes while it reads a text: the rows that go into its cache and some of the
// queries that read them, from the nodes of llama.cpp's graphs, with a stock f16 cache.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "common/model.h"
#include "lowkv/calibrate.h"
#include "lowkv/scheme.h"

namespace lowkv::cli {

struct CaptureOptions {
    unsigned threads = 1;
    std::uint32_t chunk = 512;
    std::uint32_t first_query = 0;  // position; queries are taken evenly from there to the end
    std::uint32_t queries = 32;     // of each window
};

// One entry for each layer of the model; windows are equally long. The rope is read for layers
// whose keys the scheme stores as they were before it. `tick` gets the number of tokens just read.
// Throws Failure for a model whose layers don't all keep keys and values of one shape, or whose
// attention isn't one that lowkv serves, and Error(unsupported) for a rope that it can't undo.
std::vector<calibration::LayerSamples> capture(const Model& model,
                                               const std::vector<std::vector<llama_token>>& windows,
                                               const Scheme& scheme, const CaptureOptions& options,
                                               const std::function<void(std::size_t)>& tick);

}  // namespace lowkv::cli
