#include "budget_probe.h"

#include <algorithm>
#include <utility>

#include "app.h"
#include "lowkv_ggml.h"

namespace lowkv::cli {

namespace {

constexpr std::size_t ceil_to(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
}

ContextOptions context_options(const ProbeSettings& settings, std::size_t cells,
                               const std::string& scheme) {
    ContextOptions options;
    options.cells = static_cast<std::uint32_t>(cells);
    options.chunk = settings.chunk;
    options.threads = settings.threads;
    options.all_logits = true;
    options.scheme = scheme;
    return options;
}

// Context::decode, but at any position: the context may go on from another one's state.
class Batch {
  public:
    explicit Batch(std::uint32_t chunk)
        : batch_(llama_batch_init(static_cast<std::int32_t>(chunk), 0, 1)) {}
    ~Batch() { llama_batch_free(batch_); }
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

    // With the logits of all tokens or of the last.
    void decode(Context& context, std::size_t at, std::span<const llama_token> tokens, bool all) {
        batch_.n_tokens = static_cast<std::int32_t>(tokens.size());
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            batch_.token[i] = tokens[i];
            batch_.pos[i] = static_cast<llama_pos>(at + i);
            batch_.n_seq_id[i] = 1;
            batch_.seq_id[i][0] = 0;
            batch_.logits[i] = all || i + 1 == tokens.size() ? 1 : 0;
        }
        const int result = llama_decode(context.get(), batch_);
        if (result != 0) {
            throw Failure("llama.cpp failed at token " + std::to_string(at) +
                          " (llama_decode: " + std::to_string(result) + ")");
        }
    }

  private:
    llama_batch batch_;
};

}  // namespace

Probe::Probe(const Model& model, std::vector<llama_token> text, const ProbeSettings& settings,
             const Tick& tick)
    : model_(model), text_(std::move(text)), settings_(settings), executor_(settings.threads) {
    const std::span<const llama_token> all = text_;
    next_.assign(all.begin() + static_cast<std::ptrdiff_t>(settings.skip) + 1, all.end());
    exact_.reserve(next_.size() * model.vocabulary());
    Context context(model, context_options(settings, text_.size(), "exact"));
    for (std::size_t at = 0; at < settings.shared; at += settings.chunk) {
        context.decode(all.subspan(at, settings.chunk));
        tick(settings.chunk);
    }
    state_.resize(llama_state_seq_get_size(context.get(), 0));
    state_.resize(llama_state_seq_get_data(context.get(), state_.data(), state_.size(), 0));
    Reference reference(model.vocabulary());
    Distance distance;
    read_on(context, tick, [&](std::size_t first, const std::vector<const float*>& logits) {
        for (const float* row : logits) exact_.insert(exact_.end(), row, row + model.vocabulary());
        set_reference(reference, first, logits.size());
        distance.add(reference, logits, std::span(next_).subspan(first, logits.size()), executor_);
    });
    exact_perplexity_ = distance.perplexity();
}

Probed Probe::measure(const Scheme& scheme, const Tick& tick) {
    const std::string name = to_string(scheme);
    Context context(model_, context_options(settings_, text_.size(), name));
    context.decode({text_.data(), 1});  // throws when the cache isn't packed
    context.clear();
    if (settings_.shared > 0 &&
        llama_state_seq_set_data(context.get(), state_.data(), state_.size(), 0) == 0)
        throw Failure("llama.cpp can't carry the exact cache's state over to " + name);
    Reference reference(model_.vocabulary());
    Probed out;
    out.packed =
        read_on(context, tick, [&](std::size_t first, const std::vector<const float*>& logits) {
            set_reference(reference, first, logits.size());
            out.distance.add(reference, logits, std::span(next_).subspan(first, logits.size()),
                             executor_);
        });
    return out;
}

template <class F>
bool Probe::read_on(Context& context, const Tick& tick, F&& f) {
    Batch batch(settings_.chunk);
    bool packed = false;
    for (std::size_t at = settings_.shared; at < text_.size(); at += settings_.chunk) {
        const auto chunk = std::span<const llama_token>(text_).subspan(
            at, std::min<std::size_t>(settings_.chunk, text_.size() - at));
        const std::size_t counted =
            at < settings_.skip ? 0 : std::min(chunk.size(), text_.size() - 1 - at);
        // The only cache there is: what it packed after earlier chunks, this one reads.
        packed = packed || (counted > 0 && ggml::stats().packed_bytes > 0);
        batch.decode(context, at, chunk, counted > 0);
        std::vector<const float*> logits;
        for (std::size_t i = 0; i < counted; ++i)
            logits.push_back(context.logits(static_cast<std::int32_t>(i)));
        if (counted > 0) f(at - settings_.skip, logits);
        tick(chunk.size());
    }
    return packed;
}

void Probe::set_reference(Reference& reference, std::size_t first, std::size_t n) {
    std::vector<const float*> logits;
    for (std::size_t i = first; i < first + n; ++i)
        logits.push_back(exact_.data() + i * model_.vocabulary());
    reference.set(std::move(logits), executor_);
}

std::size_t first_packed(const Retention& retention, std::uint32_t block_tokens) {
    const std::size_t left = ceil_to(retention.sinks, block_tokens) + block_tokens;
    return retention.window + (retention.flush > 0 ? ceil_to(left, retention.flush) : left);
}

}  // namespace lowkv::cli
