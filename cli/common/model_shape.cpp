#include "common/model_shape.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#include "common/terminal.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "gguf.h"
#include "lowkv/error.h"
#include "platform/system.h"

namespace lowkv::cli {

namespace {

struct Known {
    std::string_view name;
    std::uint32_t layers, query_heads, kv_heads, head_dim;
    std::uint32_t context;
    double parameters;
};

// From the models' published config.json; the parameters follow from it.
constexpr std::array known_models{
    Known{"llama-7b", 32, 32, 32, 128, 2048, 6738415616},
    Known{"llama-13b", 40, 40, 40, 128, 2048, 13015864320},
    Known{"llama-30b", 60, 52, 52, 128, 2048, 32528943616},
    Known{"llama-65b", 80, 64, 64, 128, 2048, 65285660672},
    Known{"llama-2-7b", 32, 32, 32, 128, 4096, 6738415616},
    Known{"llama-2-13b", 40, 40, 40, 128, 4096, 13015864320},
    Known{"llama-2-70b", 80, 64, 8, 128, 4096, 68976648192},
    Known{"llama-3-8b", 32, 32, 8, 128, 8192, 8030261248},
    Known{"llama-3-70b", 80, 64, 8, 128, 8192, 70553706496},
    Known{"llama-3.1-8b", 32, 32, 8, 128, 131072, 8030261248},
    Known{"llama-3.1-70b", 80, 64, 8, 128, 131072, 70553706496},
    Known{"mistral-7b", 32, 32, 8, 128, 32768, 7241732096},
    Known{"qwen2.5-7b", 28, 28, 4, 128, 32768, 7615616512},
    Known{"qwen3-8b", 36, 32, 8, 128, 40960, 8190735360},
    Known{"smollm2-135m", 30, 9, 3, 64, 8192, 134515008},
};

constexpr const char* spell_out = "give --layers, --kv-heads, --head-dim and --weights instead";

template <class T>
std::uint64_t at(const void* data, std::size_t index) {
    T value;
    std::memcpy(&value, static_cast<const char*>(data) + index * sizeof(T), sizeof(T));
    return static_cast<std::uint64_t>(value);
}

std::optional<std::uint64_t> integer(gguf_type type, const void* data, std::size_t index) {
    switch (type) {
        case GGUF_TYPE_BOOL: return at<std::uint8_t>(data, index);
        case GGUF_TYPE_UINT16: return at<std::uint16_t>(data, index);
        case GGUF_TYPE_UINT32: return at<std::uint32_t>(data, index);
        case GGUF_TYPE_INT32: return at<std::int32_t>(data, index);
        case GGUF_TYPE_UINT64: return at<std::uint64_t>(data, index);
        case GGUF_TYPE_INT64: return at<std::int64_t>(data, index);
        default: return std::nullopt;
    }
}

class Header {
  public:
    explicit Header(const std::string& path) : path_(path) {
        if (!std::filesystem::is_regular_file(platform::path_of(path)))
            throw Failure("there is no file " + path);
        // gguf's own lines name functions of it, not what to do.
        ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
        gguf_.reset(gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = nullptr}));
        if (!gguf_) throw Failure(path + " is not a GGUF file, or is cut short");
        const std::int64_t key = gguf_find_key(get(), "general.architecture");
        if (key < 0 || gguf_get_kv_type(get(), key) != GGUF_TYPE_STRING)
            throw Failure(path + " has no general.architecture: " + spell_out);
        architecture_ = gguf_get_val_str(get(), key);
    }

    const std::string& architecture() const { return architecture_; }

    // A key of the architecture: "block_count". One number, or one per layer.
    std::optional<std::uint64_t> number(const std::string& key, std::size_t layer = 0) const {
        return value(architecture_ + "." + key, layer);
    }
    std::uint64_t required(const std::string& key, std::size_t layer = 0) const {
        const std::optional<std::uint64_t> found = number(key, layer);
        if (found) return *found;
        throw Failure(path_ + " has no number " + architecture_ + "." + key +
                      ", so it is no language model with a KV cache that can be planned for; if " +
                      "it is one, " + spell_out);
    }
    // Whether a key of the architecture has one value per layer.
    bool per_layer(const std::string& key) const {
        const std::int64_t id = gguf_find_key(get(), (architecture_ + "." + key).c_str());
        return id >= 0 && gguf_get_kv_type(get(), id) == GGUF_TYPE_ARRAY;
    }
    std::uint64_t files() const { return value("split.count", 0).value_or(1); }

