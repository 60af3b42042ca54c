#include "doctor/checks.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "cache_size.h"
#include "common/machine.h"
#include "common/metrics.h"
#include "common/model.h"
#include "common/model_shape.h"
#include "common/options.h"
#include "common/terminal.h"
#include "lowkv/codec.h"
#include "lowkv/executor_openmp.h"
#include "lowkv/scheme.h"
#include "lowkv_ggml.h"
#include "plan/model_cache.h"
#include "platform/system.h"

namespace lowkv::cli {

namespace {

using Layers = std::vector<ggml::LayerReport>;

// The model reads this text over and over: a wrong cache garbles repetitions first.
constexpr const char* text =
    "The harbour master kept a ledger of every boat that came in: its name, the hour, how deep it "
    "lay in the water, and what the crew said about the weather. On the ninth of March the "
    "Elisabeth brought forty barrels of herring and a cracked mast. The Two Brothers came an hour "
    "later with salt, rope and a passenger, who asked for the road to the mill. He paid in old "
    "coins, three of silver and one of copper, and left a letter to be called for. Nobody came. ";

// Tokens of a chunk: those of the last one are compared.
constexpr std::size_t chunk = 32;
// Above, a cache is broken rather than coarse: the poorest measured, turboquant2 with Gemma 3 270M,
// has .57; that of lowkv2.8 is .0003.
constexpr double most_divergence = 2;

// Enough for every layer to pack a few blocks and to read them afterwards, in whole chunks; 0 where
// the context ends before.
std::size_t tokens_to_prove(const Scheme& scheme, std::size_t context) {
    const std::uint32_t block = ggml::unit_tokens(scheme);
    const std::size_t least = first_packed_length(scheme.retention, block) + chunk;
    const std::size_t tokens = std::min(least + std::size_t{2} * block + chunk, context);
    return tokens < least ? 0 : tokens / chunk * chunk;
}

std::vector<llama_token> tokens_of(const Model& model, std::size_t length) {
    std::vector<llama_token> tokens = model.tokenize("", true);
    const std::vector<llama_token> again = model.tokenize(text, false);
    while (tokens.size() < length) tokens.insert(tokens.end(), again.begin(), again.end());
    tokens.resize(length);
    return tokens;
}

struct Proof {
    std::vector<float> logits;  // of the last chunk's tokens
    Layers layers;
};

template <class Tick>
Proof run_through(const Model& model, const ContextOptions& options, Tokens tokens, Tick&& tick) {
    Context context(model, options);
    Proof proof;
    each_chunk(tokens, chunk, [&](std::size_t at, Tokens part) {
        context.decode(part, at + chunk == tokens.size());
        tick();
    });
    for (const float* row : context.logits(0, chunk))
        proof.logits.insert(proof.logits.end(), row, row + model.vocabulary());
    proof.layers = ggml::layer_reports();
    return proof;
}

// Returns the fault of how the layers came out, or an empty text.
std::string wrong_with(const Layers& layers) {
    std::size_t plain = 0;
    std::string why;
    for (const ggml::LayerReport& layer : layers) {
        if (layer.packed) continue;
        ++plain;
        if (why.find(layer.why) == std::string::npos) why += (why.empty() ? "" : "; ") + layer.why;
    }
    return plain == 0 ? "" : count(plain) + " stay f16: " + why;
}

void report(Findings& findings, const std::string& scheme, const Proof& proof, double divergence) {
    const Layers& layers = proof.layers;
    Layers packed;
    std::ranges::copy_if(layers, std::back_inserter(packed), &ggml::LayerReport::packed);
    const bool exact = !ggml::packs(parse_scheme(scheme));
    std::string said = "scheme " + scheme + ": " + count(packed.size()) + " of " +
                       count(layers.size()) + (exact ? " layers held exactly" : " layers packed");
    if (packed.empty()) {
        findings.bad("cache", said, wrong_with(layers));
        return;
    }
    const auto cells = [](const ggml::LayerReport& layer) {
        return layer.cells_packed + layer.cells_exact;
    };
    const auto [fewest, most] = std::ranges::minmax(packed, {}, cells);
    const std::string held = span(cells(fewest), cells(most));
    said += exact ? ", " + held + " cells, none packed: it is to compare with"
                  : ", " + span_of(packed, &ggml::LayerReport::cells_packed) + " of " + held +
                        " cells packed, mean KLD to exact " + fixed(divergence, 4);
    if (packed.size() < layers.size()) {
        findings.bad("cache", said,
                     wrong_with(layers) + "; lowkv run takes such a model with --partial only");
    } else if (!exact && span_of(packed, &ggml::LayerReport::cells_packed) == "0") {
        findings.bad("cache", said, "nothing was packed after all those tokens: please report it");
    } else if (!(divergence <= most_divergence)) {
        findings.bad("cache", said, "this model's answers would be wrong: please report it");
    } else {
        findings.good("cache", said);
    }
}

void prove(Findings& findings, const Model& model, const DoctorOptions& asked) {
    constexpr std::uint32_t room = 32768;  // in which a layer that slides shows
    const Scheme scheme = parse_scheme(asked.scheme);
    const std::size_t wanted = tokens_to_prove(scheme, model.train_context());
    if (wanted == 0) {
        findings.bad("cache",
                     "the scheme packs nothing within the model's context of " +
                         count(model.train_context()) + " tokens",
                     "give it a smaller window=");
        return;
    }
    const std::vector<llama_token> tokens = tokens_of(model, wanted);
    ContextOptions options;
    options.cells =
        std::max(static_cast<std::uint32_t>(wanted), std::min(room, model.train_context()));
    options.chunk = chunk;
    options.threads = asked.threads;
    options.all_logits = true;
    options.partial = true;
    constexpr double patience = 2;  // seconds without a word
    const Stopwatch watch;
    Progress progress("running " + count(wanted) + " tokens, twice:");
    std::size_t done = 0;
    const auto tick = [&] {
        done += chunk;
        if (watch.seconds() > patience) progress.show(done, 2 * wanted);
    };
    options.scheme = "exact";
    const Proof exact = run_through(model, options, tokens, tick);
    options.scheme = asked.scheme;
    const Proof proof = run_through(model, options, tokens, tick);
    progress.finish();
    const auto rows = [&](const Proof& of) {
        return rows_of(of.logits, 0, chunk, model.vocabulary());
    };
    OpenMPExecutor executor(asked.threads);
    Distance distance;
    distance.add(rows(exact), rows(proof), Tokens(tokens).last(chunk), model.vocabulary(),
                 executor);
    report(findings, asked.scheme, proof, distance.kld().mean);
    findings.note("sizes", "of each scheme: lowkv plan -m " + asked.model);
}

// What LOWKV_BUDGET does with the model.
void look_at_budget(Findings& findings, const DoctorOptions& asked) {
    const std::string budget = platform::environment("LOWKV_BUDGET");
    if (budget.empty()) return;
    // Below it is the scheme itself that is proved: within a budget nothing may become packed.
    platform::set_environment("LOWKV_BUDGET", "");
    try {
        findings.note("budget",
                      text_of(budget_of(gguf_shape(asked.model), budget, asked.scheme, {})));
    } catch (const Failure& error) {
        findings.note("budget", error.what());
    } catch (const std::exception& error) {
        findings.bad("budget", budget + " with " + asked.scheme, error.what());
    }
}

}  // namespace

void look_at_model(Findings& findings, const DoctorOptions& asked) {
    std::optional<Model> model;
    try {
        model.emplace(asked.model);
    } catch (const std::exception& error) {
        findings.bad("model", asked.model, error.what());
        return;
    }
    findings.good("model", model->description() + ", " + count(model->layers()) +
                               " layers, context " + count(model->train_context()));
    look_at_budget(findings, asked);
    try {
        const Scheme scheme = parse_scheme(asked.scheme);
        require_layers(scheme, model->layers());
        model->use_calibrations(asked.calibrations, scheme.needs_calibration());
        prove(findings, *model, asked);
    } catch (const std::exception& error) {
        findings.bad("cache", "scheme " + asked.scheme + " can't be used with this model",
                     error.what());
    }
}

}  // namespace lowkv::cli
