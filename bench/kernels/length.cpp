// lowkv-bench length: one sequence in all layers of a model's shape, really held, and what a
// token's attention takes as it grows.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench.h"
#include "common/machine.h"
#include "common/options.h"
#include "common/terminal.h"
#include "lowkv/codec.h"
#include "lowkv/implementation.h"
#include "nlohmann/json.hpp"
#include "plan/arithmetic.h"

namespace lowkv::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* footer = R"(Examples:
  lowkv-bench length
  lowkv-bench length --tokens 1Mi --refcheck --json length.json
  lowkv-bench length --layers 32 --heads 32/8 --head-dim 128 --scheme lowkv2 --tokens 64k

No model: random keys and values, the same in all layers, each layer with blocks of its own. At 1,024
tokens and each doubling, one query token attends in all layers; before it, a buffer larger than the
processor's caches is read, and the figure is the median. Packing is what appending a token took so
far, all layers. f16 MiB is computed, not held. floor = bytes held / measured read bandwidth.)";

constexpr std::uint32_t first_length = 1024, piece = 512;

struct Options {
    std::string tokens = "64Ki", heads = "9/3", scheme = chosen_scheme(), json;
    std::uint32_t layers = 30, head_dim = 64;
    unsigned threads = usable_cores();
    bool refcheck = false;
};

class Model {
  public:
    Model(const Options& options, const AttentionShape& shape)
        : options_(options), shape_(shape), random_(shape), store_(std::make_shared<Store>()) {
        for (std::uint32_t layer = 0; layer < options.layers; ++layer)
            layers_.push_back(make_lowkv_case(shape, options.scheme, store_));
    }

    // Packed as they come: a prompt's way.
    void append(std::uint32_t count) {
        const KvRows rows = random_.rows(size(), count);
        const Stopwatch watch;
        for (auto& layer : layers_) {
            layer->append(rows);
            layer->pack();
        }
        packing_ += watch.seconds();
    }

    std::uint32_t size() const { return layers_.front()->size(); }

    Json measure(MemoryReader& evictor, double bandwidth) {
        const Queries query{1, random_.queries(1), {}};
        for (auto& layer : layers_) layer->prepare(query, options_.threads);
        std::vector<double> seconds;
        for (double spent = 0; seconds.size() < 3 || (spent < 1 && seconds.size() < 31);) {
            evictor.read(options_.threads);
            const Stopwatch watch;
            for (auto& layer : layers_) layer->attend();
            seconds.push_back(watch.seconds());
            spent += seconds.back();
        }
        const auto bytes = static_cast<double>(layers_.front()->bytes());
        Json out = {{"scheme", options_.scheme},
                    {"layers", options_.layers},
                    {"head_dim", shape_.head_dim},
                    {"q_heads", shape_.q_heads},
                    {"kv_heads", shape_.kv_heads},
                    {"threads", options_.threads},
                    {"tokens", size()},
                    {"bytes", bytes},
                    {"f16_bytes", 4.0 * size() * shape_.channels() * options_.layers},
                    {"pack_us", 1e6 * packing_ / size()},
                    {"ms", 1e3 * median(std::move(seconds))},
                    {"floor_ms", 1e3 * bytes / bandwidth}};
        if (options_.refcheck) out["max_error"] = largest_error(*layers_.front(), query);
        return out;
    }

  private:
    Options options_;
    AttentionShape shape_;
    RandomTokens random_;
    std::shared_ptr<Store> store_;  // of all layers
    std::vector<std::unique_ptr<AttentionCase>> layers_;
    double packing_ = 0;
};

void require_cache(const Options& options, const AttentionShape& shape) {
    const Plan plan = neutral_plan(parse_scheme(options.scheme).base,
                                   {.kv_heads = shape.kv_heads, .head_dim = shape.head_dim});
    const double of_block = static_cast<double>(
        plan.keys().exact() && plan.values().exact() ? plan.exact_bytes() : plan.packed_bytes());
    const double needed = of_block * shape.tokens / plan.block_tokens() * options.layers;
    require_memory(count(shape.tokens) + " tokens take ", needed, " with " + options.scheme,
                   "fewer --tokens or --layers, or a --scheme of fewer bits");
}