    // Whether any key of the architecture starts with `start`.
    bool any(const std::string& start) const {
        const std::string prefix = architecture_ + "." + start;
        for (std::int64_t key = 0; key < gguf_get_n_kv(get()); ++key)
            if (std::string_view(gguf_get_key(get(), key)).starts_with(prefix)) return true;
        return false;
    }

    double weights() const {
        double sum = 0;
        for (std::int64_t tensor = 0; tensor < gguf_get_n_tensors(get()); ++tensor)
            sum += static_cast<double>(gguf_get_tensor_size(get(), tensor));
        return sum;
    }

  private:
    const gguf_context* get() const { return gguf_.get(); }

    std::optional<std::uint64_t> value(const std::string& name, std::size_t layer) const {
        const std::int64_t key = gguf_find_key(get(), name.c_str());
        if (key < 0) return std::nullopt;
        const gguf_type type = gguf_get_kv_type(get(), key);
        if (type == GGUF_TYPE_STRING) return std::nullopt;
        if (type != GGUF_TYPE_ARRAY) return integer(type, gguf_get_val_data(get(), key), 0);
        const gguf_type element = gguf_get_arr_type(get(), key);
        if (element == GGUF_TYPE_STRING || layer >= gguf_get_arr_n(get(), key)) return std::nullopt;
        return integer(element, gguf_get_arr_data(get(), key), layer);
    }

    std::string path_, architecture_;
    gguf_context_ptr gguf_;
};

void refuse_other_caches(const Header& header, const std::string& path) {
    const std::string what = path + " (" + header.architecture() + ")";
    if (header.any("attention.indexer."))
        throw Failure(what +
                      " has sparse attention, whose mask lowkv can't follow, so every layer stays "
                      "f16 and `lowkv run` stops; run it without lowkv");
    const bool known = header.per_layer("attention.head_count_kv") ||
                       header.any("attention.recurrent_layers") ||
                       header.any("full_attention_interval") ||
                       header.architecture() == "falcon-h1";  // all layers attend
    for (const char* start : {"ssm.", "wkv.", "shortconv.", "kda."}) {
        if (known || !header.any(start)) continue;
        throw Failure(what +
                      " has recurrent layers, which hold a state and not a KV cache, and does not "
                      "say which; for its attention layers alone, " +
                      spell_out);
    }
}

// Whether the file calls the layer recurrent. Layers without kv heads are found by those.
bool recurrent(const Header& header, std::size_t layer) {
    if (const auto listed = header.number("attention.recurrent_layers", layer)) return *listed != 0;
    const std::uint64_t interval = header.number("full_attention_interval").value_or(1);
    return interval > 0 && (layer + 1) % interval != 0;
}

// Which layers slide over the window: as the file says, by layer or by period, or by the period
// that llama.cpp takes for the architecture; the last layer of a period sees everything. Empty
// where that is not known here.
std::vector<bool> sliding_layers(const Header& header, std::size_t layers) {
    constexpr const char* pattern = "attention.sliding_window_pattern";
    constexpr std::array<std::pair<std::string_view, std::uint64_t>, 7> periods = {{{"afmoe", 4},
                                                                                    {"gemma2", 2},
                                                                                    {"gemma3", 6},
                                                                                    {"gemma3n", 5},
                                                                                    {"gpt-oss", 2},
                                                                                    {"cohere2", 4},
                                                                                    {"olmo2", 4}}};
    const auto* const known =
        std::ranges::find(periods, header.architecture(), [](const auto& of) { return of.first; });
    const bool listed = header.per_layer(pattern);
    const std::uint64_t period =
        known == periods.end() ? 0 : header.number(pattern).value_or(known->second);
    if (!listed && period == 0) return {};
    std::vector<bool> sliding;
    for (std::size_t layer = 0; layer < layers; ++layer) {
        sliding.push_back(listed ? header.number(pattern, layer).value_or(0) != 0
                                 : layer % period < period - 1);
    }
    return sliding;
}

