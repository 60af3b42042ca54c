#include "lowkv/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "attention/workspace.h"
#include "lowkv/error.h"
#include "lowkv/serial.h"
#include "round.h"

namespace lowkv {
namespace {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... message) {
    throw Error(ErrorCode::invalid_argument, message...);
}

// ---- a sequence's layers as one run of bytes ----

struct Header {
    char magic[8];
    std::uint32_t version, layers;
    // Each image's bytes follow, a u64 a layer, and zeros up to a multiple of `alignment`.
};
static_assert(sizeof(Header) == 16);

constexpr Header current = {{'L', 'O', 'W', 'K', 'V', 'M', 'D', 'L'}, 1, 0};
constexpr std::size_t alignment = 64;

std::size_t header_bytes(std::size_t layers) {
    return round_up(sizeof(Header) + layers * sizeof(std::uint64_t), alignment);
}

template <class... Parts>
[[noreturn]] void refuse_image(const Parts&... what) {
    throw Error(ErrorCode::invalid_image, "saved sequence: ", what...);
}

// The layers' images (serial.h) one after the other, behind a header that says how long each is.
// Throws Error(invalid_argument) where layers differ in length: save between steps.
std::vector<std::byte> save_model(std::span<const Sequence> layers) {
    Header header = current;
    header.layers = static_cast<std::uint32_t>(layers.size());
    std::vector<std::byte> out(header_bytes(layers.size()));
    std::memcpy(out.data(), &header, sizeof header);
    for (std::size_t i = 0; i < layers.size(); ++i) {
        if (layers[i].size() != layers[0].size())
            throw Error(ErrorCode::invalid_argument, "layer ", i, " has ", layers[i].size(),
                        " tokens and layer 0 has ", layers[0].size(), ": save between steps");
        const std::vector<std::byte> image = save_sequence(layers[i]);
        const std::uint64_t bytes = image.size();
        std::memcpy(out.data() + sizeof header + i * sizeof bytes, &bytes, sizeof bytes);
        out.insert(out.end(), image.begin(), image.end());
    }
    return out;
}

// Finds each layer's image in what save_model() wrote. Throws Error(invalid_image) if the bytes are
// damaged or have another number of layers. The images themselves are checked by load_sequence().
std::vector<std::span<const std::byte>> layer_images(std::span<const std::byte> bytes,
                                                     std::size_t layers) {
    Header header;
    if (bytes.size() < sizeof header)
        refuse_image("its ", bytes.size(), " bytes are too few for one");
    std::memcpy(&header, bytes.data(), sizeof header);
    if (std::memcmp(header.magic, current.magic, sizeof header.magic) != 0)
        refuse_image("these bytes don't begin as one");
    if (header.version != current.version)
        refuse_image("version ", header.version, "; this lowkv reads version ", current.version);
    if (header.layers != layers)
        refuse_image("it has ", header.layers, " layers, the cache ", layers);
    std::size_t at = header_bytes(layers);
    if (bytes.size() < at) refuse_image("it is cut off");
    std::vector<std::span<const std::byte>> images;
    for (std::size_t i = 0; i < layers; ++i) {
        std::uint64_t size = 0;
        std::memcpy(&size, bytes.data() + sizeof header + i * sizeof size, sizeof size);
        if (size > bytes.size() - at) refuse_image("it is cut off in layer ", i);
        images.push_back(bytes.subspan(at, size));
        at += size;
    }
    if (at != bytes.size()) refuse_image(bytes.size() - at, " bytes follow its last layer");
    return images;
}

}  // namespace

KvCache::KvCache(const KvCacheConfig& config)
    : scheme_(config.scheme),
      store_(config.store != nullptr ? config.store : std::make_shared<Store>()) {
    require_served(scheme_, Host::model_cache);
    if (config.layers == 0 || config.layers > 4096)
        refuse(config.layers, " layers; legal: 1 to 4096");
    require_layers(scheme_, config.layers);
    LayerInputs inputs;
    inputs.rows = config.rows;
    for (std::uint32_t layer = 0; layer < config.layers; ++layer)
        plans_.push_back(std::make_shared<const Plan>(scheme_.layer(layer), config.shape,
                                                      std::string_view{}, layer, inputs));
}

const KvCache::Layers& KvCache::layers_of(std::uint32_t sequence) const {
    if (sequence >= sequences_.size() || !sequences_[sequence])
        refuse("there is no sequence ", sequence);
    return *sequences_[sequence];
}

const Sequence& KvCache::at(std::uint32_t sequence, std::uint32_t layer) const {
    const Layers& layers = layers_of(sequence);
    if (layer >= layers.size()) refuse("layer ", layer, " of ", layers.size());
    return layers[layer];
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
    // A block that is cut is decoded, which may fail: in all layers or none.
    Layers cut;
    for (const Sequence& layer : layers_of(sequence)) {
        cut.push_back(layer.fork());
        cut.back().truncate(tokens);
    }
    sequences_[sequence] = std::move(cut);
}

void KvCache::attend(std::uint32_t layer, std::span<const KvAttention> sequences,
                     const AttentionParams& params, Executor& executor) {
    if (sequences.empty()) return;
    AttentionWorkspace::Impl& work = workspace_.impl();
    work.sequences.clear();
    std::size_t blocks = 0;
    for (const KvAttention& asked : sequences) {
        const Sequence& stored = at(asked.sequence, layer);
        SequenceAttention& one = work.sequences.emplace_back();
        one.io = asked.io;
        one.io.n_cells = stored.size();
        one.mask = asked.mask;
        blocks += stored.blocks();
    }
    work.views.resize(blocks);
    std::span<BlockView> left(work.views);
    for (std::size_t i = 0; i < sequences.size(); ++i) {
        const Sequence& stored = at(sequences[i].sequence, layer);
        work.sequences[i].blocks = left.first(stored.blocks());
        stored.views(left.first(stored.blocks()));
        left = left.subspan(stored.blocks());
    }
    lowkv::attend(store_->device(), *plans_[layer], work.sequences, params, workspace_, executor);
    for (const KvAttention& asked : sequences) {
        Sequence& stored = at(asked.sequence, layer);
        const AttentionIO& io = asked.io;
        if (stored.wants_queries())
            stored.update_query_stats(
                {io.q, io.q_token_stride, io.q_head_stride, io.tokens, io.heads});
    }
}

void KvCache::pack(Executor& executor) {
    for (auto& layers : sequences_)
        if (layers)
            for (Sequence& layer : *layers) layer.pack(executor);
}

std::vector<std::byte> KvCache::save(std::uint32_t sequence) const {
    return save_model(layers_of(sequence));
}

std::uint32_t KvCache::load(std::span<const std::byte> bytes) {
    const auto images = layer_images(bytes, plans_.size());
    Layers loaded;
    for (std::size_t layer = 0; layer < images.size(); ++layer) {
        loaded.push_back(load_sequence(images[layer], store_, plans_[layer], scheme_.retention));
        if (const std::uint32_t first = loaded.front().size(), last = loaded.back().size();
            first != last)
            refuse_image("its layers have ", first, " and ", last, " tokens");
    }
    return keep(std::move(loaded));
}

}  // namespace lowkv
