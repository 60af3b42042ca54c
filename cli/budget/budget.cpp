// lowkv budget: a scheme for each layer, so that the whole cache costs at most a number of bits.
//
// Each layer alone is packed with the lowest rung of a ladder, and all layers together with each
// rung; what that loses on a text decides which layers are raised. Then the choice is measured
// beside the uniform schemes next to it, on other text where there is enough.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "budget/choice.h"
#include "budget/measure.h"
#include "budget/report.h"
#include "common/app.h"
#include "common/model.h"
#include "common/model_shape.h"
#include "common/options.h"
#include "common/terminal.h"
#include "lowkv/calibration.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"

namespace lowkv::cli {

namespace {

constexpr const char* footer = R"(Examples:
  lowkv budget -m model.gguf -f book.txt --target-bits 2.5
      which layers get lowkv2, which ones more, so that the whole cache costs 2.5 bits an element
  LOWKV_SCHEME=$(lowkv budget -m model.gguf -f book.txt --target-bits 2.5 --quiet)
      the scheme alone, for `lowkv run` or llama.cpp with the plug-in
  lowkv budget -m model.gguf -f book.txt --target-bits 2 --ladder lowkv1.5,lowkv2,lowkv3
      other steps: schemes that lose less and less for more and more bits
  lowkv budget -m model.gguf -f book.txt --target-bits 3 --window 32 --sinks 5 --json budget.json
      for a shorter exact window; the figures also in a file

How it works: mean KLD against the exact cache on the text, with one layer packed at a time (lowest
rung), and with all layers at each rung, less what 8-bit codes show (the engine's own rounding). A layer's loss at a higher rung is taken to shrink as the
whole cache's does. Steps are taken by loss saved per bit, until the next doesn't fit. Then the
choice is measured beside the uniform schemes below and above it; where the uniform scheme below is
as good, that is what is recommended. The text is read (layers + rungs + about 5) times, but for its
beginning; a text of twice --tokens lets the choice be measured on other words than it was made on.

Bits count codes and all metadata of packed blocks, not the exact window. Schemes are separated by
commas, so within a spelled-out scheme write + for the comma.)";

constexpr std::size_t counted = 384;        // positions, unless --tokens says otherwise
constexpr std::size_t least_counted = 128;  // or a mean says nothing

struct Options {
    std::string model, file, json;
    double target = 0;
    std::vector<std::string> ladder = {"lowkv2", "lowkv2.8", "lowkv3", "lowkv4"};
    Retention retention;
    std::uint64_t tokens = 0;
    std::uint32_t chunk = 64;
    unsigned threads = 0;
    bool quiet = false, verbose = false;
};

// ---- what is asked for ----

std::vector<LayerScheme> read_ladder(std::vector<std::string>& names) {
    read_schemes(names);
    if (names.size() < 2) throw UsageError("--ladder needs two schemes or more to choose from");
    std::vector<LayerScheme> ladder;
    for (std::string& name : names) {
        const Scheme scheme = parse_scheme(name);
        if (!(scheme.retention == Retention{})) {
            throw UsageError("--ladder " + name +
                             ": a rung says how one layer is stored; what stays exact is one for "
                             "all layers: --window, --sinks, --flush");
        }
        if (!scheme.overrides.empty())
            throw UsageError("--ladder " + name + ": a rung can't treat layers differently");
        name = to_string(scheme);
        ladder.push_back(scheme.base);
    }
    if (ladder.front().exact())
        throw UsageError("--ladder: the lowest rung is exact, so nothing would be packed");
    return ladder;
}

std::vector<Shape> read_shapes(const std::string& model) {
    try {
        return gguf_shape(model).layers;
    } catch (const Failure& failure) {
        // What follows is `lowkv plan`'s advice.
        const std::string why = failure.what();
        throw Failure(why.substr(0, why.find("; for its attention layers alone")));
    }
}

BudgetProblem read_problem(const Options& options, const std::vector<LayerScheme>& ladder) {
    BudgetProblem problem;
    const std::vector<Shape> layers = read_shapes(options.model);
    for (std::uint32_t i = 0; i < layers.size(); ++i) {
        BudgetLayer& layer = problem.layers.emplace_back();
        if (layers[i].kv_heads == 0) continue;
        layer.elements = 2.0 * layers[i].channels();
        for (std::size_t r = 0; r < ladder.size(); ++r) {
            layer.bits.push_back(neutral_plan(ladder[r], layers[i]).bits_per_element());
            if (r == 0 || layer.bits[r] > layer.bits[r - 1]) continue;
            throw UsageError("--ladder must ascend in bits: in layer " + std::to_string(i) + ", " +
                             options.ladder[r - 1] + " has " + bits_text(layer.bits[r - 1], false) +
                             " and " + options.ladder[r] + " " + bits_text(layer.bits[r], false));
        }
    }
    const bool any = std::ranges::any_of(
        problem.layers, [](const BudgetLayer& layer) { return layer.elements > 0; });
    if (!any) throw Failure(options.model + ": no layer of it keeps keys and values");
    problem.ratio.assign(ladder.size(), 1);
    return problem;
}

void require_reachable(const Options& options, const std::vector<double>& bits) {
    if (options.target >= bits.front() - 1e-9 && options.target <= bits.back() + 1e-9) return;
    const bool low = options.target < bits.front();
    throw UsageError("--target-bits " + bits_text(options.target, !low) +
                     " is out of reach: this model takes from " + bits_text(bits.front(), true) +
                     " bits (" + options.ladder.front() + " for all layers) to " +
                     bits_text(bits.back(), false) + " (" + options.ladder.back() +
                     "); --ladder with a " + (low ? "smaller first" : "larger last") +
                     " scheme reaches further");
}

// ---- the text ----

// In whole chunks: before `skip` a position can't read a packed block at one rung or another, and
// up to `shared` no rung has packed any.
ProbeSettings probe_settings(const Options& options, const std::vector<LayerScheme>& ladder,
                             const Retention& retention) {
    std::uint64_t first = first_packed_length(retention, block_tokens(ladder.front()));
    std::uint64_t last = first;
    for (const LayerScheme& rung : ladder) {
        if (rung.exact()) continue;
        first = std::min(first, first_packed_length(retention, block_tokens(rung)));
        last = std::max(last, first_packed_length(retention, block_tokens(rung)));
    }
    const std::size_t chunk = options.chunk;
    return {.chunk = options.chunk,
            .skip = round_up(last, chunk),
            .shared = (first - 1) / chunk * chunk,
            .threads = options.threads};
}

// The text to choose on and, where there is enough, another one to verify on.
std::vector<std::vector<llama_token>> cut(const Model& model, const Options& options,
                                          std::size_t skip) {
    const std::string text_is = "the text " + options.file + " ";
    const std::vector<llama_token> text = model.tokenize(read_text(options.file), false);
    const bool bos = model.wants_first_token();
    const std::size_t most =
        std::min<std::size_t>(text.size() + (bos ? 1 : 0), model.train_context());
    const std::size_t least = skip + least_counted + 1;
    const std::size_t tokens =
        options.tokens > 0 ? options.tokens : std::min(skip + counted, std::max(most, least));
    const std::string why = " tokens are needed: before token " + count(skip) +
                            " no block of every rung has been packed and read, and fewer than " +
                            count(least_counted) + " positions say nothing";
    if (tokens < least)
        throw Failure("--tokens " + count(tokens) + " is too few: " + count(least) + why);
    if (tokens > model.train_context()) {
        throw Failure(count(tokens) + " tokens are longer than the model's context of " +
                      count(model.train_context()) + ": a smaller --tokens or --window");
    }
    if (tokens > most) {
        throw Failure(text_is + "is too short: it has " + count(text.size()) + " tokens; " +
                      (options.tokens > 0 ? "--tokens " + count(tokens) + " were asked for"
                                          : count(least) + why));
    }
    return model.windows(text, tokens, 2);
}

// ---- what comes out ----

void print(const Budget& budget) {
    const std::string legend =
        "Mean KLD: that layer alone as " + budget.ladder.front() + ", over " +
        count(budget.positions) +
        " positions. Floor: the same in 8 bits, where next to nothing is lost: the engine's own "
        "rounding, between a few layers interpolated. Sensitivity: what stands above it, drawn "
        "to the layers' mean where the text can't tell them apart. The ratios between rungs are "
        "taken above all layers' floor of " +
        fixed(budget.floor, 5) + ".";
    show(layer_table(budget) + "\n" + wrapped("", legend, 0) + "\n" + verification_table(budget) +
         "\n" + verdict(budget) + "\nThe scheme to use (--scheme, or LOWKV_SCHEME):\n");
}

int run(Options options) {
    const std::vector<LayerScheme> ladder = read_ladder(options.ladder);
    const Retention& retention = options.retention;
    validate({.base = {}, .retention = retention, .overrides = {}});
    if (!options.json.empty()) require_writable(options.json, {options.model, options.file});
    Budget budget;
    budget.problem = read_problem(options, ladder);
    for (std::size_t r = 0; r < ladder.size(); ++r)
        budget.ladder_bits.push_back(
            mean_bits(budget.problem, Rungs(budget.problem.layers.size(), r)));
    require_reachable(options, budget.ladder_bits);

    route_logs(options.verbose);
    const Model model(options.model);
    const ProbeSettings settings = probe_settings(options, ladder, retention);
    const std::vector<std::vector<llama_token>> windows = cut(model, options, settings.skip);
    budget.model = model.description();
    budget.model_path = options.model;
    budget.text_path = options.file;
    budget.tokens = windows.front().size();
    budget.skip = settings.skip;
    budget.chunk = options.chunk;
    budget.target = options.target;
    budget.ladder = options.ladder;
    budget.verification.other_text = windows.size() > 1;

    const std::size_t readings =
        budget.problem.layers.size() + ladder.size() + floor_probes + 4 + windows.size();
    const std::size_t total =
        readings * (budget.tokens - settings.shared) + windows.size() * settings.shared;
    std::fprintf(stderr, "%s: about %zu readings of %s tokens, the first %s of them shared\n",
                 budget.model.c_str(), readings, count(budget.tokens).c_str(),
                 count(settings.shared).c_str());
    {
        Countdown countdown("measuring:", total);
        const Ticker ticker = [&](const std::string& what) {
            return [&countdown, what](std::size_t tokens) { countdown.advance(tokens, what); };
        };
        std::optional<Probe> probe(std::in_place, model, windows.front(), settings,
                                   ticker("exact"));
        budget.positions = probe->positions();
        measure(budget, *probe, ladder, retention, ticker);
        budget.rungs = choose_rungs(budget.problem, options.target);
        const Scheme chosen = write_scheme(ladder, budget.problem, budget.rungs, retention);
        budget.chosen = to_string(chosen);
        if (windows.size() > 1) {
            probe.reset();  // its logits are large
            probe.emplace(model, windows.back(), settings, ticker("exact, other text"));
        }
        verify(budget, *probe, ladder, chosen, ticker);
    }
    if (!options.quiet) print(budget);
    show(budget.recommended + "\n");
    if (!options.json.empty()) write_file(options.json, json(budget));
    return 0;
}

}  // namespace

void add_budget(Command app, int& status) {
    auto options = std::make_shared<Options>();
    Command command = app.add_command(
        "budget", "A scheme per layer for so many bits in all, by measured sensitivity", footer);
    add_model(command, options->model);
    command.option("-f,--file", &options->file, "The text to measure on; - is stdin", {required()});
    command.option("-b,--target-bits", &options->target,
                   "What an element may cost, metadata included, mean over all layers",
                   {required()});
    command.defaulted("--ladder", &options->ladder,
                      "Schemes a layer can get, by ascending bits, without window or sinks");
    command.option("--window", &options->retention.window,
                   "Newest tokens that stay exact (default 128)");
    command.option("--sinks", &options->retention.sinks,
                   "First tokens that stay exact (default 5)");
    command.option("--flush", &options->retention.flush,
                   "Tokens that leave the window at a time (default 0: block by block)");
    command.defaulted("-n,--tokens", &options->tokens,
                      "Tokens to measure on; 0: 384 after those that can't read a packed block, "
                      "768 in all with the default window");
    add_chunk(command, options->chunk, "Tokens computed at once");
    add_threads(command, options->threads);
    command.option("--json", &options->json, "Write all figures to this file");
    command.flag("-q,--quiet", &options->quiet, "Print the scheme alone");
    add_verbose(command, options->verbose);
    command.callback([options, &status] { status = run(*options); });
}

}  // namespace lowkv::cli
