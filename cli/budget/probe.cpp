#include "budget/probe.h"

#include <algorithm>
#include <utility>

#include "common/errors.h"
#include "lowkv_ggml.h"

namespace lowkv::cli {

namespace {

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
    Context context(model_, context_options(settings_, text_.size(), to_string(scheme)));
    context.decode({text_.data(), 1});  // throws when the cache isn't packed
    context.clear();
    if (settings_.shared > 0) context.restore(state_, settings_.shared);
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
    bool packed = false;
    for (std::size_t at = settings_.shared; at < text_.size(); at += settings_.chunk) {
        const auto chunk = std::span<const llama_token>(text_).subspan(
            at, std::min<std::size_t>(settings_.chunk, text_.size() - at));
        const std::size_t counted =
            at < settings_.skip ? 0 : std::min(chunk.size(), text_.size() - 1 - at);
        // The only cache there is: what it packed after earlier chunks, this one reads.
        packed = packed || (counted > 0 && ggml::stats().packed_bytes > 0);
        context.decode(chunk, counted > 0);
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

}  // namespace lowkv::cli
