#include "common/model.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#include "common/terminal.h"
#include "lowkv/calibration_file.h"
#include "lowkv/error.h"
#include "lowkv/implementation.h"
#include "lowkv_ggml.h"
#include "platform/system.h"
#include "settings.h"

namespace lowkv::cli {

namespace {

struct Log {
    bool verbose = false;
    ggml_log_level level = GGML_LOG_LEVEL_NONE;  // of the line that continues
    std::string line;                            // of that level, so far
    std::string cache_buffers;                   // names of the buffers that hold caches
    std::string denial;                          // the last "lowkv: NOT active" line
};

Log& log_state() {
    static Log log;
    return log;
}

// Warnings that only state what the user asked for, and denials: a stock context's is on purpose,
// ours fails with it.
bool expected(std::string_view line) {
    return line.find(denial_mark) != std::string_view::npos ||
           line.find("the full capacity of the model will not be utilized") !=
               std::string_view::npos;
}

void end_line(Log& log) {
    // "llama_kv_cache:        CPU KV buffer size =   180.00 MiB"
    if (const std::size_t at = log.line.find(" KV buffer size"); at != std::string::npos) {
        const std::size_t start = log.line.rfind(' ', at - 1);
        log.cache_buffers += log.line.substr(start + 1, at - start - 1) + " ";
    }
    if (const std::size_t at = log.line.find(denial_mark); at != std::string::npos)
        log.denial = log.line.substr(at, log.line.find_last_not_of('\n') + 1 - at);
    const bool shown = log.level == GGML_LOG_LEVEL_ERROR ||
                       (log.level == GGML_LOG_LEVEL_WARN && !expected(log.line)) || log.verbose;
    if (shown) std::fputs(log.line.c_str(), stderr);
    log.line.clear();
}

void receive_log(ggml_log_level level, const char* text, void* /*user*/) {
    Log& log = log_state();
    if (level != GGML_LOG_LEVEL_CONT) log.level = level;
    log.line += text;
    if (!log.line.empty() && log.line.back() == '\n') end_line(log);
}

std::string metadata(const llama_model* model, const std::string& key) {
    std::array<char, 256> buffer{};
    const int n = llama_model_meta_val_str(model, key.c_str(), buffer.data(), buffer.size());
    return n < 0 ? "" : buffer.data();
}

}  // namespace

void route_logs(bool verbose) {
    log_state().verbose = verbose;
    llama_log_set(receive_log, nullptr);
}

ggml_type cache_type(const std::string& option, const std::string& name) {
    std::vector<std::string> names;
    for (const ggml_type type :
         {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
          GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL}) {
        if (name == ggml_type_name(type)) return type;
        names.emplace_back(ggml_type_name(type));
    }
    throw UsageError(option + " " + name + " is no cache type of llama.cpp: " + joined(names));
}

Model::Model(const std::string& path, Weights weights) {
    if (!std::filesystem::is_regular_file(platform::path_of(path)))
        throw Failure("there is no model file " + path);
    active_implementation();  // throws when LOWKV_IMPLEMENTATION names none: nothing would be
                              // packed
    static const bool registered = [] {
        llama_backend_init();
        ggml_backend_register(ggml::backend_reg());
        return true;
    }();
    static_cast<void>(registered);
    std::array<ggml_backend_dev_t, 2> devices = {ggml::device(), nullptr};
    llama_model_params params = llama_model_default_params();
    params.devices = devices.data();
    params.n_gpu_layers = -1;
    if (weights == Weights::left_out) {
        params.no_alloc = true;
        params.load_mode = LLAMA_LOAD_MODE_NONE;
    }
    model_.reset(llama_model_load_from_file(path.c_str(), params));
    if (!model_) {
        throw Failure("llama.cpp can't load " + path +
                      " (the lines above say why; --verbose says more)");
    }
    if (llama_model_has_encoder(get()) || !llama_model_has_decoder(get()))
        throw Failure(path + " is not a decoder-only language model: lowkv serves those");
}

std::optional<Model> model_without_weights(const std::string& path) {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    try {
        return std::optional<Model>(std::in_place, path, Weights::left_out);
    } catch (const Failure&) {
        return std::nullopt;
    }
}

void Model::use_calibrations(const std::vector<std::string>& paths, bool needed) const {
    const auto use = [&](const std::string& path) {
        Calibration made = calibration::load_calibration(path).calibration;
        calibration::require_model(made, fingerprint(), path);
        ggml::add_calibration(std::move(made));
    };
    if (needed) {
        try {
            for (const std::string& path : ggml::calibration_paths()) use(path);
        } catch (const Error& error) {
            throw Failure(concat("LOWKV_CALIBRATION: ", error.what()));
        }
    }
    for (const std::string& path : paths) use(path);
}

std::string Model::description() const {
    std::array<char, 256> buffer{};
    llama_model_desc(get(), buffer.data(), buffer.size());
    const std::string name = metadata(get(), "general.name");
    return name.empty() ? buffer.data() : name + " (" + buffer.data() + ")";
}

std::uint32_t Model::train_context() const {
    return static_cast<std::uint32_t>(llama_model_n_ctx_train(get()));
}

std::uint32_t Model::vocabulary() const {
    return static_cast<std::uint32_t>(llama_vocab_n_tokens(vocab()));
}

std::uint32_t Model::layers() const {
    return static_cast<std::uint32_t>(llama_model_n_layer(get()));
}

std::uint32_t Model::layers_with_cache() const {
    const std::string architecture = metadata(get(), "general.architecture");
    if (architecture == "gemma3n") return std::min(layers(), 20U);  // llama.cpp's own number
    const std::string shared = metadata(get(), architecture + ".attention.shared_kv_layers");
    const auto count = static_cast<std::uint32_t>(std::strtoul(shared.c_str(), nullptr, 10));
    return layers() - std::min(layers(), count);
}

std::string Model::fingerprint() const {
    const std::string architecture = metadata(get(), "general.architecture");
    const std::string base = metadata(get(), architecture + ".rope.freq_base");
    const std::int32_t heads = llama_model_n_head(get());
    std::string head_dim = metadata(get(), architecture + ".attention.key_length");
    if (head_dim.empty()) head_dim = std::to_string(llama_model_n_embd(get()) / std::max(heads, 1));
    return concat("architecture=", architecture, " layers=", layers(), " heads=", heads,
                  " kv_heads=", llama_model_n_head_kv(get()), " head_dim=", head_dim,
                  " vocabulary=", vocabulary(), " rope_base=", base.empty() ? "none" : base,
                  " name=", metadata(get(), "general.name"));
}

std::vector<llama_token> Model::tokenize(const std::string& text, bool add_special) const {
    const auto length = static_cast<std::int32_t>(text.size());
    std::vector<llama_token> tokens(text.size() + 8);
    const std::int32_t n =
        llama_tokenize(vocab(), text.c_str(), length, tokens.data(),
                       static_cast<std::int32_t>(tokens.size()), add_special, true);
    if (n < 0) throw Failure("the text has too many tokens");
    tokens.resize(static_cast<std::size_t>(n));
    return tokens;
}

std::vector<std::vector<llama_token>> Model::windows(std::span<const llama_token> text,
                                                     std::size_t length, std::size_t most) const {
    const std::size_t take = length - (wants_first_token() ? 1 : 0);
    std::vector<std::vector<llama_token>> out;
    for (; out.size() < most && text.size() >= take; text = text.subspan(take)) {
        std::vector<llama_token>& window = out.emplace_back();
        if (wants_first_token()) window.push_back(llama_vocab_bos(vocab()));
        window.insert(window.end(), text.begin(), text.begin() + static_cast<std::ptrdiff_t>(take));
    }
    return out;
}

std::string Model::piece(llama_token token) const {
    const std::int32_t length = -llama_token_to_piece(vocab(), token, nullptr, 0, 0, false);
    std::string text(static_cast<std::size_t>(length), '\0');
    llama_token_to_piece(vocab(), token, text.data(), length, 0, false);
    return text;
}

std::optional<std::string> Model::chat(const std::string& system, const std::string& user) const {
    const char* form = llama_model_chat_template(get(), nullptr);
    if (form == nullptr) return std::nullopt;
    std::vector<llama_chat_message> messages;
    if (!system.empty()) messages.push_back({"system", system.c_str()});
    messages.push_back({"user", user.c_str()});
    const auto apply = [&](char* into, std::int32_t size) {
        return llama_chat_apply_template(form, messages.data(), messages.size(), true, into, size);
    };
    const std::int32_t length = apply(nullptr, 0);
    if (length < 0) return std::nullopt;
    std::string text(static_cast<std::size_t>(length), '\0');
    apply(text.data(), length);
    return text;
}

double f16_bytes(std::span<const ggml::LayerReport> layers, std::size_t tokens) {
    double sum = 0;
    for (const ggml::LayerReport& layer : layers)
        sum += static_cast<double>(layer.f16_bytes_per_token *
                                   std::min<std::size_t>(tokens, layer.cells));
    return sum;
}

Context::Context(const Model& model, const ContextOptions& options) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = options.cells;
    params.n_batch = params.n_ubatch = options.chunk;
    params.n_outputs_max = options.all_logits ? 0 : 1;
    params.n_threads = params.n_threads_batch = static_cast<std::int32_t>(options.threads);
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.op_offload = false;
    // Stock tools turn this default of the library off too.
    params.swa_full = options.whole_windows;
    params.no_perf = true;
    params.cb_eval = options.observe;
    params.cb_eval_user_data = options.observer;
    const ggml::CacheStats before = ggml::stats();
    if (options.scheme) {
        require_layers(parse_scheme(*options.scheme), model.layers());
        ggml::set_scheme(*options.scheme);
        params.offload_kqv = true;
    } else {
        params.offload_kqv = false;  // the cache and its attention stay on the CPU backend
        params.type_k = params.type_v = options.stock;
    }
    log_state().cache_buffers.clear();
    log_state().denial.clear();
    context_.reset(llama_init_from_model(model.get(), params));
    const std::string what = options.scheme
                                 ? "the cache under scheme " + *options.scheme
                                 : concat("llama.cpp's ", ggml_type_name(options.stock), " cache");
    if (!context_)
        throw Failure("llama.cpp can't make a context with " + what + " (--verbose says why)");
    const std::size_t ours = ggml::stats().buffers - before.buffers;
    if (ours == 0 && log_state().cache_buffers.empty()) {
        throw Failure(
            "this model keeps no keys and values (an encoder, or one that is recurrent "
            "throughout): there is no cache to pack");
    }
    if ((ours > 0) != options.scheme.has_value()) {
        throw Failure(what + " landed in the wrong place (buffers: " + log_state().cache_buffers +
                      "): the figures would be another cache's. Please report this model");
    }
    if (options.scheme) {
        served_ = ggml::stats().layers - before.layers;
        if (!options.partial) unproven_ = what;
        if (!unproven_.empty() && !log_state().denial.empty())
            throw Failure(what + ": " + log_state().denial);
    }
}

