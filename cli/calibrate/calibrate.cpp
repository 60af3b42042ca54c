// lowkv calibrate: what a scheme needs to know about a model, measured once on a text.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "calibrate/capture.h"
#include "common/app.h"
#include "common/model.h"
#include "common/options.h"
#include "common/terminal.h"
#include "lowkv/calibrate.h"
#include "lowkv/calibration.h"
#include "lowkv/calibration_file.h"
#include "lowkv/error.h"
#include "lowkv/executor.h"
#include "lowkv/scheme.h"
#include "platform/system.h"

namespace lowkv::cli {

namespace {

constexpr const char* footer = R"(Examples:
  lowkv calibrate -m model.gguf --text book.txt
      for skvq-k2v2, into model.skvq-k2v2.lowkv.safetensors beside the model
  lowkv calibrate -m model.gguf --text book.txt --scheme kvquant3-1% -o kvquant.safetensors
  lowkv calibrate -m model.gguf --text book.txt --tokens 16384 --context 4096
      more text, in longer windows
  python3 tools/fisher.py -m model.gguf --text book.txt -o fisher.safetensors
  lowkv calibrate -m model.gguf --text book.txt --scheme kvquant2 --fisher fisher.safetensors
      levels that the loss minds most about
  LOWKV_CALIBRATION=model.skvq-k2v2.lowkv.safetensors lowkv generate -m model.gguf \
      --scheme skvq-k2v2 -p "Why is the sky blue?"
      use it; llama.cpp with the plug-in reads the same variable

How it works: the model reads the text once, in windows, with llama.cpp's own f16 cache; keys (before
their rotary embedding where the scheme says pre), values and some queries are kept per layer. SKVQ:
channels of like ranges get one group (k-means), then each group the share of its range, from 0.3 to
1, that leaves the attention's output nearest to the exact one. KVQuant: each key channel the range
of its inliers, and each layer the levels that fit its keys and its values best. The first tokens of
each window, the scheme's sinks, are left out of all statistics.

Text of the kind that the model will read, in its language, is best; a few thousand tokens do. The
file is tied to the model and to the codecs of the scheme, not to its window or sinks, nor to the
precision of the weights (docs/calibration.md). It is replaced if it is there.)";

constexpr std::uint64_t default_tokens = 4096;
constexpr std::uint32_t all_queries = 64;  // of a layer
constexpr std::uint32_t least_positions = 64;

struct Options {
    std::string model, text, scheme = "skvq-k2v2", output, fisher;
    std::uint64_t tokens = 0, seed = 0;
    std::uint32_t context = 2048;
    bool q_norm = false, verbose = false;
    unsigned threads = 0;
};

Scheme read_scheme(const Options& options) {
    Scheme scheme = parse_scheme(options.scheme);
    if (scheme.needs_calibration()) return scheme;
    std::vector<std::string> names;
    for (const Preset& preset : presets())
        if (preset.scheme.needs_calibration()) names.emplace_back(preset.name);
    throw UsageError(options.scheme +
                     " needs no calibration: use it as it is. These do: " + joined(names));
}

// Fisher information is that of keys before RoPE.
void require_early_keys(const Scheme& scheme, std::uint32_t layers) {
    for (std::uint32_t i = 0; i < layers; ++i) {
        const Codec& key = scheme.layer(i).key;
        if (key.levels == Levels::learned && key.stage == Stage::post)
            throw UsageError("--fisher weighs keys before their rotary embedding, and " +
                             to_string(key) + " has them after it: add -pre, or leave it out");
    }
}

// "model.gguf" -> "model.skvq-k2v2.lowkv.safetensors"
std::string default_output(const std::string& model, const Scheme& scheme) {
    std::string name = to_string(scheme);
    for (char& c : name)
        if (c == ',' || c == '=' || c == '/') c = '_';
    return platform::text_of(
        platform::path_of(model).replace_extension(name + ".lowkv.safetensors"));
}

// The first position whose query reads a packed token.
std::uint32_t first_query(const Scheme& scheme) {
    return std::max(scheme.retention.window, 1u) +
           std::max(scheme.retention.sinks, calibration::masked_tokens(scheme.retention));
}

