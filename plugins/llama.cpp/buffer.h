#pragma once
// The buffer type that llama.cpp puts its cache in. One buffer holds all cache tensors of one
// llama_kv_cache (they share their cells), or the scheduler's temporaries, or recurrent state; only
// the first kind is special. Its size is the packed size; the addresses that ggml computes in it
// are never read (most of them fault), so tensors are always resolved to their root and its state.

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "ggml-backend-impl.h"
#include "layer_cache.h"
#include "lowkv_ggml.h"
#include "mapping.h"
#include "settings.h"

namespace lowkv::ggml {

ggml_backend_buffer_type_t buffer_type();

class CacheBuffer;

// What a cache tensor's `extra` points to.
struct CacheTensor {
    CacheBuffer* buffer = nullptr;
    LayerCache* layer = nullptr;
    Part part = Part::keys;
};

// A tensor or the one that it is a view of; view_src always names the end of a chain of views.
inline const ggml_tensor* root(const ggml_tensor* tensor) noexcept {
    return tensor->view_src != nullptr ? tensor->view_src : tensor;
}

// Null for anything but (a view of) a tensor that a LayerCache holds.
CacheTensor* cache_tensor(const ggml_tensor* tensor) noexcept;

// Whether the tensor lives in one of our buffers, or is named like a cache and would (contexts made
// only to measure their size have empty buffers).
bool is_ours(const ggml_tensor* tensor) noexcept;

class CacheBuffer {
  public:
    CacheBuffer(std::size_t bytes, std::shared_ptr<const Setting> setting);
    ~CacheBuffer();
    CacheBuffer(const CacheBuffer&) = delete;
    CacheBuffer& operator=(const CacheBuffer&) = delete;

    std::byte* base() const noexcept { return memory_.data(); }
    void init_tensor(ggml_tensor& tensor);
    void clear(std::uint8_t value);

    const Setting& setting() const noexcept { return *setting_; }
    CellTracker& tracker(std::uint32_t stream) noexcept { return trackers_[stream]; }
    bool holds_cache() const noexcept { return holds_cache_; }

    // Before the first operation on a layer: decides all of them, and says what came of it.
    void start();

    // The host has written these bytes of a tensor: a state is being restored.
    void restored(const CacheTensor& tensor, std::size_t offset, std::size_t size);
    void step_began() noexcept { restored_layer_ = nullptr; }

    void copy_stream(const CacheTensor& tensor, std::uint32_t from, std::uint32_t to);
    void add_stats(CacheStats& stats) const;
    int last_layer() const;  // -1: holds none

  private:
    std::shared_ptr<const Setting> setting_;
    Mapping memory_;
    bool holds_cache_ = false;
    bool started_ = false;
    std::shared_ptr<Store> store_;
    std::map<std::pair<std::string, int>, std::unique_ptr<LayerCache>> layers_;  // by tag, number
    std::vector<std::unique_ptr<CacheTensor>> tensors_;
    std::vector<CellTracker> trackers_;  // per stream
    std::vector<std::pair<std::byte*, std::size_t>> plain_tensors_;

    // The run of restored rows: which layer's keys came first in it, and the next rank.
    const LayerCache* restored_layer_ = nullptr;
    const CacheTensor* restored_last_ = nullptr;
    std::uint32_t restored_rank_ = 0;

    void make_trackers(std::uint32_t streams, std::uint32_t cells);
    void report_active() const;
    void report_end() const;
};

// Bytes that a tensor takes from a buffer of ours: the packed size for what we expect to pack.
std::size_t alloc_bytes(const ggml_tensor& tensor, const Setting& setting);

CacheStats live_stats();
int last_live_layer();  // of all caches
bool any_cache_made();

}  // namespace lowkv::ggml
