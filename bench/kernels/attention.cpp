// lowkv-bench attention: our fused attention against ggml's FLASH_ATTN_EXT, in one process, the
// cases taking turns on cold caches, beside the floor that memory sets.

#include <omp.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench.h"
#include "common/app.h"
#include "common/machine.h"
#include "common/model.h"
#include "common/options.h"
#include "common/terminal.h"
#include "devices/names.h"
#include "lowkv/implementation.h"
#include "nlohmann/json.hpp"

namespace lowkv::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* footer = R"(Examples:
  lowkv-bench attention --head-dim 128 --heads 32/8 --tokens 4096,16384 --schemes lowkv2.8,kivi2
  lowkv-bench attention --head-dim 128 --heads 32/8 --tokens 16384 --threads 2 --schemes kivi2
  lowkv-bench attention --op decode --json attention.json
  lowkv-bench attention --op decode --queries 1,2,4,8,16 --tokens 4096
  lowkv-bench attention --schemes kivi2,kivi2+window=256
  lowkv-bench attention --device opencl --schemes kivi2 --tokens 4096

Schemes are separated by commas, so within a spelled-out scheme write + for the comma.

decode: one query token, or --queries of them, as guesses are verified. prefill: 512 query tokens at that depth.
Before each repetition a buffer larger than the processor's caches is read, so that the cache comes from memory, as
between a model's layers; figures are medians. floor = bytes / measured read bandwidth of the machine's memory,
also where our caches are on another device.)";

constexpr std::uint32_t prefill_queries = 512, probe_queries = 64;

struct Options {
    std::vector<std::uint32_t> head_dims = {64, 128}, tokens = {1024, 4096, 16384, 65536},
                               queries = {1};
    std::vector<unsigned> threads = {1, 2};
    std::vector<std::string> heads = {"32/8", "9/3"},
                             schemes = {"lowkv2.8", "lowkv2", "lowkv4", "kivi2",
                                        "kivi4",    "int8",   "exact"},
                             peers = {"f16", "q8_0", "q4_0"}, ops = {"decode", "prefill"};
    std::string json, device = "cpu";
    double budget = 0.5;
};

// {query heads, kv heads} of "32/8". Throws UsageError.
std::pair<std::uint32_t, std::uint32_t> read_heads(const std::string& text) {
    std::uint32_t q = 0, kv = 0;
    const char* end = text.data() + text.size();
    const auto [slash, bad] = std::from_chars(text.data(), end, q);
    const bool split = bad == std::errc{} && slash != end && *slash == '/';
    if (!split || std::from_chars(slash + 1, end, kv).ptr != end || kv == 0 || q == 0 ||
        q % kv != 0) {
        throw UsageError("--heads " + text +
                         ": query heads / kv heads, the first a multiple of the second, e.g. 32/8");
    }
    return {q, kv};
}

std::vector<AttentionShape> shapes_of(const Options& options) {
    std::vector<AttentionShape> shapes;
    for (const std::uint32_t head_dim : options.head_dims) {
        for (const std::string& heads : options.heads) {
            const auto [q_heads, kv_heads] = read_heads(heads);
            for (const std::uint32_t tokens : options.tokens)
                shapes.push_back({head_dim, q_heads, kv_heads, tokens});
        }
    }
    return shapes;
}

class Bench {
  public:
    explicit Bench(const Options& options)
        : options_(options),
          device_(device_by_name(options.device)),
          reader_(bandwidth_bytes()),
          evictor_(2 * last_level_cache()) {
        for (const unsigned threads : options.threads)
            bandwidth_[threads] = reader_.bandwidth(threads);
    }

