#include "lowkv/kv_cache.h"

#include <algorithm>
#include <string>
#include <utility>

#include "cache/model_image.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

[[noreturn]] void refuse(const std::string& message) {
    throw Error(ErrorCode::invalid_argument, message);
}

}  // namespace

KvCache::KvCache(const KvCacheConfig& config)
    : scheme_(config.scheme),
      store_(config.store != nullptr ? config.store : std::make_shared<Store>()) {
    if (scheme_.needs_calibration() || scheme_.retention.filter != Filter::none)
        throw Error(ErrorCode::unsupported,
                    "schemes that need a calibration, and filters, are not served in a whole "
                    "model's cache: " +
                        to_string(scheme_));
    if (config.layers == 0 || config.layers > 4096)
        refuse(std::to_string(config.layers) + " layers; legal: 1 to 4096");
    require_layers(scheme_, config.layers);
    LayerInputs inputs;
    inputs.rows = config.rows;
    for (std::uint32_t layer = 0; layer < config.layers; ++layer) {
        inputs.byte_rows = scheme_.byte_rows(layer);
        plans_.push_back(std::make_shared<const Plan>(scheme_.layer(layer), config.shape,
                                                      std::string_view{}, layer, inputs));
        if (plans_.back()->has_positions())
            throw Error(ErrorCode::unsupported,
                        "keys before RoPE are not served in a whole model's cache");
    }
}

const KvCache::Layers& KvCache::layers_of(std::uint32_t sequence) const {
    if (sequence >= sequences_.size() || !sequences_[sequence])
        refuse("there is no sequence " + std::to_string(sequence));
    return *sequences_[sequence];
}

const Sequence& KvCache::at(std::uint32_t sequence, std::uint32_t layer) const {
    const Layers& its = layers_of(sequence);
    if (layer >= its.size())
        refuse("layer " + std::to_string(layer) + " of " + std::to_string(its.size()));
    return its[layer];
}

Sequence& KvCache::at(std::uint32_t sequence, std::uint32_t layer) {
    return const_cast<Sequence&>(std::as_const(*this).at(sequence, layer));
}

std::uint32_t KvCache::keep(Layers layers) {
    const auto free = std::ranges::find_if(sequences_, [](const auto& s) { return !s; });
    const auto number = static_cast<std::uint32_t>(free - sequences_.begin());
    if (free == sequences_.end()) sequences_.emplace_back();
    sequences_[number] = std::move(layers);
    return number;
}

std::uint32_t KvCache::add() {
    Layers made;
    for (const auto& plan : plans_) made.emplace_back(store_, plan, scheme_.retention);
    return keep(std::move(made));
}

std::uint32_t KvCache::fork(std::uint32_t sequence) {
    Layers made;
    for (const Sequence& layer : layers_of(sequence)) made.push_back(layer.fork());
    return keep(std::move(made));
}

void KvCache::remove(std::uint32_t sequence) {
    layers_of(sequence);
    sequences_[sequence].reset();
}

void KvCache::truncate(std::uint32_t sequence, std::uint32_t tokens) {
    layers_of(sequence);
    for (Sequence& layer : *sequences_[sequence]) layer.truncate(tokens);
}

void KvCache::attend(std::uint32_t layer, std::span<const KvAttention> sequences,
                     const AttentionParams& params, Executor& executor) {
    if (sequences.empty()) return;
    attended_.clear();
    std::size_t blocks = 0;
    for (const KvAttention& asked : sequences) {
        const Sequence& its = at(asked.sequence, layer);
        SequenceAttention& one = attended_.emplace_back();
        one.io = asked.io;
        one.io.n_cells = its.size();
        one.mask = asked.mask;
        blocks += its.blocks();
    }
    views_.resize(blocks);
    std::span<BlockView> left(views_);
    for (std::size_t i = 0; i < sequences.size(); ++i) {
        const Sequence& its = at(sequences[i].sequence, layer);
        attended_[i].blocks = left.first(its.blocks());
        its.views(left.first(its.blocks()));
        left = left.subspan(its.blocks());
    }
    lowkv::attend(store_->device(), *plans_[layer], attended_, params, workspace_, executor);
    for (const KvAttention& asked : sequences) {
        Sequence& its = at(asked.sequence, layer);
        const AttentionIO& io = asked.io;
        if (its.wants_queries())
            its.update_query_stats(
                {io.q, io.q_token_stride, io.q_head_stride, io.tokens, io.heads});
    }
}

void KvCache::pack(Executor& executor) {
    for (auto& its : sequences_)
        if (its)
            for (Sequence& layer : *its) layer.pack(executor);
}

std::vector<std::byte> KvCache::save(std::uint32_t sequence) const {
    return cache::save_model(layers_of(sequence));
}

std::uint32_t KvCache::load(std::span<const std::byte> bytes) {
    const auto images = cache::layer_images(bytes, plans_.size());
    Layers loaded;
    for (std::size_t layer = 0; layer < images.size(); ++layer) {
        loaded.push_back(load_sequence(images[layer], store_, plans_[layer], scheme_.retention));
        cache::require_same_length(loaded.front(), loaded.back());
    }
    return keep(std::move(loaded));
}

}  // namespace lowkv