Shape layer_shape(const Header& header, const std::string& path, std::size_t layer) {
    const std::uint64_t heads = header.required("attention.head_count", layer);
    const std::uint64_t kv_heads = header.number("attention.head_count_kv", layer).value_or(heads);
    if (heads == 0 || kv_heads == 0 || recurrent(header, layer)) return {};
    const auto dimension = [&](const char* key) {
        const std::optional<std::uint64_t> found = header.number(key, layer);
        return found ? *found : header.required("embedding_length") / heads;
    };
    const std::uint64_t keys = dimension("attention.key_length");
    const std::uint64_t values = dimension("attention.value_length");
    // Multi-head latent attention: llama.cpp stores keys alone, and values are the first of them.
    if (header.number("attention.key_length_mla", layer) && kv_heads == 1 && values < keys)
        return {1, static_cast<std::uint32_t>(keys), static_cast<std::uint32_t>(values)};
    if (keys != values) {
        throw Failure(concat(path, ": layer ", layer, " has keys of ", keys, " and values of ",
                             values,
                             " numbers; lowkv packs layers where both are equal, others stay f16"));
    }
    return {static_cast<std::uint32_t>(kv_heads), static_cast<std::uint32_t>(keys)};
}

}  // namespace

std::string shape_names() {
    std::vector<std::string> names;
    for (const Known& model : known_models) names.emplace_back(model.name);
    return joined(names);
}

std::uint64_t sliding_cells(std::uint64_t window) {
    constexpr std::uint64_t micro_batch = 512, padding = 256;
    return round_up(window + micro_batch, padding);
}

ModelShape named_shape(const std::string& name) {
    constexpr double f16_bytes = 2;
    for (const Known& model : known_models) {
        if (model.name != name) continue;
        return {.name = name,
                .layers = std::vector<Shape>(model.layers, {model.kv_heads, model.head_dim}),
                .sliding = {},
                .query_heads = std::uint64_t{model.layers} * model.query_heads,
                .weights = f16_bytes * model.parameters,
                .files = 1,
                .context = model.context,
                .notes = {}};
    }
    throw UsageError("--shape " + name + " is not known; known: " + shape_names() +
                     "; any other: -m model.gguf, or --layers, --kv-heads and --head-dim");
}

ModelShape gguf_shape(const std::string& path) {
    constexpr std::uint64_t max_layers = 4096;
    const Header header(path);
    refuse_other_caches(header, path);
    std::uint64_t layers = header.required("block_count");
    // llama.cpp keeps no cache for the layers that only draft (MTP), unless it drafts with them.
    const std::uint64_t drafts = header.number("nextn_predict_layers").value_or(0);
    if (drafts < layers) layers -= drafts;
    if (layers < 1 || layers > max_layers)
        throw Failure(concat(path, " says it has ", layers, " layers"));

    ModelShape out;
    out.name = platform::text_of(platform::path_of(path).filename());
    for (std::size_t layer = 0; layer < layers; ++layer) {
        const Shape shape = layer_shape(header, path, layer);
        out.layers.push_back(shape);
        if (shape.kv_heads == 0) continue;
        out.query_heads += header.required("attention.head_count", layer);
    }
    out.weights = header.weights();
    out.context = header.number("context_length").value_or(0);
    out.files = header.files();
    out.window = header.number("attention.sliding_window").value_or(0);
    if (out.window > 0) out.sliding = sliding_layers(header, layers);
    if ((out.window > 0 && out.sliding.empty()) ||
        header.number("attention.shared_kv_layers").value_or(0) > 0) {
        out.notes.emplace_back(
            "layers with a sliding window or a shared cache are counted in full: an upper bound");
    }
    if (const auto slide = std::count(out.sliding.begin(), out.sliding.end(), true); slide > 0) {
        out.notes.push_back(
            concat(slide, " layers slide over ", out.window, " tokens: they hold at most ",
                   sliding_cells(out.window),
                   " of a sequence, as stock llama.cpp's do with its usual -ub 512"));
    }
    if (const auto states = std::ranges::count(out.layers, 0U, &Shape::kv_heads); states > 0)
        out.notes.push_back(plural(static_cast<std::uint64_t>(states), "layer") +
                            " without keys and values: recurrent states are not counted");
    if (header.number("expert_count").value_or(0) > 1) {
        out.notes.emplace_back(
            "all experts' weights are counted as read: a small batch reads fewer");
    }
    return out;
}

}  // namespace lowkv::cli