    void shape(const AttentionShape& shape) {
        std::vector<std::unique_ptr<AttentionCase>> cases;
        for (const std::string& scheme : options_.schemes)
            cases.push_back(make_lowkv_case(shape, scheme, std::make_shared<Store>(0, device_)));
        for (const std::string& peer : options_.peers)
            cases.push_back(make_ggml_case(shape, cache_type("--peers", peer)));
        const RandomTokens random(shape);
        // The prompt's last chunk attends before it is packed: prefill is measured in that state.
        const std::uint32_t last = std::min(prefill_queries, shape.tokens / 2);
        fill(cases, random, 0, shape.tokens - last);
        for (auto& item : cases) item->pack();
        fill(cases, random, shape.tokens - last, shape.tokens);
        if (wants("prefill")) {
            measure("prefill", shape, cases, make_queries(shape, random, last),
                    make_queries(shape, random, std::min(probe_queries, last)));
        }
        for (auto& item : cases) item->pack();
        if (!wants("decode")) return;
        for (const std::uint32_t count : options_.queries) {
            const Queries queries = make_queries(shape, random, std::min(count, last));
            measure(count == 1 ? "decode" : "decode " + std::to_string(queries.count), shape, cases,
                    queries, queries);
        }
    }

    const Json& found() const { return found_; }

    // The text below the table.
    std::string notes() const {
        std::string text = "device " + std::string(device_->name()) + ", implementation " +
                           std::string(active_implementation().name) + ", ggml " + ggml_version() +
                           "; read bandwidth";
        for (const auto& [threads, value] : bandwidth_) {
            text += " " + fixed(value / 1e9, 1) + " GB/s with " + plural(threads, "thread") +
                    (threads == bandwidth_.rbegin()->first ? "" : ",");
        }
        text += "; cold data: " + bytes(evictor_.bytes()) + " read before each repetition.\n";
        return text;
    }

  private:
    using Cases = std::vector<std::unique_ptr<AttentionCase>>;

    bool wants(const char* op) const {
        return std::ranges::find(options_.ops, op) != options_.ops.end();
    }

    static void fill(Cases& cases, const RandomTokens& random, std::uint32_t from,
                     std::uint32_t to) {
        constexpr std::uint32_t piece = 256;
        for (std::uint32_t at = from; at < to; at += piece) {
            const KvRows rows = random.rows(at, std::min(piece, to - at));
            for (auto& item : cases) {
                item->append(rows);
                // Packing as we go bounds the memory; the last chunk stays exact for prefill.
                if (from == 0) item->pack();
            }
        }
    }

    double time(AttentionCase& item, unsigned threads) {
        evictor_.read(threads);
        const Stopwatch watch;
        item.attend();
        return watch.seconds();
    }

    void measure(const std::string& op, const AttentionShape& shape, Cases& cases,
                 const Queries& queries, const Queries& probe) {
        for (const unsigned threads : options_.threads) {
            std::vector<std::size_t> repetitions(cases.size());
            std::vector<std::vector<double>> seconds(cases.size());
            for (std::size_t c = 0; c < cases.size(); ++c) {
                AttentionCase& item = *cases[c];
                item.prepare(probe, threads);
                item.attend();
                const double estimate = time(item, threads) * queries.count / probe.count;
                const double wish = options_.budget / std::max(estimate, 1e-6);
                repetitions[c] = static_cast<std::size_t>(std::clamp(wish, 3.0, 31.0));
                item.prepare(queries, threads);
            }
            const std::size_t rounds = std::ranges::max(repetitions);
            for (std::size_t round = 0; round < rounds; ++round) {
                for (std::size_t c = 0; c < cases.size(); ++c)
                    if (round < repetitions[c]) seconds[c].push_back(time(*cases[c], threads));
            }
            for (std::size_t c = 0; c < cases.size(); ++c) {
                const std::size_t size = cases[c]->bytes();
                const std::string scheme = cases[c]->name();
                found_.emplace_back(
                    Json{{"op", op},
                         {"head_dim", shape.head_dim},
                         {"q_heads", shape.q_heads},
                         {"kv_heads", shape.kv_heads},
                         {"tokens", shape.tokens},
                         {"threads", threads},
                         {"scheme", scheme},
                         {"device", scheme.starts_with("ggml-") ? "cpu" : device_->name()},
                         {"ms", 1e3 * median(seconds[c])},
                         {"floor_ms", 1e3 * static_cast<double>(size) / bandwidth_[threads]},
                         {"bytes", size}});
            }
        }
    }

