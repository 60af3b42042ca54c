#pragma once
// The caches of this process, for whoever asks about all of them and can't know their buffers.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>

#include "lowkv_ggml.h"

namespace lowkv::ggml {

// What others may know of a CacheBuffer.
struct LiveBuffer {
    std::uint64_t model = 0;             // the same for all caches of a context. 0: it holds none
    int last_layer = -1;                 // -1: it holds none
    std::atomic<bool> may_pack = false;  // a layer is packed, or it is open yet
    bool refused = false;                // nothing is computed on it
    virtual void add_stats(CacheStats& stats) const = 0;

  protected:
    ~LiveBuffer() = default;
};

void add_live(const LiveBuffer& buffer);
void remove_live(const LiveBuffer& buffer);
// While it is held no buffer is made or freed, and no other thread looks at one: for changes of a
// LiveBuffer.
std::unique_lock<std::mutex> lock_live();
void for_each_live(const std::function<void(const LiveBuffer&)>& f);

// The model whose caches this thread is making: a new one, or the one that is not all made yet.
std::uint64_t model_of_new_cache();
void all_caches_made(std::uint64_t model);
bool makes_caches();  // this thread has, and no graph was planned on them yet

int last_live_layer(std::optional<std::uint64_t> model = {});  // of all caches, or of a model's
bool any_refused();                                            // then no context can be made
bool none_packs();                                             // of all caches
bool any_cache_made();

// Layers of caches that contexts with our device keep elsewhere, as plain f16: some of a model, as
// of `-ngl 10`, or all. With a first buffer of ours nothing is known of them any more.
void note_layer_elsewhere(std::uint32_t layer);
std::size_t layers_elsewhere();

}  // namespace lowkv::ggml
