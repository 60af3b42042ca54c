// lowkv-bench encode: what packing a token costs, and reading one back, the schemes taking turns.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "bench.h"
#include "common/options.h"
#include "common/terminal.h"
#include "lowkv/codec.h"
#include "lowkv/implementation.h"
#include "nlohmann/json.hpp"

namespace lowkv::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* footer = R"(Examples:
  lowkv-bench encode
  lowkv-bench encode --head-dim 64 --kv-heads 3 --schemes lowkv2.8,kivi2 --threads 2

Blocks of f16 rows are packed as a cache packs them when they leave its window, and decoded as it does
to save a state. Microseconds are of one token of one layer, all kv heads, keys and values: times the
layers, and beside a token's time in a model, they are the share that packing takes. Schemes take turns;
figures are medians. Those that need a calibration get one that changes nothing.)";

struct Options {
    std::vector<std::uint32_t> head_dims = {64, 128};
    std::uint32_t kv_heads = 8, tokens = 2048, rounds = 9;
    unsigned threads = 1;
    std::vector<std::string> schemes = {"lowkv1.5", "lowkv2", "lowkv2.8", "lowkv3",
                                        "lowkv4",   "kivi2",  "kivi4",    "int8"};
    std::string json;
};

class Case {
  public:
    Case(const Options& options, std::uint32_t head_dim, const std::string& text)
        : name_(text),
          plan_(neutral_plan(parse_scheme(text).base,
                             {.kv_heads = options.kv_heads, .head_dim = head_dim})) {
        if (plan_.keys().exact() && plan_.values().exact())
            throw UsageError("--schemes " + text +
                             ": it packs nothing, so there is nothing to time");
        blocks_ = 1 + std::max(1u, options.tokens / plan_.block_tokens());
        const std::uint32_t tokens = plan_.block_tokens();
        const RandomTokens random({head_dim, options.kv_heads, options.kv_heads, options.tokens});
        const std::size_t channels = plan_.shape().channels(), numbers = channels * tokens;
        f16_.resize(blocks_ * plan_.f16_bytes());
        decoded_.resize(f16_.size());
        packed_.resize(blocks_ * plan_.packed_bytes());
        for (std::uint32_t b = 0; b < blocks_; ++b) {
            const KvRows rows = random.rows(b * tokens, tokens);
            auto* out = reinterpret_cast<ggml_fp16_t*>(f16_.data() + b * plan_.f16_bytes());
            for (std::size_t t = 0; t < tokens; ++t)
                for (std::size_t c = 0; c < channels; ++c)
                    out[c * tokens + t] = ggml_fp32_to_fp16(rows.keys[t * channels + c]);
            ggml_fp32_to_fp16_row(rows.values.data(), out + numbers,
                                  static_cast<std::int64_t>(numbers));
            if (!plan_.has_positions()) continue;
            auto* positions = reinterpret_cast<std::int32_t*>(out + 2 * numbers);
            for (std::uint32_t t = 0; t < tokens; ++t)
                positions[t] = static_cast<std::int32_t>(b * tokens + t);
        }
        encode(0, nullptr);
    }

    const std::string& name() const { return name_; }
    double bits() const { return plan_.bits_per_element(); }
    // The tokens that are timed. The first block is not: the others take its statistics.
    std::uint32_t tokens() const { return (blocks_ - 1) * plan_.block_tokens(); }

    void encode_all(unsigned threads) {
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(static)
        for (std::uint32_t b = 1; b < blocks_; ++b) encode(b, packed_.data());
    }
    void decode_all(unsigned threads) {
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(static)
        for (std::uint32_t b = 1; b < blocks_; ++b)
            decode_block(plan_, packed_.data() + b * plan_.packed_bytes(),
                         decoded_.data() + b * plan_.f16_bytes());
    }

  private:
    void encode(std::uint32_t block, const std::byte* leader) {
        const std::byte* from = f16_.data() + block * plan_.f16_bytes();
        std::byte* to = packed_.data() + block * plan_.packed_bytes();
        if (plan_.has_shared()) encode_shared(plan_, from, to);
        encode_block(plan_, from, to, 0, plan_.shape().kv_heads, {.stats_from = leader});
    }

    std::string name_;
    Plan plan_;
    std::uint32_t blocks_ = 0;
    std::vector<std::byte> f16_, decoded_, packed_;
};

// A row for each scheme.
Json measure(const Options& options, std::uint32_t head_dim) {
    std::vector<Case> cases;
    for (const std::string& scheme : options.schemes) cases.emplace_back(options, head_dim, scheme);
    std::vector<std::vector<double>> encoded(cases.size()), decoded(cases.size());
    Progress progress("head_dim " + std::to_string(head_dim));
    for (std::uint32_t round = 0; round <= options.rounds; ++round) {
        for (std::size_t i = 0; i < cases.size(); ++i) {
            const Stopwatch encoding;
            cases[i].encode_all(options.threads);
            const double packed = encoding.seconds();
            const Stopwatch decoding;
            cases[i].decode_all(options.threads);
            if (round == 0) continue;  // to warm up
            encoded[i].push_back(1e6 * packed / cases[i].tokens());
            decoded[i].push_back(1e6 * decoding.seconds() / cases[i].tokens());
        }
        progress.show(round, options.rounds);
    }
    Json found = Json::array();
    for (std::size_t i = 0; i < cases.size(); ++i) {
        found.push_back({{"scheme", cases[i].name()},
                         {"head_dim", head_dim},
                         {"kv_heads", options.kv_heads},
                         {"threads", options.threads},
                         {"bits", cases[i].bits()},
                         {"encode_us", median(encoded[i])},
                         {"decode_us", median(decoded[i])}});
    }
    return found;
}

int bench_encode(Options options) {
    read_schemes(options.schemes);
    require_writable(options.json);
    Table table({"scheme", "head_dim", "bits", "encode us", "ns a number", "decode us"});
    Json rows = Json::array();
    for (const std::uint32_t head_dim : options.head_dims) {
        for (const Json& found : measure(options, head_dim)) {
            const double numbers = 2.0 * options.kv_heads * head_dim, encode = found["encode_us"];
            table.add({found["scheme"], std::to_string(head_dim), fixed(found["bits"], 2),
                       fixed(encode, 2), fixed(1e3 * encode / numbers, 2),
                       fixed(found["decode_us"], 2)});
            rows.push_back(found);
        }
    }
    show(table.text() + "\nus: of a token of one layer with " + std::to_string(options.kv_heads) +
         " kv heads; " + plural(options.threads, "thread") + ", implementation " +
         std::string(active_implementation().name) + "\n");
    write_file(options.json, rows.dump(1) + "\n");
    return 0;
}

}  // namespace

void add_encode(Command app, int& status) {
    auto options = std::make_shared<Options>();
    Command command =
        app.add_command("encode", "What packing a token costs, and reading one back", footer);
    command.defaulted("--head-dim", &options->head_dims, "Head dimensions", {range(16, 576)});
    command.defaulted("--kv-heads", &options->kv_heads, "Kv heads", {range(1, 256)});
    command.defaulted("--tokens", &options->tokens, "Tokens that are packed at once",
                      {range(1, 1048576)});
    command.defaulted("-t,--threads", &options->threads, "Threads", {range(1, 1024)});
    command.defaulted("-s,--schemes", &options->schemes, "Schemes, + for the comma within one");
    command.defaulted("--rounds", &options->rounds, "Rounds in which the schemes take turns",
                      {range(1, 1000)});
    command.option("--json", &options->json, "Write the figures to this file, a list");
    command.callback([options, &status] { status = bench_encode(*options); });
}

}  // namespace lowkv::cli