// Windows of equal length, each with the model's first token.
std::vector<std::vector<llama_token>> cut(const Model& model, const Options& options,
                                          const Scheme& scheme) {
    const std::vector<llama_token> text = model.tokenize(read_text(options.text), false);
    if (options.tokens > text.size())
        throw Failure("the text " + options.text + " has " + count(text.size()) + " tokens; " +
                      "--tokens " + count(options.tokens) + " were asked for");
    if (options.context > model.train_context() && options.context != Options{}.context)
        throw Failure("--context " + count(options.context) + " is longer than the model's of " +
                      count(model.train_context()));
    const std::uint64_t longest = std::min(options.context, model.train_context());
    const std::uint64_t total =
        std::min<std::uint64_t>(options.tokens > 0 ? options.tokens : default_tokens, text.size());
    const std::uint64_t windows = std::max<std::uint64_t>(ceil_div(total, longest), 1);
    const std::uint64_t length = total / windows;
    const std::uint64_t least = first_query(scheme) + least_positions;
    if (length < least) {
        const char* remedy = longest < least       ? "a longer --context"
                             : text.size() < least ? "a longer text"
                                                   : "more --tokens";
        throw Failure("windows of " + count(length) + " tokens are too short: under " +
                      to_string(scheme) + " little or nothing leaves the exact window before " +
                      count(least) + " tokens; give it " + remedy);
    }
    return model.windows(text, length, windows);
}

// Calls f(i) for every layer on all threads, with a line of progress.
void for_layers(std::size_t layers, const Options& options,
                const std::function<void(std::size_t)>& f) {
    Progress progress("solving layers:");
    std::mutex mutex;
    std::size_t done = 0;
    std::exception_ptr failure;
    const auto executor = make_thread_executor(options.threads);
    executor->parallel_for(layers, [&](std::size_t i, unsigned) noexcept {
        try {
            f(i);
            const std::scoped_lock lock(mutex);
            progress.show(++done, layers);
        } catch (...) {
            const std::scoped_lock lock(mutex);
            failure = std::current_exception();
        }
    });
    if (failure) std::rethrow_exception(failure);
}

struct CalibrateReport {
    Calibration calibration;
    std::vector<calibration::LayerReport> layers;
};

CalibrateReport solve(std::vector<calibration::LayerSamples> samples, const Scheme& scheme,
                      const Options& options,
                      const std::optional<calibration::FisherWeights>& fisher) {
    CalibrateReport report;
    report.calibration.layers.resize(samples.size());
    report.layers.resize(samples.size());
    for_layers(samples.size(), options, [&](std::size_t i) {
        calibration::SolveOptions solving{
            .seed = options.seed, .q_norm = options.q_norm, .key_weights = {}, .value_weights = {}};
        if (fisher) {
            solving.key_weights = fisher->key[i];
            solving.value_weights = fisher->value[i];
        }
        calibration::SolvedLayer solved = solve_layer(
            samples[i], scheme.layer(static_cast<std::uint32_t>(i)), scheme.retention, solving);
        samples[i] = {};
        report.calibration.layers[i] = std::move(solved.calibration);
        report.layers[i] = solved.report;
    });
    return report;
}

std::vector<calibration::LayerSamples> read_samples(
    const Model& model, const std::vector<std::vector<llama_token>>& windows, const Scheme& scheme,
    const Options& options) {
    const auto count =
        static_cast<std::uint32_t>(std::min<std::size_t>(windows.size(), all_queries));
    CaptureOptions capturing{.threads = options.threads};
    capturing.first_query = first_query(scheme);
    capturing.queries = all_queries / count;
    Progress progress("reading the text:");
    std::size_t done = 0;
    return capture(model, windows, scheme, capturing, [&](std::size_t tokens) {
        progress.show(done += tokens, windows.size() * windows.front().size());
    });
}

std::optional<calibration::FisherWeights> read_fisher(
    const Options& options, const std::vector<calibration::LayerSamples>& samples) {
    if (options.fisher.empty()) return {};
    // A layer that doesn't store keys before RoPE has none here.
    const auto turned = std::ranges::find_if(
        samples, [](const auto& layer) { return !layer.rope.frequencies.empty(); });
    return calibration::load_fisher(options.fisher, static_cast<std::uint32_t>(samples.size()),
                                    samples.front().shape,
                                    turned == samples.end() ? Rope{} : turned->rope);
}

using calibration::LayerReport;

constexpr std::size_t most_rows = 8;

std::string percent(double share) { return fixed(100 * share, 2) + " %"; }

// The square root of a mean of squares, in percent.
std::string root_percent(double squared) { return percent(std::sqrt(squared)); }

template <class F>
double mean(std::span<const LayerReport> layers, F f) {
    double sum = 0;
    for (const LayerReport& layer : layers) sum += f(layer);
    return sum / static_cast<double>(layers.size());
}

bool has_outliers(const CalibrateReport& report) {
    return std::ranges::any_of(report.layers,
                               [](const auto& layer) { return layer.outliers.has_value(); });
}

