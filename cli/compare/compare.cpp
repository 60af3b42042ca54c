// lowkv compare: one text under several schemes, beside `exact` and stock llama.cpp's own caches.
//
// All caches of one loaded model read the text, chunk by chunk, as an engine would prefill it. For
// their speed they take turns; then one after the other is compared with exact, whose logits are
// kept.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache_size.h"
#include "common/app.h"
#include "common/machine.h"
#include "common/metrics.h"
#include "common/model.h"
#include "common/options.h"
#include "common/terminal.h"
#include "compare/report.h"
#include "lowkv/executor_openmp.h"
#include "lowkv/scheme.h"
#include "lowkv_ggml.h"

namespace lowkv::cli {

namespace {

constexpr const char* footer = R"(Examples:
  lowkv compare -m model.gguf -f book.txt
  lowkv compare -m model.gguf -f book.txt --schemes kivi2,kivi4 --stock f16 --windows 8 --tokens 2048
  lowkv compare -m model.gguf -f book.txt --schemes kivi2,kivi2+window=256,k=channel-3-g32+v=token-2-g32
  lowkv compare -m model.gguf -f book.txt --json compare.json

Schemes are separated by commas, so within a spelled-out scheme write + for the comma.
The table is Markdown, on stdout, row by row; progress goes to stderr.)";

// A cache under comparison.
struct Row {
    std::string name;
    std::optional<std::string> scheme;
    std::optional<Context> context;
    Distance distance;
    double held = 0;  // bytes in our cache now
    double prefill_seconds = 0;
    std::vector<double> decode_seconds;
    double packed = 0;  // cells in our cache now
    bool packs = false, read_packed = false;

    // Does `work` on the context and keeps count of what its cache holds: no other cache changes
    // meanwhile.
    template <class F>
    double work(F&& work) {
        const double before = total(), cells = packed_cells();
        const Stopwatch watch;
        std::forward<F>(work)(*context);
        const double seconds = watch.seconds();
        held += total() - before;
        packed += packed_cells() - cells;
        return seconds;
    }
    static double packed_cells() { return static_cast<double>(ggml::stats().cells_packed); }
    static double total() { return ggml::stats().held_bytes(); }
};

std::vector<Row> make_rows(const CompareOptions& options, const Model& model, std::uint32_t cells,
                           double& f16) {
    std::vector<Row> rows;
    ContextOptions settings;
    settings.cells = cells;
    settings.chunk = options.chunk;
    settings.threads = options.threads;
    settings.all_logits = true;
    const auto add = [&](std::string name) {
        Row& row = rows.emplace_back();
        row.name = std::move(name);
        row.scheme = settings.scheme;
        row.packs = row.scheme && ggml::packs(parse_scheme(*row.scheme));
        row.held = -Row::total();
        row.context.emplace(model, settings);
        row.held += Row::total();
    };
    settings.scheme = "exact";
    add("exact");
    // Ours is the only cache now: what stock llama.cpp would hold at the end.
    f16 = f16_bytes(ggml::layer_reports(), options.tokens);
    for (const std::string& scheme : options.schemes) {
        if (scheme == "exact") continue;
        settings.scheme = scheme;
        add(scheme);
    }
    settings.scheme.reset();
    for (const std::string& name : options.stock) {
        settings.stock = cache_type("--stock", name);
        add("stock " + name);
    }
    return rows;
}

// Prefill without logits, then single tokens at the end; the caches take turns.
void measure_speed(std::vector<Row>& rows, Tokens text, const CompareOptions& options) {
    const Tokens prefill = text.first(text.size() - options.decode);
    Progress progress("measuring speed:");
    std::size_t done = 0;
    const std::size_t total = rows.size() * (prefill.size() + options.decode);
    each_chunk(prefill, options.chunk, [&](std::size_t, Tokens chunk) {
        for (Row& row : rows) {
            row.prefill_seconds += row.work([&](Context& context) { context.decode(chunk); });
            progress.show(done += chunk.size(), total, row.name);
        }
    });
    for (const llama_token& token : text.last(options.decode)) {
        for (Row& row : rows) {
            row.decode_seconds.push_back(
                row.work([&](Context& context) { context.decode({&token, 1}); }));
            progress.show(++done, total, row.name);
        }
    }
}

// How many tokens' logits are kept of the reference at once: a gibibyte, less where memory is
// short.
std::size_t kept_tokens(const Model& model, const CompareOptions& options) {
    constexpr std::size_t most = std::size_t(1) << 30U;
    const std::size_t bytes = std::min(most, available_memory() / 4);
    const std::size_t tokens = bytes / (model.vocabulary() * sizeof(float));
    return std::max<std::size_t>(tokens / options.chunk, 1) * options.chunk;
}

// Windows' predictions under each cache against the first one's. One cache after the other reads
// what can be kept of the reference, so that in the last window rows are complete one by one.
class Quality {
  public:
    Quality(const Model& model, const CompareOptions& options, std::size_t total)
        : options_(options),
          vocabulary_(model.vocabulary()),
          kept_(kept_tokens(model, options)),
          total_(total),
          executor_(options.threads) {}