std::vector<std::string> row(const Json& found) {
    const double held = found["bytes"], f16 = found["f16_bytes"], ms = found["ms"];
    std::vector<std::string> cells = {count(found["tokens"]),
                                      mebibytes(held),
                                      mebibytes(f16),
                                      fixed(f16 / held, 2) + "x",
                                      fixed(found["pack_us"], 1),
                                      fixed(ms, 3),
                                      fixed(1e6 * ms / found["tokens"].get<double>(), 1),
                                      fixed(100 * found["floor_ms"].get<double>() / ms, 1)};
    if (found.contains("max_error")) cells.push_back(scientific(found["max_error"]));
    return cells;
}

int bench_length(const Options& options) {
    const auto [q_heads, kv_heads] = read_heads(options.heads);
    const std::uint64_t tokens = read_tokens("--tokens", options.tokens);
    if (tokens < first_length || tokens > 1ULL << 30U)
        throw UsageError("--tokens " + options.tokens + ": 1Ki to 1Gi");
    const AttentionShape shape{options.head_dim, q_heads, kv_heads,
                               static_cast<std::uint32_t>(tokens)};
    require_cache(options, shape);
    require_writable(options.json);

    MemoryReader reader(bandwidth_bytes());
    const double bandwidth = reader.bandwidth(options.threads);
    Model model(options, shape);
    std::vector<std::string> header = {"tokens",     "MiB",       "f16 MiB",    "smaller",
                                       "packing us", "decode ms", "ns a token", "% of floor"};
    if (options.refcheck) header.emplace_back("max error");
    Table table(header);
    table.widen(
        {count(tokens), mebibytes(1e11), mebibytes(1e12), "10.00x", "10000.0", "10000.000"});
    show(table.head());
    Json found = Json::array();
    {
        Countdown progress("holding " + count(tokens) + " tokens", tokens);
        for (std::uint32_t next = first_length; found.empty() || model.size() < shape.tokens;
             next = next < shape.tokens / 2 ? 2 * next : shape.tokens) {
            while (model.size() < next) {
                const std::uint32_t some = std::min(piece, next - model.size());
                model.append(some);
                progress.advance(some);
            }
            found.push_back(model.measure(reader, bandwidth));
            show(table.line(row(found.back())));
        }
    }
    show("\n" + options.scheme + ": " + std::to_string(options.layers) + " layers of " +
         shape.heads() + " heads of " + std::to_string(options.head_dim) + ", " +
         plural(options.threads, "thread") + ", implementation " +
         std::string(active_implementation().name) + "; read bandwidth " +
         fixed(bandwidth / 1e9, 1) + " GB/s. ns a token: of the whole step, by token held.\n");
    if (options.refcheck)
        show(
            "max error: of one layer, against attention in double precision over its decoded "
            "cache, relative to a head's largest value.\n");
    write_file(options.json, found.dump(1) + "\n");
    return 0;
}

}  // namespace

void add_length(Command app, int& status) {
    auto options = std::make_shared<Options>();
    Command command = app.add_command(
        "length", "One long sequence in all layers: memory, packing, decoding as it grows", footer);
    command.defaulted("--tokens", &options->tokens, "Tokens at the end: 64Ki, 1M ...");
    command.defaulted("--layers", &options->layers, "Layers", {range(1, 1024)});
    command.defaulted("--heads", &options->heads, "Query heads / kv heads");
    command.defaulted("--head-dim", &options->head_dim, "Head dimension", {range(16, 576)});
    add_scheme(command, options->scheme);
    command.defaulted("-t,--threads", &options->threads, "Threads", {range(1, 1024)});
    command.flag("--refcheck", &options->refcheck,
                 "Check one layer's output against a double-precision attention");
    command.option("--json", &options->json, "Write the figures to this file, a list");
    command.callback([options, &status] { status = bench_length(*options); });
}

}  // namespace lowkv::cli