std::string table(const CalibrateReport& report) {
    const bool outliers = has_outliers(report);
    std::vector<std::string> header{"layers", "error before", "after"};
    if (outliers) header.insert(header.begin() + 1, {"key outliers", "too many"});
    Table out(header);
    const std::size_t step = ceil_div(report.layers.size(), most_rows);
    for (std::size_t first = 0; first < report.layers.size(); first += step) {
        const auto group =
            std::span(report.layers).subspan(first, std::min(step, report.layers.size() - first));
        std::vector<std::string> row{std::to_string(first)};
        if (group.size() > 1) row.front() += concat("-", first + group.size() - 1);
        if (outliers) {
            row.push_back(percent(
                mean(group, [](const auto& r) { return r.outliers ? r.outliers->beyond : 0; })));
            row.push_back(percent(
                mean(group, [](const auto& r) { return r.outliers ? r.outliers->clamped : 0; })));
        }
        row.push_back(root_percent(mean(group, [](const auto& r) { return r.error_before; })));
        row.push_back(root_percent(mean(group, [](const auto& r) { return r.error_after; })));
        out.add(row);
    }
    return out.text();
}

std::string legend(const CalibrateReport& report) {
    std::string text;
    if (has_outliers(report)) {
        text =
            "Key outliers: keys beyond their channel's range. Too many: those of them that a "
            "token's cap has no room for: they are clamped. ";
    }
    text +=
        "Error: of the attention's output, relative, root mean square, when what has left the "
        "window is read as stored; before: the same scheme with channels in order, nothing clipped "
        "and levels in even steps; after: with this calibration. It was measured on the very text.";
    return wrapped("", text, 0);
}

int run(Options options) {
    const Scheme scheme = read_scheme(options);
    if (options.output.empty()) options.output = default_output(options.model, scheme);
    route_logs(options.verbose);
    require_writable(options.output, {options.model, options.text, options.fisher});
    const std::filesystem::path file = platform::path_of(options.output);
    if (exists(file) && !is_regular_file(file))
        throw Failure("can't write " + options.output + ": it is a device or a pipe, no file");
    const Model model(options.model);
    require_layers(scheme, model.layers());
    if (!options.fisher.empty()) require_early_keys(scheme, model.layers());
    const std::vector<std::vector<llama_token>> windows = cut(model, options, scheme);
    const std::uint64_t length = windows.front().size(), total = windows.size() * length;
    std::fprintf(stderr, "%s: %s for %s, %zu windows of %s tokens\n", options.text.c_str(),
                 count(total).c_str(), model.description().c_str(), windows.size(),
                 count(length).c_str());

    const Stopwatch watch;
    std::vector<calibration::LayerSamples> samples = read_samples(model, windows, scheme, options);
    const double reading = watch.seconds();
    const Shape shape = samples.front().shape;
    const std::optional<calibration::FisherWeights> fisher = read_fisher(options, samples);
    CalibrateReport report = solve(std::move(samples), scheme, options, fisher);
    report.calibration.scheme = to_string(scheme);
    report.calibration.model = model.fingerprint();
    report.calibration.shape = shape;
    calibration::save_calibration(
        options.output, report.calibration,
        {.tool = concat("lowkv ", LOWKV_VERSION),
         .text = platform::text_of(platform::path_of(options.text).filename()),
         .tokens = total});

    show(table(report) + "\n" + legend(report) + "\nWritten: " + options.output + " (" +
         bytes(std::filesystem::file_size(platform::path_of(options.output))) + "; read in " +
         fixed(reading, 1) + " s, solved in " + fixed(watch.seconds() - reading, 1) +
         " s)\nTry it:\n  LOWKV_CALIBRATION=" + options.output + " lowkv compare -m " +
         options.model + " -f " + options.text + " --schemes " + report.calibration.scheme + "\n");
    return 0;
}

}  // namespace

void add_calibrate(Command app, int& status) {
    auto options = std::make_shared<Options>();
    Command command = app.add_command(
        "calibrate", "Measure what SKVQ's and KVQuant's schemes need to know about a model",
        footer);
    add_model(command, options->model);
    command.option("--text", &options->text, "The text to measure on; - is stdin", {required()});
    command.defaulted("-s,--scheme", &options->scheme,
                      "The scheme that it is for, one that needs it, see `lowkv schemes`");
    command.option("-o,--output", &options->output,
                   "The file to write (default: beside the model, MODEL.SCHEME.lowkv.safetensors)");
    command.option("-n,--tokens", &options->tokens,
                   "Tokens of the text to read (default 4096, or all there are)");
    command.defaulted("-c,--context", &options->context,
                      "The longest window of text, at most the model's context",
                      {range(1, 1 << 24)});
    command.defaulted("--seed", &options->seed, "Seed of the k-means of channels");
    command.flag("--q-norm", &options->q_norm,
                 "KVQuant's Q-Norm: learned levels keep the mean and the variance");
    command.option("--fisher", &options->fisher,
                   "Weights of channels for learned levels, from tools/fisher.py");
    add_threads(command, options->threads);
    add_verbose(command, options->verbose);
    command.callback([options, &status] { status = run(*options); });
}

}  // namespace lowkv::cli
