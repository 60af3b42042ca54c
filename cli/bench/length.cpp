// lowkv bench length: one sequence in all layers of a model's shape, really held, and what a
// token's attention takes as it grows.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/attention_case.h"
#include "bench/bench.h"
#include "common/machine.h"
#include "common/options.h"
#include "common/terminal.h"
#include "lowkv/calibration.h"
#include "lowkv/implementation.h"
#include "nlohmann/json.hpp"
#include "plan/arithmetic.h"

namespace lowkv::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* footer = R"(Examples:
  lowkv bench length
  lowkv bench length --tokens 1Mi --refcheck --json length.json
  lowkv bench length --layers 32 --heads 32/8 --head-dim 128 --scheme lowkv2 --tokens 64k

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

struct Figures {
    std::uint32_t tokens = 0;
    double bytes = 0, f16_bytes = 0, pack_us = 0, ms = 0, floor_ms = 0, error = -1;
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
        keys_.resize(std::size_t{count} * shape_.channels());
        values_.resize(keys_.size());
        random_.keys(size(), count, keys_.data());
        random_.values(size(), count, values_.data());
        const Stopwatch watch;
        for (auto& layer : layers_) {
            layer->append(keys_.data(), values_.data(), count);
            layer->pack();
        }
        packing_ += watch.seconds();
    }

    std::uint32_t size() const { return layers_.front()->size(); }

    Figures measure(MemoryReader& evictor, double bandwidth) {
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
        Figures out{.tokens = size()};
        out.bytes = static_cast<double>(layers_.front()->bytes());
        out.f16_bytes = 4.0 * size() * shape_.channels() * options_.layers;
        out.pack_us = 1e6 * packing_ / size();
        out.ms = 1e3 * median(std::move(seconds));
        out.floor_ms = 1e3 * out.bytes / bandwidth;
        if (options_.refcheck) out.error = largest_error(*layers_.front(), query);
        return out;
    }

  private:
    Options options_;
    AttentionShape shape_;
    RandomTokens random_;
    std::shared_ptr<Store> store_;  // of all layers
    std::vector<std::unique_ptr<AttentionCase>> layers_;
    std::vector<float> keys_, values_;
    double packing_ = 0;
};

void require_memory(const Options& options, const AttentionShape& shape) {
    const Plan plan = neutral_plan(parse_scheme(options.scheme).base,
                                   {.kv_heads = shape.kv_heads, .head_dim = shape.head_dim});
    const double of_block = static_cast<double>(
        plan.keys().exact() && plan.values().exact() ? plan.exact_bytes() : plan.packed_bytes());
    const double needed = of_block * shape.tokens / plan.block_tokens() * options.layers;
    const auto free = static_cast<double>(available_memory());
    if (free <= 0 || needed <= free) return;
    throw Failure(count(shape.tokens) + " tokens take " + bytes(needed) + " with " +
                  options.scheme + ", and " + bytes(free) +
                  " are available: fewer --tokens or --layers, or a --scheme of fewer bits");
}

std::vector<std::string> row(const Figures& f, bool refcheck) {
    std::vector<std::string> cells = {count(f.tokens),
                                      mebibytes(f.bytes),
                                      mebibytes(f.f16_bytes),
                                      fixed(f.f16_bytes / f.bytes, 2) + "x",
                                      fixed(f.pack_us, 1),
                                      fixed(f.ms, 3),
                                      fixed(1e6 * f.ms / f.tokens, 1),
                                      fixed(100 * f.floor_ms / f.ms, 1)};
    if (refcheck) cells.push_back(scientific(f.error));
    return cells;
}

Json json(const Options& options, const AttentionShape& shape, const std::vector<Figures>& found) {
    Json rows = Json::array();
    for (const Figures& f : found) {
        Json row = {{"scheme", options.scheme},
                    {"layers", options.layers},
                    {"head_dim", shape.head_dim},
                    {"q_heads", shape.q_heads},
                    {"kv_heads", shape.kv_heads},
                    {"threads", options.threads},
                    {"tokens", f.tokens},
                    {"bytes", f.bytes},
                    {"f16_bytes", f.f16_bytes},
                    {"pack_us", f.pack_us},
                    {"ms", f.ms},
                    {"floor_ms", f.floor_ms}};
        if (f.error >= 0) row["max_error"] = f.error;
        rows.push_back(row);
    }
    return rows;
}

int bench_length(const Options& options) {
    const auto [q_heads, kv_heads] = read_heads(options.heads);
    const std::uint64_t tokens = read_tokens("--tokens", options.tokens);
    if (tokens < first_length || tokens > 1ULL << 30U)
        throw UsageError("--tokens " + options.tokens + ": 1Ki to 1Gi");
    const AttentionShape shape{options.head_dim, q_heads, kv_heads,
                               static_cast<std::uint32_t>(tokens)};
    require_memory(options, shape);
    if (!options.json.empty()) require_writable(options.json);

    MemoryReader reader(bandwidth_bytes());
    const double bandwidth = reader.bandwidth(options.threads);
    Model model(options, shape);
    std::vector<std::string> header = {"tokens",     "MiB",       "f16 MiB",    "smaller",
                                       "packing us", "decode ms", "ns a token", "% of floor"};
    if (options.refcheck) header.emplace_back("max error");
    Table table(header);
    table.widen(
        row({static_cast<std::uint32_t>(tokens), 1e11, 1e12, 1e4, 1e4, 0, 0}, options.refcheck));
    std::printf("%s", table.head().c_str());
    std::vector<Figures> found;
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
            std::printf("%s", table.line(row(found.back(), options.refcheck)).c_str());
            std::fflush(stdout);
        }
    }
    std::printf(
        "\n%s: %u layers of %u/%u heads of %u, %u thread%s, implementation %s; read bandwidth %s "
        "GB/s. ns a token: of the whole step, by token held.\n",
        options.scheme.c_str(), options.layers, q_heads, kv_heads, options.head_dim,
        options.threads, options.threads == 1 ? "" : "s",
        std::string(active_implementation().name).c_str(), fixed(bandwidth / 1e9, 1).c_str());
    if (options.refcheck)
        std::printf(
            "max error: of one layer, against attention in double precision over its decoded "
            "cache, relative to a head's largest value.\n");
    if (!options.json.empty()) write_file(options.json, json(options, shape, found).dump(1) + "\n");
    return 0;
}

}  // namespace

void add_bench_length(Command group, int& status) {
    auto options = std::make_shared<Options>();
    Command command = group.add_command(
        "length", "One long sequence in all layers: memory, packing, decoding as it grows", footer);
    command.defaulted("--tokens", &options->tokens, "Tokens at the end: 64Ki, 1M ...");
    command.defaulted("--layers", &options->layers, "Layers").range(1, 1024);
    command.defaulted("--heads", &options->heads, "Query heads / kv heads");
    command.defaulted("--head-dim", &options->head_dim, "Head dimension").range(16, 576);
    add_scheme(command, options->scheme);
    command.defaulted("-t,--threads", &options->threads, "Threads").range(1, 1024);
    command.flag("--refcheck", &options->refcheck,
                 "Check one layer's output against a double-precision attention");
    command.option("--json", &options->json, "Write the figures to this file, a list");
    command.callback([options, &status] { status = bench_length(*options); });
}

}  // namespace lowkv::cli
