#include "cache_size.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "cache_name.h"
#include "ggml.h"
#include "host.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"

namespace lowkv::ggml {
namespace {

// The sizes of one block; zeros if no head size fits.
struct BlockSizes {
    std::size_t keys = 0, values = 0, exact = 0;
    bool latent = false;  // keys without values may be latent rows, which are packed
};

// Of multi-head latent attention, in all models that llama.cpp has it for.
constexpr Shape latent_shape{.kv_heads = 1, .head_dim = 576, .value_dim = 512};

// The heads are not known when llama.cpp asks for the size, and the padding of a packed block
// depends on them a little: take the worst of the head sizes that fit.
BlockSizes measure(const LayerScheme& scheme, std::uint32_t channels) {
    BlockSizes sizes;
    std::vector<Shape> shapes;
    for (const std::uint32_t head_dim : {64u, 80u, 96u, 128u, 256u, 320u, 512u, 576u})
        if (channels % head_dim == 0)
            shapes.push_back({.kv_heads = channels / head_dim, .head_dim = head_dim});
    if (channels == latent_shape.channels()) shapes.push_back(latent_shape);
    for (const Shape& shape : shapes) {
        try {
            // A calibration changes no size.
            const Plan plan = neutral_plan(scheme, shape);
            sizes.latent |= shape.latent();
            sizes.keys = std::max(sizes.keys, plan.keys().bytes());
            sizes.values = std::max(sizes.values, plan.values().bytes());
            sizes.exact = std::max(sizes.exact, plan.exact_part_bytes());
        } catch (const Error&) {
            continue;  // the layer will say so when it decides
        }
    }
    return sizes;
}

// Measured once: a plan of a random rotation (-qr) takes a tenth of a second.
BlockSizes block_sizes(const LayerScheme& scheme, std::uint32_t channels) {
    struct Known {
        LayerScheme scheme;
        std::uint32_t channels;
        BlockSizes sizes;
    };
    // Never destroyed: a host's own globals may free caches when the process ends.
    static auto& mutex = *new std::mutex;
    static auto& known = *new std::vector<Known>;
    const std::lock_guard lock(mutex);
    const auto found = std::find_if(known.begin(), known.end(), [&](const Known& k) {
        return k.scheme == scheme && k.channels == channels;
    });
    if (found != known.end()) return found->sizes;
    return known.emplace_back(scheme, channels, measure(scheme, channels)).sizes;
}

}  // namespace

bool packs(const Scheme& scheme) {
    return scheme.any_layer([](const LayerScheme& layer) { return !layer.exact(); });
}

bool stores_positions(const Scheme& scheme) {
    return scheme.any_layer([](const LayerScheme& layer) { return layer.key.stage == Stage::pre; });
}

std::uint32_t unit_tokens(const Scheme& scheme) {
    std::uint32_t unit = block_tokens(scheme.base);
    for (const LayerOverride& its : scheme.overrides)
        unit = std::max(unit, block_tokens(its.scheme));
    return unit;
}

std::uint32_t row_block_tokens(const Scheme& scheme) {
    const std::uint32_t unit = unit_tokens(scheme);
    return stores_positions(scheme) ? unit : std::min(block_tokens(LayerScheme{}), unit);
}

std::size_t unquantized_rows(const Scheme& scheme, std::size_t cells, std::size_t conversations) {
    const std::uint32_t unit = unit_tokens(scheme);
    Retention window = scheme.retention;
    window.sinks = 0;
    const std::size_t rows = most_blocks(window, unit, conversations, cells).unquantized * unit;
    const std::uint32_t of_sinks = scheme.retention.young > 0 ? row_block_tokens(scheme) : unit;
    const std::size_t sinks = whole_sinks(scheme.retention, of_sinks).sinks;
    return std::min(rows + conversations * sinks, (cells + unit - 1) / unit * unit);
}

// Tokens that are taken back, or that conversations share, leave units that are not full: one more
// is counted for each unquantized block.
std::size_t packed_bytes(const Scheme& scheme, std::uint32_t layer, Part part,
                         std::uint32_t channels, std::size_t cells, std::size_t conversations,
                         std::size_t open) {
    const LayerScheme& codecs = scheme.layer(layer);
    const BlockSizes sizes = block_sizes(codecs, channels);
    const std::size_t packed = part == Part::keys ? sizes.keys : sizes.values;
    if (packed == 0) return 0;
    const std::uint32_t unit = unit_tokens(scheme);
    const MostBlocks most = most_blocks(scheme.retention, unit, conversations, cells);
    const std::size_t rows = unquantized_rows(scheme, cells, conversations) + open * unit;
    return unit / block_tokens(codecs) * (most.unquantized + most.packed) * packed +
           rows * sizes.exact / block_tokens(codecs);
}

std::size_t packed_bytes(const ggml_tensor& tensor, const Setting& setting) {
    const std::size_t nominal = ggml_nbytes(&tensor);
    const auto name = parse_cache_name(tensor.name);
    if (!name || tensor.type != GGML_TYPE_F16 || tensor.view_src != nullptr || host_asserts())
        return nominal;
    const auto layer = static_cast<std::uint32_t>(name->layer);
    if (setting.scheme.layer(layer).exact()) return nominal;
    // A conversation each, where there are several streams.
    const std::size_t conversations = tensor.ne[2] > 1 ? 1 : setting.conversations;
    const std::size_t open = setting.budget > 0 ? 0 : std::min(conversations, most_open_units);
    const std::size_t per_stream =
        packed_bytes(setting.scheme, layer, name->part, static_cast<std::uint32_t>(tensor.ne[0]),
                     static_cast<std::size_t>(tensor.ne[1]), conversations, open);
    if (per_stream == 0) return nominal;
    return std::min(nominal, per_stream * static_cast<std::size_t>(tensor.ne[2]));
}

std::size_t SizeAnswers::first_answer(const ggml_tensor& tensor, const Setting& setting) {
    const std::size_t nominal = ggml_nbytes(&tensor);
    const std::size_t packed = packed_bytes(tensor, setting);
    const auto name = parse_cache_name(tensor.name);

    const std::size_t missing = last_.missing;
    if (name->part == Part::values) {
        const bool apart =
            name->tag == last_.tag && name->layer == last_.layer && tensor.ne[0] != last_.channels;
        last_ = {};
        return apart ? nominal + missing : packed;
    }
    // Keys after the keys of a lower layer: that one has no values, so this one has none either,
    // and neither is packed unless they are latent rows.
    const LayerScheme& codecs = setting.scheme.layer(static_cast<std::uint32_t>(name->layer));
    const bool alone = name->tag == last_.tag && last_.layer >= 0 && name->layer > last_.layer &&
                       !block_sizes(codecs, static_cast<std::uint32_t>(tensor.ne[0])).latent;
    last_ = {.tag = name->tag,
             .layer = name->layer,
             .channels = tensor.ne[0],
             .missing = alone ? 0 : nominal - packed};
    return alone ? nominal + missing : packed;
}

std::size_t SizeAnswers::bytes(const ggml_tensor& tensor, const Setting& setting) {
    if (tensor.view_src != nullptr || !parse_cache_name(tensor.name))
        return packed_bytes(tensor, setting);
    const Question question{&tensor,      tensor.name,  tensor.type, tensor.ne[0],
                            tensor.ne[1], tensor.ne[2], setting.text};
    if (const auto known = given_.find(question); known != given_.end()) return known->second;
    const auto known = older_.find(question);
    const std::size_t answer =
        known != older_.end() ? known->second : first_answer(tensor, setting);
    if (given_.size() >= most_answers) older_ = std::exchange(given_, {});
    given_.emplace(question, answer);
    return answer;
}

void SizeAnswers::forget(const ggml_tensor& tensor) noexcept {
    const auto of_tensor = [&](const auto& entry) { return std::get<0>(entry.first) == &tensor; };
    std::erase_if(given_, of_tensor);
    std::erase_if(older_, of_tensor);
}

SizeAnswers& size_answers() {
    static thread_local SizeAnswers answers;
    return answers;
}

}  // namespace lowkv::ggml
