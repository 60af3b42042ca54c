#pragma once
// Models and contexts of llama.cpp, with the lowkv backend in this process: one loaded model serves
// contexts whose cache is ours and contexts whose cache is stock llama.cpp's.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llama-cpp.h"
#include "lowkv_ggml.h"

namespace lowkv::cli {

// llama.cpp's and ggml's messages: warnings and errors on stderr, with `verbose` all of them.
void route_logs(bool verbose);

// A type of stock caches by its name. Throws UsageError, which names the option and the types.
ggml_type cache_type(const std::string& option, const std::string& name);

enum class Weights { loaded, left_out };

class Model {
  public:
    // Registers the backend and loads the file with it as the cache's device. Without its weights a
    // model answers questions and makes no context. Throws Failure.
    explicit Model(const std::string& path, Weights weights = Weights::loaded);

    llama_model* get() const { return model_.get(); }
    const llama_vocab* vocab() const { return llama_model_get_vocab(get()); }
    std::string description() const;
    // Files of `lowkv calibrate`, for the schemes of contexts made from now on; if they are needed,
    // those that LOWKV_CALIBRATION names too. Throws Failure or lowkv::Error for one that can't be
    // read or that was made for another model.
    void use_calibrations(const std::vector<std::string>& paths, bool needed) const;
    std::uint32_t train_context() const;
    std::uint32_t vocabulary() const;
    std::uint32_t layers() const;
    // The first of them; those behind read the caches of others, as in Gemma 3n and 4.
    std::uint32_t layers_with_cache() const;
    // What a calibration is tied to (docs/calibration.md): not the weights' bytes, so that files of
    // one model in several precisions share it.
    std::string fingerprint() const;

    std::vector<llama_token> tokenize(const std::string& text, bool add_special) const;
    // At most so many windows of `length` tokens, one after the other, each with the model's first
    // token where it wants one; a rest of the text is left out.
    std::vector<std::vector<llama_token>> windows(std::span<const llama_token> text,
                                                  std::size_t length, std::size_t most) const;
    bool wants_first_token() const { return llama_vocab_get_add_bos(vocab()); }
    std::string piece(llama_token token) const;
    // The text with the model's chat template around it; nullopt when the model has none that
    // llama.cpp knows.
    std::optional<std::string> chat(const std::string& system, const std::string& user) const;

  private:
    llama_model_ptr model_;
};

// Without its weights and without a word; nullopt for what can't be read as a model, which is left
// to the program that is to load it.
std::optional<Model> model_without_weights(const std::string& path);

struct ContextOptions {
    std::uint32_t cells = 0;
    std::uint32_t chunk = 512;  // tokens that one graph works on
    unsigned threads = 1;
    bool all_logits = false;            // a chunk may ask for the logits of each of its tokens
    bool partial = false;               // layers may stay f16: the caller looks for them
    bool whole_windows = false;         // layers that slide keep every token all the same
    std::optional<std::string> scheme;  // a lowkv scheme, or
    ggml_type stock = GGML_TYPE_F16;    // a stock llama.cpp cache of this type, on the CPU backend
    // Called with every node of a graph, see llama_context_params::cb_eval.
    ggml_backend_sched_eval_callback observe = nullptr;
    void* observer = nullptr;
};

using Tokens = std::span<const llama_token>;

// Calls f(chunk's first token, chunk) over the text.
template <class F>
void each_chunk(Tokens text, std::size_t chunk, F&& f) {
    for (std::size_t at = 0; at < text.size(); at += chunk)
        f(at, text.subspan(at, std::min(chunk, text.size() - at)));
}

// The bytes that f16 caches of these layers would hold for so many tokens of one sequence: layers
// that slide hold at most as many as they have cells.
double f16_bytes(std::span<const ggml::LayerReport> layers, std::size_t tokens);

// One context with one sequence, written front to back.
class Context {
  public:
    // Throws lowkv::Error for a wrong scheme, Failure when the cache didn't land where it should.
    Context(const Model& model, const ContextOptions& options);

    llama_context* get() const { return context_.get(); }
    std::uint32_t cells() const { return llama_n_ctx(get()); }
    std::uint32_t size() const { return size_; }

    // Appends tokens at the end; logits of the last one, or of all. Throws Failure.
    void decode(Tokens tokens, bool all_logits = false);
    // The logits of the last chunk's tokens from `first` to `last`, which is left out.
    std::vector<const float*> logits(std::size_t first, std::size_t last) const;
    void clear();

  private:
    llama_context_ptr context_;
    std::uint32_t size_ = 0;
    std::size_t served_ = 0;  // layers packed once it was made
    std::string unproven_;    // the cache's name until a decode has shown that it is packed
};

}  // namespace lowkv::cli