    Options options_;
    std::shared_ptr<Device> device_;
    MemoryReader reader_, evictor_;
    std::map<unsigned, double> bandwidth_;
    Json found_ = Json::array();  // a row for each measurement
};

std::string table(const Json& found) {
    Table table(
        {"op", "head_dim", "heads", "tokens", "threads", "scheme", "ms", "floor ms", "% of floor"});
    for (const Json& m : found) {
        const double ms = m["ms"], floor_ms = m["floor_ms"];
        table.add({m["op"], m["head_dim"].dump(), m["q_heads"].dump() + "/" + m["kv_heads"].dump(),
                   count(m["tokens"]), m["threads"].dump(), m["scheme"], fixed(ms, 3),
                   fixed(floor_ms, 3), fixed(100 * floor_ms / ms, 1)});
    }
    return table.text();
}

// Refuses a shape whose caches, all at once and not packed yet, don't fit.
void require_caches(const Options& options, const AttentionShape& shape) {
    const auto cases = static_cast<double>(options.schemes.size() + options.peers.size());
    const double dim = shape.head_dim;
    const double caches = cases * shape.tokens * shape.kv_heads * dim * 2 * sizeof(ggml_fp16_t);
    const double queries = prefill_queries * (cases + 1) * shape.q_heads * dim * sizeof(float);
    const double masks = 1.0 * prefill_queries * shape.tokens * sizeof(ggml_fp16_t);
    const auto free = static_cast<double>(available_memory());
    if (free > 0 && caches + queries + masks > free)
        throw Failure("heads " + shape.heads() + ", " + count(shape.tokens) + " tokens need " +
                      bytes(caches + queries + masks) + " for all caches at once, and " +
                      bytes(free) + " are available: use fewer --tokens, --schemes or --peers");
}

int bench_attention(Options options) {
    for (const std::string& peer : options.peers) static_cast<void>(cache_type("--peers", peer));
    read_schemes(options.schemes);
    const std::vector<AttentionShape> shapes = shapes_of(options);
    for (const unsigned threads : options.threads) {
        if (threads <= static_cast<unsigned>(omp_get_num_procs())) continue;
        std::fprintf(stderr, "lowkv: %u threads on %d processors: they will wait for each other\n",
                     threads, omp_get_num_procs());
    }
    require_writable(options.json);
    for (const AttentionShape& shape : shapes) require_caches(options, shape);
    Bench bench(options);
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        std::fprintf(stderr, "%zu / %zu\n", i + 1, shapes.size());
        bench.shape(shapes[i]);
    }
    show(table(bench.found()) + "\n" + bench.notes());
    write_file(options.json, bench.found().dump(1) + "\n");
    return 0;
}

}  // namespace

void add_attention(Command app, int& status) {
    auto options = std::make_shared<Options>();
    Command command = app.add_command(
        "attention", "Our attention against ggml's, and against the memory's floor", footer);
    command.defaulted("--head-dim", &options->head_dims, "Head dimensions", {range(16, 576)});
    command.defaulted("--heads", &options->heads, "Query heads / kv heads");
    command.defaulted("--tokens", &options->tokens, "Tokens in the cache", {range(2, 16777216)});
    command.defaulted("--queries", &options->queries, "Query tokens of a decode step",
                      {range(1, 512)});
    command.defaulted("-t,--threads", &options->threads, "Threads", {range(1, 1024)});
    command.defaulted("-s,--schemes", &options->schemes, "Our schemes");
    command.defaulted("--device", &options->device,
                      "Where our caches are; lowkv doctor lists what there is");
    command.defaulted("--peers", &options->peers, "ggml's cache types; none: leave them out");
    command.defaulted("--op", &options->ops, "decode, prefill", {one_of({"decode", "prefill"})});
    command.option("--json", &options->json, "Write the figures to this file, a list");
    command.callback([options, &status] {
        std::erase(options->peers, "none");
        if (options->peers.empty() && options->schemes.empty())
            throw UsageError("nothing to measure");
        status = bench_attention(*options);
    });
}

}  // namespace lowkv::cli