    // Calls done(row) when a row has read the window.
    template <class F>
    void measure(std::vector<Row>& rows, Tokens text, F&& done) {
        for (Row& row : rows) row.work([](Context& context) { context.clear(); });
        each_chunk(text, kept_, [&](std::size_t begin, Tokens part) {
            exact_.clear();
            exact_.reserve(part.size() * vocabulary_);
            for (Row& row : rows) {
                std::size_t kept = 0;
                each_chunk(part, options_.chunk, [&](std::size_t at, Tokens chunk) {
                    read(row, &row == &rows.front(), text, begin + at, chunk, kept);
                });
                if (begin + part.size() < text.size()) continue;
                progress_.finish();
                done(row);
            }
        });
    }

  private:
    // `kept` counts the part's positions so far.
    void read(Row& row, bool first_row, Tokens text, std::size_t at, Tokens chunk,
              std::size_t& kept) {
        const std::size_t first =
            at >= options_.skip ? 0 : std::min<std::size_t>(options_.skip - at, chunk.size());
        const std::size_t last = std::min(chunk.size(), text.size() - 1 - at);  // has a next token
        // What a chunk pushes out of the window is packed after it: the next one reads it.
        row.read_packed = row.read_packed || (first < last && row.packed > 0);
        row.work([&](Context& context) { context.decode(chunk, first < last); });
        const Rows logits = row.context->logits(first, last);
        if (first_row)
            for (const float* z : logits) exact_.insert(exact_.end(), z, z + vocabulary_);
        if (!logits.empty()) {
            row.distance.add(rows_of(exact_, kept, logits.size(), vocabulary_), logits,
                             text.subspan(at + first + 1, logits.size()), vocabulary_, executor_);
            kept += logits.size();
        }
        progress_.show(done_ += chunk.size(), total_, row.name);
    }