void Context::decode(Tokens tokens, bool all_logits) {
    std::vector<llama_token> copy(tokens.begin(), tokens.end());
    std::vector<std::int8_t> wanted(copy.size(), all_logits ? 1 : 0);
    wanted.back() = 1;
    llama_batch batch = llama_batch_get_one(copy.data(), static_cast<std::int32_t>(copy.size()));
    batch.logits = wanted.data();
    const std::size_t layers = ggml::stats().layers;
    if (!unproven_.empty()) log_state().denial.clear();
    const int result = llama_decode(get(), batch);
    if (result == 1)
        throw Failure(concat("the context of ", cells(), " tokens is full: use a larger -c"));
    if (result != 0)
        throw Failure(concat("llama.cpp failed at token ", size_, " (llama_decode: ", result, ")"));
    size_ += static_cast<std::uint32_t>(tokens.size());
    if (unproven_.empty()) return;
    // The plug-in decides at the latest in the first graph which layers it packs.
    if (!log_state().denial.empty()) throw Failure(unproven_ + ": " + log_state().denial);
    if (served_ + ggml::stats().layers == layers)
        throw Failure(unproven_ + " serves no layer: the cache would be plain f16");
    unproven_.clear();
}

std::vector<const float*> Context::logits(std::size_t first, std::size_t last) const {
    std::vector<const float*> rows;
    for (std::size_t i = first; i < last; ++i)
        rows.push_back(llama_get_logits_ith(get(), static_cast<std::int32_t>(i)));
    return rows;
}

void Context::clear() {
    llama_memory_clear(llama_get_memory(get()), true);
    size_ = 0;
}

}  // namespace lowkv::cli
