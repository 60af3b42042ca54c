#pragma once
// The llama.cpp plug-in, for programs that link it: register the backend in-process, choose the
// scheme of the caches that are made next, and read what they hold.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ggml-backend.h"

namespace lowkv::ggml {

// The backend's registry entry: pass it to ggml_backend_register(), then name device() in
// llama_model_params.devices. One device, "LOWKV".
ggml_backend_reg_t backend_reg();
ggml_backend_dev_t device();

// The scheme of caches allocated from now on (llama_init_from_model). Throws lowkv::Error.
void set_scheme(const std::string& text);

// A file of `lowkv calibrate`, for schemes set from now on. Throws lowkv::Error.
void add_calibration(const std::string& path);

// The versions of ggml that a program may have to load the plug-in: the first and the last.
struct ServedVersions {
    std::string oldest, newest;
};
ServedVersions served_versions();

// What the live caches hold, all buffers together. Neither stats() nor layer_reports() may be
// called while a cache of the process is computed with, restored, made or freed in another thread.
// LOWKV_STATS writes figures that each cache's own thread takes.
struct CacheStats {
    std::string scheme;              // of the newest cache
    std::uint64_t buffers = 0;       // live cache buffers
    std::uint64_t layers = 0;        // layers served packed
    std::uint64_t plain_layers = 0;  // layers kept as f16
    std::uint64_t exact_bytes = 0;   // now
    std::uint64_t packed_bytes = 0;  // now
    std::uint64_t peak_bytes = 0;    // exact + packed, highest so far
    std::uint64_t told_bytes = 0;    // the most of both between steps, as llama.cpp was told
    std::uint64_t cells_exact = 0;   // written cells by state, the same in all layers
    std::uint64_t cells_packed = 0;
    double packed_bytes_per_token = 0;       // all layers, keys and values, once packed
    double exact_bytes_per_token = 0;        // all layers at f16: what stock llama.cpp would hold
    std::uint64_t encoded_blocks = 0;        // since the caches were made
    std::uint64_t reopened_blocks = 0;       // StoreStats
    std::uint64_t restarted_statistics = 0;  // StoreStats
    std::uint64_t moved_blocks = 0;          // by context shifts, codes unchanged
    std::uint64_t coarsened_blocks = 0;      // packed once more with fewer bits, as a budget asks
    std::uint64_t repacked_cells = 0;        // restored packed, and packed once more

    double held_bytes() const { return static_cast<double>(exact_bytes + packed_bytes); }
};
CacheStats stats();

// One layer of a live cache.
struct LayerReport {
    std::uint32_t layer = 0;  // as llama.cpp numbers it
    bool packed = false;      // served packed, known from its first operation on
    std::string why;          // it isn't
    std::uint32_t cells = 0;  // a stream's room: fewer than the context's where the layer slides
    std::size_t f16_bytes_per_token = 0;  // what stock llama.cpp would hold
    // Of a packed layer: its shape, the written cells of all streams, and the bytes that hold them.
    std::uint32_t kv_heads = 0, head_dim = 0, value_dim = 0;  // Shape
    std::size_t cells_packed = 0, cells_exact = 0;
    std::size_t packed_bytes = 0, exact_bytes = 0;
};
// All layers of the live caches, by number.
std::vector<LayerReport> layer_reports();

}  // namespace lowkv::ggml