    const CompareOptions& options_;
    std::uint32_t vocabulary_;
    std::size_t kept_, done_ = 0, total_;
    std::vector<float> exact_;  // the reference's logits at the part's positions
    OpenMPExecutor executor_;
    Progress progress_{"comparing:"};
};

// Windows of the text.
std::vector<std::vector<llama_token>> cut(const Model& model, CompareOptions& options,
                                          const std::vector<llama_token>& text) {
    const bool bos = model.wants_first_token();
    if (options.tokens == 0) {
        const std::size_t most = std::min<std::size_t>(4096, model.train_context());
        options.tokens = std::min<std::size_t>(most, text.size() / options.windows + (bos ? 1 : 0));
    }
    const std::size_t take = options.tokens - (bos ? 1 : 0);
    if (text.size() < take * options.windows) {
        throw Failure("the text has " + count(text.size()) + " tokens; " + count(options.windows) +
                      " x " + count(options.tokens) +
                      " were asked for: use a longer text, or fewer --tokens or --windows");
    }
    if (options.tokens < options.skip + 2 || (options.speed && options.tokens <= options.decode)) {
        throw Failure("a window of " + count(options.tokens) +
                      " tokens is too short: --skip leaves out the first " + count(options.skip) +
                      (options.speed
                           ? ", and speed is measured on the last " + count(options.decode)
                           : std::string()));
    }
    if (options.tokens <= options.chunk) {
        throw Failure("a window of " + count(options.tokens) +
                      " tokens is a single chunk of --chunk " + count(options.chunk) +
                      ": a chunk attends to itself exactly, so nothing packed would ever be "
                      "read. Use more --tokens, or a smaller --chunk");
    }
    if (options.tokens > model.train_context()) {
        throw Failure("a window of " + count(options.tokens) +
                      " tokens is longer than the model's context of " +
                      count(model.train_context()));
    }
    return model.windows(text, options.tokens, options.windows);
}

ComparedRow result(const Row& row, const CompareOptions& options, double f16) {
    ComparedRow out;
    out.name = row.name;
    out.stock = !row.scheme;
    out.idle = row.packs && !row.read_packed;
    out.kld = row.distance.kld();
    out.kld_999 = row.distance.kld_percentile(0.999);
    out.same_top = row.distance.same_top();
    out.perplexity = row.distance.perplexity();
    if (options.positions) out.klds = row.distance.divergences();
    out.cache_bytes = row.scheme
                          ? row.held
                          : static_cast<double>(llama_state_seq_get_size(row.context->get(), 0));
    out.bytes_per_token = out.cache_bytes / static_cast<double>(options.tokens);
    out.compression = f16 / out.cache_bytes;
    if (row.decode_seconds.empty()) return out;
    out.prefill_rate = static_cast<double>(options.tokens - options.decode) / row.prefill_seconds;
    out.decode_rate = 1 / median(row.decode_seconds);
    return out;
}

int compare(CompareOptions options) {
    route_logs(options.verbose);
    if (!options.speed) options.decode = 0;
    read_schemes(options.schemes);
    for (const std::string& name : options.stock) static_cast<void>(cache_type("--stock", name));
    const Inputs inputs{options.model, options.file};
    require_writable(options.json, inputs);
    const std::string text = read_text(options.file);
    const Model model(options.model);
    model.use_calibrations(options.calibrations,
                           std::ranges::any_of(options.schemes, [](const std::string& scheme) {
                               return parse_scheme(scheme).needs_calibration();
                           }));
    const auto windows = cut(model, options, model.tokenize(text, false));

    double f16 = 0;
    std::vector<Row> rows =
        make_rows(options, model, static_cast<std::uint32_t>(options.tokens), f16);
    std::fprintf(stderr, "%s, %zu caches, %s x %s tokens of %s\n", model.description().c_str(),
                 rows.size(), count(options.windows).c_str(), count(options.tokens).c_str(),
                 options.file.c_str());
    if (options.speed) measure_speed(rows, windows.front(), options);
    Comparison comparison{.model = model.description(), .options = options, .rows = {}};
    Table table = comparison_table();
    for (const Row& row : rows) table.widen({row.name, "reference"});
    Quality quality(model, options, rows.size() * options.windows * options.tokens);
    for (const auto& window : windows) {
        quality.measure(rows, window, [&](const Row& row) {
            if (&window != &windows.back()) return;
            if (&row == &rows.front()) show(table.head());
            comparison.rows.push_back(result(row, options, f16));
            show(table.line(cells(comparison, comparison.rows.back())));
        });
    }
    comparison.positions = rows.front().distance.positions();
    show("\n" + notes(comparison) + "\n" + summary(comparison));
    write_file(options.json, json(comparison));
    return 0;
}

}  // namespace

void add_compare(Command app, int& status) {
    auto options = std::make_shared<CompareOptions>();
    Command command = app.add_command(
        "compare", "One text under several schemes, beside exact and stock llama.cpp caches",
        footer);
    add_model(command, options->model);
    command.option("-f,--file", &options->file, "The text; - is stdin", {required()});
    command.defaulted("-s,--schemes", &options->schemes,
                      "Schemes; exact is always there, as the reference");
    add_calibrations(command, options->calibrations);
    command.defaulted("--stock", &options->stock,
                      "llama.cpp cache types to set beside them; none: leave them out");
    command.defaulted("-n,--tokens", &options->tokens,
                      "Tokens of a window; 0: what the text has, at most 4096");
    command.defaulted("-w,--windows", &options->windows,
                      "Windows, taken one after another; each starts afresh", {range(1, 1000000)});
    add_chunk(command, options->chunk, "Tokens computed at once");
    command.defaulted("--skip", &options->skip, "First positions of a window that are not counted");
    command.defaulted("--decode", &options->decode,
                      "Tokens at the end that decode speed is measured on", {range(1, 65536)});
    command.flag("--speed,!--no-speed", &options->speed,
                 "Measure speed (default), in one more pass");
    add_threads(command, options->threads);
    command.option("--json", &options->json, "Write the figures to this file");
    command.flag("--positions", &options->positions, "Write each position's KLD to it, too");
    add_verbose(command, options->verbose);
    command.callback([options, &status] {
        std::erase(options->stock, "none");
        status = compare(*options);
    });
}

}  // namespace lowkv::cli
