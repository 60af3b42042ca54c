#include "budget/measure.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "budget/choice.h"
#include "common/terminal.h"
#include "lowkv_ggml.h"

namespace lowkv::cli {

namespace {

// What `better` saves against `other`, position by position.
Estimate saved(const Distance& other, const Distance& better) {
    std::vector<double> differences = other.divergences();
    for (std::size_t i = 0; i < differences.size(); ++i) differences[i] -= better.divergences()[i];
    return estimate(differences);
}

// The layout of the lowest rung in 8 bits: next to nothing is lost, but every number changes a
// little, and the engine's own rounding (8-bit activations of quantized models) makes that a
// divergence. It is the floor that a loss stands on.
LayerScheme whisper(const LayerScheme& rung) {
    LayerScheme out = rung;
    for (Codec* codec : {&out.key, &out.value}) {
        if (codec->exact()) continue;
        if (codec->axis == Axis::sorted) {  // at most 4 bits: keys of as long blocks
            *codec = {.axis = Axis::token,
                      .group = Group::head,
                      .rotation = Rotate::hadamard,
                      .centred = true};
        }
        codec->width = Width::eight;
        codec->levels = Levels::uniform;
        codec->fit = Fit::norm;
        if (codec->metadata == Metadata::fp8_e5m3) codec->metadata = Metadata::fp16;
    }
    return out;
}

// The floor of each layer alone, from a few of them: it falls towards the last layers, which fewer
// follow.
std::vector<double> layer_floors(const Budget& budget, Probe& probe, const LayerScheme& quiet,
                                 const Retention& retention, const Ticker& ticker) {
    std::vector<std::uint32_t> keeping;
    for (std::uint32_t i = 0; i < budget.problem.layers.size(); ++i)
        if (budget.problem.layers[i].elements > 0) keeping.push_back(i);
    std::vector<double> floors(budget.problem.layers.size(), 0);
    std::uint32_t before = keeping.front();
    const std::size_t probes = std::min(floor_probes, keeping.size());
    for (std::size_t p = 0; p < probes; ++p) {
        const std::size_t at = probes > 1 ? p * (keeping.size() - 1) / (probes - 1) : 0;
        const std::uint32_t layer = keeping[at];
        Scheme alone = uniform(LayerScheme{}, retention);
        alone.overrides.push_back({.first = layer, .last = layer, .scheme = quiet});
        floors[layer] = probe.measure(alone, ticker("floor")).distance.kld().mean;
        for (std::uint32_t i = before + 1; i < layer; ++i) {
            const double share = static_cast<double>(i - before) / (layer - before);
            floors[i] = floors[before] + share * (floors[layer] - floors[before]);
        }
        before = layer;
    }
    return floors;
}

}  // namespace

Scheme uniform(const LayerScheme& rung, const Retention& retention) {
    return {.base = rung, .retention = retention, .overrides = {}};
}

void measure(Budget& budget, Probe& probe, const std::vector<LayerScheme>& ladder,
             const Retention& retention, const Ticker& ticker) {
    const LayerScheme quiet = whisper(ladder.front());
    budget.floor = probe.measure(uniform(quiet, retention), ticker("floor")).distance.kld().mean;
    std::vector<double> losses;
    for (std::size_t r = 0; r < ladder.size(); ++r) {
        const Probed all =
            probe.measure(uniform(ladder[r], retention), ticker("all layers, " + budget.ladder[r]));
        if (!all.packed && !ladder[r].exact()) {
            throw Failure("nothing was packed under " + budget.ladder[r] +
                          ": this model's caches are too short for a block to leave the window; "
                          "try a smaller --window");
        }
        budget.ladder_kld.push_back(all.distance.kld());
        losses.push_back(std::max(all.distance.kld().mean - budget.floor, 0.0));
    }
    budget.problem.ratio = steady_ratio(losses);
    budget.floors = layer_floors(budget, probe, quiet, retention, ticker);
    std::vector<double> above, errors;
    for (std::uint32_t i = 0; i < budget.problem.layers.size(); ++i) {
        budget.sensitivity_error.push_back(0);
        budget.measured.push_back(0);
        budget.packed.push_back(false);
        if (budget.problem.layers[i].elements <= 0) continue;
        Scheme alone = uniform(LayerScheme{}, retention);
        alone.overrides.push_back({.first = i, .last = i, .scheme = ladder.front()});
        const Probed found = probe.measure(alone, ticker("layer " + std::to_string(i)));
        budget.measured.back() = found.distance.kld().mean;
        budget.sensitivity_error.back() = found.distance.kld().error;
        budget.packed.back() = found.packed;
        above.push_back(budget.measured.back() - budget.floors[i]);
        errors.push_back(budget.sensitivity_error.back());
    }
    const std::vector<double> sensitivity = shrunk(above, errors);
    for (std::size_t i = 0, next = 0; i < budget.problem.layers.size(); ++i)
        if (budget.problem.layers[i].elements > 0)
            budget.problem.layers[i].sensitivity = sensitivity[next++];
}

void verify(Budget& budget, Probe& probe, const std::vector<LayerScheme>& ladder,
            const Scheme& chosen, const Ticker& ticker) {
    Verification& found = budget.verification;
    std::vector<Distance> distances;
    const auto add = [&](const Scheme& scheme, double bits, bool is_chosen) {
        distances.push_back(probe.measure(scheme, ticker("verifying")).distance);
        const double perplexity = distances.back().perplexity();
        found.rows.push_back({.scheme = to_string(scheme),
                              .bits = bits,
                              .kld = distances.back().kld(),
                              .perplexity = perplexity,
                              .change_percent = 100 * (perplexity / probe.exact_perplexity() - 1),
                              .chosen = is_chosen});
    };
    std::size_t below = 0;
    while (below + 1 < ladder.size() && budget.ladder_bits[below + 1] <= budget.target + 1e-9)
        ++below;
    const Retention& retention = chosen.retention;
    const double bits = mean_bits(budget.problem, budget.rungs);
    const bool mixed = !(chosen == uniform(ladder[below], retention));
    if (mixed) add(uniform(ladder[below], retention), budget.ladder_bits[below], false);
    add(chosen, bits, true);
    if (mixed) found.saved = saved(distances[0], distances[1]);
    if (below + 1 < ladder.size()) {
        add(uniform(ladder[below + 1], retention), budget.ladder_bits[below + 1], false);
        found.above_saves = saved(distances[distances.size() - 2], distances.back());
    }
    if (found.rows.size() == 3 && bits > budget.ladder_bits[below]) {
        const VerifiedRow &low = found.rows.front(), &high = found.rows.back();
        const double share = (bits - low.bits) / (high.bits - low.bits);
        found.blind_kld = low.kld.mean + share * (high.kld.mean - low.kld.mean);
    }
    budget.recommended =
        mixed && !better_than_uniform(found) ? found.rows.front().scheme : budget.chosen;
}

Probe::Probe(const Model& model, std::vector<llama_token> text, const ProbeSettings& settings,
             const Tick& tick)
    : model_(model), text_(std::move(text)), settings_(settings), executor_(settings.threads) {
    const Tokens all = text_;
    next_.assign(all.begin() + static_cast<std::ptrdiff_t>(settings.skip) + 1, all.end());
    exact_.reserve(next_.size() * model.vocabulary());
    Context context = make_context("exact");
    each_chunk(all.first(settings.shared), settings.chunk, [&](std::size_t, Tokens chunk) {
        context.decode(chunk);
        tick(chunk.size());
    });
    state_.resize(llama_state_seq_get_size(context.get(), 0));
    state_.resize(llama_state_seq_get_data(context.get(), state_.data(), state_.size(), 0));
    exact_perplexity_ = read_on(context, tick, true).distance.perplexity();
}

Probed Probe::measure(const Scheme& scheme, const Tick& tick) {
    Context context = make_context(to_string(scheme));
    context.decode({text_.data(), 1});  // throws when the cache isn't packed
    context.clear();
    if (settings_.shared > 0) context.restore(state_, settings_.shared);
    return read_on(context, tick, false);
}

Context Probe::make_context(const std::string& scheme) const {
    ContextOptions options;
    options.cells = static_cast<std::uint32_t>(text_.size());
    options.chunk = settings_.chunk;
    options.threads = settings_.threads;
    options.all_logits = true;
    options.scheme = scheme;
    return {model_, options};
}

Probed Probe::read_on(Context& context, const Tick& tick, bool exact) {
    Probed out;
    const std::uint32_t vocabulary = model_.vocabulary();
    each_chunk(Tokens(text_).subspan(settings_.shared), settings_.chunk,
               [&](std::size_t from, Tokens chunk) {
                   const std::size_t at = settings_.shared + from;
                   const std::size_t counted =
                       at < settings_.skip ? 0 : std::min(chunk.size(), text_.size() - 1 - at);
                   // The only cache there is: what it packed after earlier chunks, this one reads.
                   out.packed = out.packed || (counted > 0 && ggml::stats().packed_bytes > 0);
                   context.decode(chunk, counted > 0);
                   const Rows logits = context.logits(0, counted);
                   if (exact)
                       for (const float* row : logits)
                           exact_.insert(exact_.end(), row, row + vocabulary);
                   if (counted > 0) {
                       const std::size_t first = at - settings_.skip;
                       out.distance.add(rows_of(exact_, first, counted, vocabulary), logits,
                                        std::span(next_).subspan(first, counted), vocabulary,
                                        executor_);
                   }
                   tick(chunk.size());
               });
    return out;
}

}  // namespace lowkv::cli
