#include "buffer.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <set>
#include <string_view>
#include <utility>

#include "cache_name.h"
#include "cache_size.h"
#include "devices.h"
#include "host.h"
#include "live_buffers.h"
#include "lowkv/error.h"
#include "lowkv/executor_openmp.h"
#include "planned_graph.h"
#include "report.h"
#include "stats_file.h"

namespace lowkv::ggml {
namespace {

// A projector's and an adapter's weights take the first device that there is, and are computed on
// the CPU all the same: those of a language model only come here by -ot.
void refuse_weight(const ggml_tensor& tensor) {
    const std::string_view name = tensor.name;
    if (operation(tensor) != op_name::none) return;
    for (const std::string_view first :
         {"blk.", "token_embd", "output", "enc.", "dec.", "per_layer"})
        if (name.starts_with(first))
            throw Error(ErrorCode::unsupported, "the device LOWKV holds caches only, and ", name,
                        " is a weight: leave -ot ...=LOWKV out");
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

CacheBuffer::CacheBuffer(std::size_t bytes, std::shared_ptr<const Setting> setting)
    : setting_(std::move(setting)), memory_(bytes) {
    add_live(*this);
}

CacheBuffer::~CacheBuffer() {
    remove_live(*this);
    if (model != 0 && last_live_layer(model) < 0) forget_norms(model);
    if (!started_) return;
    try {
        write_last_stats(*this);
        if (verbose()) report_end();
    } catch (const std::exception&) {
        return;  // no memory for words: the cache is freed all the same
    }
}

void CacheBuffer::make_trackers(std::uint32_t streams, std::uint32_t cells) {
    const Scheme& scheme = setting_->scheme;
    while (trackers_.size() < streams)
        trackers_.emplace_back(
            cells, unit_tokens(scheme), row_block_tokens(scheme), scheme.retention, packs(scheme),
            unquantized_rows(scheme, cells, streams > 1 ? 1 : setting_->conversations));
}

void CacheBuffer::init_tensor(ggml_tensor& tensor) {
    if (tensor.view_src != nullptr) return;
    size_answers().forget(tensor);
    const auto name = parse_cache_name(tensor.name);
    if (!name) return refuse_weight(tensor);
    may_pack = true;
    {
        // Other threads that plan a graph look for layers meanwhile.
        const auto lock = lock_live();
        if (model == 0) model = model_of_new_cache();
        last_layer = std::max(last_layer, name->layer);
        if (store_ == nullptr) store_ = std::make_shared<Store>(0, kept_device(setting_->device));
        auto& layer = layers_[{name->tag, name->layer}];
        if (layer == nullptr)
            layer = std::make_unique<LayerCache>(setting_, store_, trackers_,
                                                 static_cast<std::uint32_t>(name->layer));
        layer->add_tensor(name->part, tensor);
        make_trackers(layer->streams(), layer->cells());
        tensors_.push_back(
            std::make_unique<CacheTensor>(CacheTensor{this, layer.get(), name->part}));
        tensor.extra = tensors_.back().get();
    }
    const std::size_t bytes = packed_bytes(tensor, *setting_);
    told_bytes_ += bytes;
    memory_.forbid(static_cast<std::size_t>(static_cast<std::byte*>(tensor.data) - base()), bytes);
}

void CacheBuffer::clear() {
    memory_.zero();
    for (auto& [key, layer] : layers_) layer->clear();
    for (CellTracker& tracker : trackers_) tracker.clear();
    restoring_ = {};
    saving_ = {};
    copied_ = {};
    failed_ = false;
    failure_.clear();
}

void CacheBuffer::start() {
    if (started_) return;
    for (auto& [key, layer] : layers_) layer->decide();
    share_budget();
    started_ = true;
    may_pack = std::ranges::any_of(layers_, [](const auto& entry) {
        return entry.second->mode() == LayerCache::Mode::packed;
    });
    plan();
    if (refused) return;
    if (!layers_.empty() && none_packs())
        report(GGML_LOG_LEVEL_WARN, "NOT active: nothing is packed");
    report_active();
}

void CacheBuffer::plan() {
    if (std::exchange(planned_, true)) return;
    all_caches_made(model);
    refuse_other_layers();
}

void CacheBuffer::prepare() {
    start();
    require_whole();
    end_restore();
    copied_ = {};
    saving_ = {};
}

// A scheme that speaks of layers which no model in this process has was meant for another one. One
// that an earlier model has them of was meant for that: this one may be its draft, and goes on.
void CacheBuffer::refuse_other_layers() {
    const int highest = last_live_layer(model);
    const int of_all = last_live_layer();
    for (const LayerOverride& o : setting_->scheme.overrides) {
        if (static_cast<int>(o.last) <= highest) continue;
        const std::string why = concat("the scheme ", setting_->text, " speaks of layer ", o.last,
                                       ", but the model's last layer with a cache is ", highest);
        if (static_cast<int>(o.last) <= of_all) {
            report_once(GGML_LOG_LEVEL_WARN, why + ": it was meant for another model");
            return;
        }
        refuse(why);
        return;
    }
}

void CacheBuffer::refuse(const std::string& why) {
    {
        const auto lock = lock_live();
        refused = true;
        refusal_ = why;
    }
    report(GGML_LOG_LEVEL_ERROR, why);
}

void CacheBuffer::follow(std::uint32_t stream, Executor& executor) {
    for (auto& [key, layer] : layers_)
        if (layer->mode() == LayerCache::Mode::packed) layer->follow(stream, executor);
}

void CacheBuffer::follow_all() {
    OpenMPExecutor executor(host_threads());
    for (std::uint32_t s = 0; s < trackers_.size(); ++s) follow(s, executor);
}

void CacheBuffer::poison_shifted(const std::int32_t* shifts, const char* why) noexcept {
    std::size_t row = 0;  // over all streams
    for (CellTracker& tracker : trackers_)
        for (std::uint32_t cell = 0; cell < tracker.groups().cells(); ++cell, ++row)
            if (shifts == nullptr || shifts[row] != 0) tracker.poison(cell);
    poison("a context shift has failed: ", why);
}

void CacheBuffer::fail(const char* what, const char* why) noexcept {
    failed_ = true;
    try {
        failure_ = concat(what, ": ", why);
        report(GGML_LOG_LEVEL_ERROR, failure_);
    } catch (const std::exception&) {
        failure_.clear();  // no memory for a reason
    }
}

void CacheBuffer::require_whole() {
    if (refused) throw Error(ErrorCode::unsupported, refusal_);
    if (!failed_) return;
    failed_ = false;
    throw Error(ErrorCode::invalid_argument,
                "an operation on the cache that llama.cpp takes for done has failed: ",
                std::exchange(failure_, {}));
}

void CacheBuffer::require_sane(std::uint32_t stream, const MaskRows& mask,
                               std::size_t tokens) const {
    if (trackers_[stream].sees_poison(mask.data, mask.stride, tokens, mask.visible))
        throw Error(ErrorCode::invalid_argument, poison_);
}

void CacheBuffer::add_stats(CacheStats& stats) const {
    if (store_ == nullptr) return;
    ++stats.buffers;
    stats.scheme = setting_->text;
    stats.told_bytes += memory_.bytes();
    const StoreStats store = store_->stats();
    stats.exact_bytes += store.exact_bytes;
    stats.packed_bytes += store.packed_bytes;
    stats.peak_bytes += store.peak_bytes;
    stats.encoded_blocks += store.encoded_blocks;
    stats.reopened_blocks += store.reopened_blocks;
    stats.restarted_statistics += store.restarted_statistics;
    std::size_t packed_layers = 0;
    for (const auto& [key, layer] : layers_) {
        stats.exact_bytes_per_token +=
            static_cast<double>(layer->row_bytes(Part::keys) + layer->row_bytes(Part::values));
        if (layer->mode() == LayerCache::Mode::plain) {
            ++stats.plain_layers;
            stats.exact_bytes += layer->nominal_bytes();
            stats.peak_bytes += layer->nominal_bytes();
        }
        if (layer->mode() != LayerCache::Mode::packed) continue;
        ++packed_layers;
        const Plan& plan = layer->plan();
        stats.moved_blocks += layer->moved_blocks();
        stats.coarsened_blocks += layer->coarsened_blocks();
        stats.packed_bytes_per_token +=
            static_cast<double>(plan.packed_bytes()) / plan.block_tokens();
    }
    stats.layers += packed_layers;
    for (const CellTracker& tracker : trackers_) {
        stats.cells_exact += tracker.groups().exact_count();
        stats.cells_packed += tracker.groups().packed_count();
        stats.repacked_cells += tracker.repacked_rows();
    }
}

void CacheBuffer::report_active() const {
    CacheStats stats;
    add_stats(stats);
    std::set<std::string> reasons;
    std::size_t plain_bytes = 0;
    std::string implementation;
    for (const auto& [key, layer] : layers_) {
        if (layer->mode() == LayerCache::Mode::packed) {
            implementation = layer->plan().implementation();
            continue;
        }
        reasons.insert(layer->reason());
        plain_bytes += layer->nominal_bytes();
    }
    char line[512];
    if (stats.layers > 0) {
        std::string where = concat("on ", store_->device().name());
        if (where == "on cpu") where = "implementation " + implementation;
        std::snprintf(
            line, sizeof line,
            "active: scheme %s, %s layers, %.0f -> %.0f bytes per token (%.1fx smaller), %s",
            setting_->text.c_str(), std::to_string(stats.layers).c_str(),
            stats.exact_bytes_per_token, stats.packed_bytes_per_token,
            stats.exact_bytes_per_token / stats.packed_bytes_per_token, where.c_str());
        report(GGML_LOG_LEVEL_INFO, line);
    }
    for (const std::string& reason : reasons)
        report(GGML_LOG_LEVEL_WARN, concat("NOT active for ", layers_.size() - stats.layers, " of ",
                                           layers_.size(), " layers, which stay f16: ", reason));
    // llama.cpp asked before it said how the cache would be used.
    if (plain_bytes <= memory_.bytes()) return;
    std::snprintf(line, sizeof line,
                  "the layers that stay f16 take %.2f MiB, more than llama.cpp was told",
                  static_cast<double>(plain_bytes) / (1 << 20));
    report(GGML_LOG_LEVEL_WARN, line);
}

void CacheBuffer::report_end() const {
    CacheStats stats;
    add_stats(stats);
    report(GGML_LOG_LEVEL_INFO,
           concat("cache freed: scheme ", stats.scheme, ", cells packed ", stats.cells_packed,
                  ", exact ", stats.cells_exact, ", bytes packed ", stats.packed_bytes, ", exact ",
                  stats.exact_bytes, ", peak ", stats.peak_bytes, ", reopened blocks ",
                  stats.reopened_blocks, ", restored cells packed again ", stats.repacked_cells));
}

void for_each_live_cache(const std::function<void(const CacheBuffer&)>& f) {
    for_each_live([&](const LiveBuffer& buffer) { f(static_cast<const CacheBuffer&>(buffer)); });
}

}  // namespace lowkv::ggml
