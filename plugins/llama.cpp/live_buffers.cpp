#include "live_buffers.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <vector>

namespace lowkv::ggml {
namespace {

// Never destroyed: a host's own globals may free caches when the process ends.
struct Live {
    std::mutex mutex;
    std::vector<const LiveBuffer*> buffers;  // the newest last
    std::set<std::uint32_t> elsewhere;
};
Live& live() {
    static auto& instance = *new Live;
    return instance;
}

std::atomic<std::uint64_t> models{0};            // so far
thread_local std::uint64_t model_in_making = 0;  // 0: none yet

}  // namespace

std::unique_lock<std::mutex> lock_live() { return std::unique_lock(live().mutex); }

void add_live(const LiveBuffer& buffer) {
    const auto lock = lock_live();
    if (live().buffers.empty()) live().elsewhere.clear();
    live().buffers.push_back(&buffer);
}

void remove_live(const LiveBuffer& buffer) {
    const auto lock = lock_live();
    std::erase(live().buffers, &buffer);
}

void for_each_live(const std::function<void(const LiveBuffer&)>& f) {
    const auto lock = lock_live();
    for (const LiveBuffer* buffer : live().buffers) f(*buffer);
}

std::uint64_t model_of_new_cache() {
    if (model_in_making == 0) model_in_making = ++models;
    return model_in_making;
}

void all_caches_made(std::uint64_t model) {
    if (model_in_making == model) model_in_making = 0;
}

bool makes_caches() { return model_in_making != 0; }

int last_live_layer(std::optional<std::uint64_t> model) {
    int last = -1;
    for_each_live([&](const LiveBuffer& buffer) {
        if (!model || buffer.model == model) last = std::max(last, buffer.last_layer);
    });
    return last;
}

bool any_refused() {
    const auto lock = lock_live();
    return std::ranges::any_of(live().buffers, &LiveBuffer::refused);
}

bool none_packs() {
    const auto lock = lock_live();
    return std::ranges::none_of(live().buffers, [](const auto* b) { return b->may_pack.load(); });
}

bool any_cache_made() { return models > 0; }

void note_layer_elsewhere(std::uint32_t layer) {
    const auto lock = lock_live();
    live().elsewhere.insert(layer);
}

std::size_t layers_elsewhere() {
    const auto lock = lock_live();
    return live().elsewhere.size();
}

}  // namespace lowkv::ggml
