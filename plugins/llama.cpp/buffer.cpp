#include "buffer.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <set>

#include "cache_name.h"
#include "lowkv/error.h"
#include "report.h"

namespace lowkv::ggml {
namespace {

std::mutex live_mutex;
std::set<const CacheBuffer*>& live() {
    static std::set<const CacheBuffer*> buffers;
    return buffers;
}
bool cache_made = false;

bool packable(const ggml_tensor& tensor, const Setting& setting) {
    return !setting.delegate && tensor.type == GGML_TYPE_F16 && tensor.view_src == nullptr;
}

std::uint32_t largest_block(const Scheme& scheme) {
    std::uint32_t block = block_tokens(scheme.base);
    for (const LayerOverride& o : scheme.overrides) block = std::max(block, block_tokens(o.scheme));
    return block;
}

}  // namespace

CacheTensor* cache_tensor(const ggml_tensor* tensor) noexcept {
    const ggml_tensor* r = root(tensor);
    if (r->buffer == nullptr || r->buffer->buft != buffer_type()) return nullptr;
    return static_cast<CacheTensor*>(r->extra);
}

bool is_ours(const ggml_tensor* tensor) noexcept {
    const ggml_tensor* r = root(tensor);
    if (r->buffer == nullptr || r->buffer->buft != buffer_type()) return false;
    return r->buffer->size > 0 || std::string_view(r->name).starts_with(cache_prefix);
}

// The heads are not known when llama.cpp asks for the size, and the padding of a packed block
// depends on them a little: take the worst of the head sizes that fit.
std::size_t alloc_bytes(const ggml_tensor& tensor, const Setting& setting) {
    const std::size_t nominal = ggml_nbytes(&tensor);
    const auto name = parse_cache_name(tensor.name);
    if (!name || !packable(tensor, setting)) return nominal;
    const LayerScheme& scheme = setting.scheme.layer(static_cast<std::uint32_t>(name->layer));
    if (scheme.exact()) return nominal;

    const auto channels = static_cast<std::uint32_t>(tensor.ne[0]);
    const std::size_t tokens = block_tokens(scheme);
    std::size_t packed = 0;
    for (const std::uint32_t head_dim : {64u, 80u, 96u, 128u, 256u}) {
        if (channels % head_dim != 0) continue;
        try {
            const Plan plan(scheme, {.kv_heads = channels / head_dim, .head_dim = head_dim});
            packed = std::max(packed,
                              name->part == Part::keys ? plan.keys().bytes : plan.values().bytes);
        } catch (const Error&) {
            continue;  // the layer will say so when it decides
        }
    }
    if (packed == 0) return nominal;
    const std::size_t blocks = (static_cast<std::size_t>(tensor.ne[1]) + tokens - 1) / tokens;
    const Retention& keep = setting.scheme.retention;
    const std::size_t exact_tokens = std::size_t{keep.window} + keep.sinks + keep.flush;
    const std::size_t exact_blocks = std::min(blocks, (exact_tokens + tokens - 1) / tokens + 1);
    const std::size_t per_stream =
        blocks * packed + exact_blocks * tokens * channels * sizeof(ggml_fp16_t);
    return std::min(nominal, per_stream * static_cast<std::size_t>(tensor.ne[2]));
}

CacheBuffer::CacheBuffer(std::size_t bytes, std::shared_ptr<const Setting> setting)
    : setting_(std::move(setting)), memory_(bytes), store_(std::make_shared<Store>()) {
    const std::lock_guard lock(live_mutex);
    live().insert(this);
}

CacheBuffer::~CacheBuffer() {
    {
        const std::lock_guard lock(live_mutex);
        live().erase(this);
    }
    if (started_ && verbose()) report_end();
}

void CacheBuffer::make_trackers(std::uint32_t streams, std::uint32_t cells) {
    while (trackers_.size() < streams)
        trackers_.emplace_back(cells, largest_block(setting_->scheme), setting_->scheme.retention);
}

void CacheBuffer::init_tensor(ggml_tensor& tensor) {
    if (tensor.view_src != nullptr) return;
    const auto name = parse_cache_name(tensor.name);
    if (name) {
        const std::lock_guard lock(live_mutex);
        holds_cache_ = cache_made = true;
    }
    auto* address = static_cast<std::byte*>(tensor.data);
    if (!name || setting_->delegate) {
        if (!name) return;
        if (plain_tensors_.empty())
            report(GGML_LOG_LEVEL_INFO, "active: scheme delegate, plain f16 on stock CPU kernels");
        plain_tensors_.emplace_back(address, ggml_nbytes(&tensor));
        return;
    }
    auto& layer = layers_[{name->tag, name->layer}];
    if (layer == nullptr)
        layer =
            std::make_unique<LayerCache>(setting_, store_, static_cast<std::uint32_t>(name->layer));
    layer->add_tensor(name->part, tensor);
    make_trackers(layer->streams(), layer->cells());
    tensors_.push_back(std::make_unique<CacheTensor>(CacheTensor{this, layer.get(), name->part}));
    tensor.extra = tensors_.back().get();
    memory_.forbid(static_cast<std::size_t>(address - base()), alloc_bytes(tensor, *setting_));
}

void CacheBuffer::clear(std::uint8_t value) {
    memory_.zero();
    if (value != 0) {
        for (const auto& [address, bytes] : plain_tensors_) std::memset(address, value, bytes);
    }
    for (auto& [key, layer] : layers_) layer->clear();
    for (CellTracker& tracker : trackers_) tracker.clear();
    restored_layer_ = nullptr;
}

void CacheBuffer::start() {
    if (started_) return;
    started_ = true;
    for (auto& [key, layer] : layers_) layer->decide();
    report_active();
}

// llama.cpp restores a state layer by layer: first all keys, then all values. The first layer's
// keys tell the cells and their order; a layer's values complete its blocks, which are packed at
// once.
void CacheBuffer::restored(const CacheTensor& tensor, std::size_t offset, std::size_t size) {
    const bool again = restored_last_ != &tensor;
    restored_last_ = &tensor;
    LayerCache& layer = *tensor.layer;
    if (layer.mode() != LayerCache::Mode::packed || size == 0) return;
    const std::size_t bytes = layer.row_bytes(tensor.part);
    const std::size_t cells = layer.cells();
    std::size_t row = offset / bytes;
    const std::size_t end = (offset + size - 1) / bytes + 1;
    if (tensor.part == Part::values) {
        while (row < end) {
            const auto stream = static_cast<std::uint32_t>(row / cells);
            const std::size_t next = std::min(end, (row / cells + 1) * cells);
            trackers_[stream].settle_restored();
            layer.pack_restored(stream, static_cast<std::uint32_t>(row % cells),
                                static_cast<std::uint32_t>((next - 1) % cells + 1),
                                trackers_[stream]);
            row = next;
        }
        return;
    }
    if (restored_layer_ == nullptr || (restored_layer_ == &layer && again)) {
        restored_layer_ = &layer;
        restored_rank_ = 1;
    }
    if (restored_layer_ != &layer) return;  // the other layers repeat the same cells
    for (; row < end; ++row)
        trackers_[row / cells].restore(static_cast<std::uint32_t>(row % cells), restored_rank_++);
}

void CacheBuffer::copy_stream(const CacheTensor& tensor, std::uint32_t from, std::uint32_t to) {
    tensor.layer->copy_stream(from, to);
    trackers_[to] = trackers_[from];
}

void CacheBuffer::add_stats(CacheStats& stats) const {
    if (!holds_cache_) return;
    ++stats.buffers;
    stats.scheme = setting_->text;
    const StoreStats store = store_->stats();
    stats.exact_bytes += store.exact_bytes;
    stats.packed_bytes += store.packed_bytes;
    stats.peak_bytes += store.peak_bytes;
    stats.reopened_blocks += store.reopened_blocks;
    std::size_t packed_layers = 0;
    std::size_t exact = 0;
    std::size_t packed = 0;
    for (const auto& [key, layer] : layers_) {
        stats.exact_bytes_per_token +=
            static_cast<double>(layer->row_bytes(Part::keys) + layer->row_bytes(Part::values));
        if (layer->mode() == LayerCache::Mode::plain) {
            const std::size_t bytes =
                layer->nominal_bytes(Part::keys) + layer->nominal_bytes(Part::values);
            stats.exact_bytes += bytes;
            stats.peak_bytes += bytes;
        }
        if (layer->mode() != LayerCache::Mode::packed) continue;
        ++packed_layers;
        const Plan& plan = layer->plan();
        stats.packed_bytes_per_token +=
            static_cast<double>(plan.packed_bytes()) / plan.block_tokens();
        for (std::uint32_t s = 0; s < layer->streams(); ++s) {
            const Sequence& sequence = layer->stream(s).sequence;
            for (std::uint32_t b = 0; b < sequence.blocks(); ++b) {
                if (sequence.packed(b))
                    packed += plan.block_tokens();
                else if (sequence.full(b))
                    exact += plan.block_tokens();
                else if (sequence.view(b).keys != nullptr)
                    exact +=
                        std::min(sequence.size() - b * plan.block_tokens(), plan.block_tokens());
            }
        }
    }
    stats.layers += packed_layers;
    if (packed_layers > 0) {
        stats.cells_exact += exact / packed_layers;
        stats.cells_packed += packed / packed_layers;
    }
}

void CacheBuffer::report_active() const {
    CacheStats stats;
    add_stats(stats);
    std::set<std::string> reasons;
    std::string implementation;
    for (const auto& [key, layer] : layers_) {
        if (layer->mode() == LayerCache::Mode::packed)
            implementation = layer->plan().implementation();
        else
            reasons.insert(layer->reason());
    }
    char line[512];
    if (stats.layers > 0) {
        std::snprintf(
            line, sizeof line,
            "active: scheme %s, %zu layers, %.0f -> %.0f bytes per token (%.1fx smaller), "
            "implementation %s",
            setting_->text.c_str(), stats.layers, stats.exact_bytes_per_token,
            stats.packed_bytes_per_token,
            stats.exact_bytes_per_token / stats.packed_bytes_per_token, implementation.c_str());
        report(GGML_LOG_LEVEL_INFO, line);
    }
    for (const std::string& reason : reasons)
        report(GGML_LOG_LEVEL_WARN,
               "NOT active for " + std::to_string(layers_.size() - stats.layers) + " of " +
                   std::to_string(layers_.size()) + " layers, which stay f16: " + reason);
}

void CacheBuffer::report_end() const {
    CacheStats stats;
    add_stats(stats);
    char line[512];
    std::snprintf(
        line, sizeof line,
        "cache freed: scheme %s, cells packed %zu, exact %zu, bytes packed %zu, exact %zu, "
        "peak %zu, reopened blocks %llu",
        stats.scheme.c_str(), stats.cells_packed, stats.cells_exact, stats.packed_bytes,
        stats.exact_bytes, stats.peak_bytes,
        static_cast<unsigned long long>(stats.reopened_blocks));
    report(GGML_LOG_LEVEL_INFO, line);
}

CacheStats live_stats() {
    const std::lock_guard lock(live_mutex);
    CacheStats stats;
    for (const CacheBuffer* buffer : live()) buffer->add_stats(stats);
    return stats;
}

int CacheBuffer::last_layer() const {
    int last = -1;
    for (const auto& [key, layer] : layers_) last = std::max(last, key.second);
    return last;
}

int last_live_layer() {
    const std::lock_guard lock(live_mutex);
    int last = -1;
    for (const CacheBuffer* buffer : live()) last = std::max(last, buffer->last_layer());
    return last;
}

bool any_cache_made() {
    const std::lock_guard lock(live_mutex);
    return cache_made;
}

}  // namespace lowkv::ggml
