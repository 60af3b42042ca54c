#include "compare/report.h"

#include "common/terminal.h"
#include "nlohmann/json.hpp"

namespace lowkv::cli {

namespace {

using Json = nlohmann::ordered_json;

double change(const Comparison& comparison, const ComparedRow& row) {
    return 100 * (row.perplexity / comparison.rows.front().perplexity - 1);
}

}  // namespace

Table comparison_table() {
    return Table({"cache", "mean KLD", "99.9 % KLD", "same top-1 %", "perplexity", "change %",
                  "KV MiB", "smaller", "prefill t/s", "decode t/s"});
}

std::vector<std::string> cells(const Comparison& comparison, const ComparedRow& row) {
    const bool reference = &row == &comparison.rows.front();
    const auto rate = [](double value) { return value > 0 ? fixed(value, 1) : std::string("-"); };
    return {row.name,
            reference ? "reference" : divergence(row.kld.mean),
            reference ? "" : divergence(row.kld_999),
            reference ? "" : fixed(100 * row.same_top, 1),
            fixed(row.perplexity, 3),
            reference ? "" : signed_fixed(change(comparison, row), 2),
            mebibytes(row.cache_bytes),
            fixed(row.compression, 2) + "x",
            rate(row.prefill_rate),
            rate(row.decode_rate)};
}

std::string notes(const Comparison& comparison) {
    const CompareOptions& options = comparison.options;
    std::string text =
        "KLD, top-1 and perplexity change: against the scheme exact, over " +
        count(comparison.positions) + " positions (" + plural(options.windows, "window") + " of " +
        count(options.tokens) + " tokens, the first " + count(options.skip) +
        " not counted; chunks of " + count(options.chunk) +
        "; a token sees its own chunk exactly, as when an engine prefills, so a smaller --chunk "
        "shows larger losses). KV MiB: held for " +
        count(options.tokens) +
        " tokens, exact window and metadata included; lowkv's by its own count, stock ones by "
        "llama_state_seq_get_size.";
    if (options.decode > 0) {
        text += " Speed: prefill without logits over the first window; decode the median of " +
                count(options.decode) + " tokens at its end; caches took turns, " +
                plural(options.threads, "thread") + ".";
    }
    text += "\n";
    for (const ComparedRow& row : comparison.rows)
        if (row.idle)
            text += "NOTE " + row.name +
                    ": nothing was packed yet when the last chunk was read, so its figures are "
                    "exact's: a longer text (--tokens) is needed, or a smaller --chunk.\n";
    return text;
}

std::string summary(const Comparison& comparison) {
    const ComparedRow* best = nullptr;      // the smallest of ours within 1 % of exact's perplexity
    const ComparedRow* smallest = nullptr;  // of ours
    const ComparedRow* stock = nullptr;     // f16
    for (const ComparedRow& row : comparison.rows) {
        if (row.name == "stock f16") stock = &row;
        if (row.stock || row.idle || &row == &comparison.rows.front()) continue;
        if (smallest == nullptr || row.cache_bytes < smallest->cache_bytes) smallest = &row;
        if (!(change(comparison, row) <= 1)) continue;  // NaN is no trade
        if (best == nullptr || row.cache_bytes < best->cache_bytes) best = &row;
    }
    if (smallest == nullptr) return "";
    const auto say = [&](const ComparedRow& row) {
        std::string text = row.name + " holds the text in " + mebibytes(row.cache_bytes) +
                           " MiB, " + fixed(row.compression, 1) + " times less than f16, at " +
                           signed_fixed(change(comparison, row), 2) + " % perplexity";
        if (stock != nullptr && stock->decode_rate > 0 && row.decode_rate > 0) {
            text += ", and decodes at " + fixed(row.decode_rate / stock->decode_rate, 2) +
                    " times stock f16's speed";
        }
        return text;
    };
    if (best == nullptr) {
        return "No scheme here stays within 1 % of exact's perplexity; the smallest, " +
               say(*smallest) + ".\n";
    }
    std::string text = "Best trade: " + say(*best);
    if (smallest != best) {
        text += "; the smallest, " + smallest->name + ", is " + fixed(smallest->compression, 1) +
                " times smaller than f16 at " + signed_fixed(change(comparison, *smallest), 2) +
                " %";
    }
    return text + ".\n";
}

std::string json(const Comparison& comparison) {
    const CompareOptions& options = comparison.options;
    Json rows = Json::array();
    for (const ComparedRow& row : comparison.rows) {
        rows.push_back({{"scheme", row.name},
                        {"kind", row.stock ? "stock" : "lowkv"},
                        {"reference", &row == &comparison.rows.front()},
                        {"nothing_packed", row.idle},
                        {"mean_kld", row.kld.mean},
                        {"mean_kld_error", row.kld.error},
                        {"kld_p999", row.kld_999},
                        {"same_top1", row.same_top},
                        {"perplexity", row.perplexity},
                        {"perplexity_change_percent", change(comparison, row)},
                        {"kv_bytes", row.cache_bytes},
                        {"kv_bytes_source", row.stock ? "llama_state_seq_get_size" : "lowkv"},
                        {"kv_bytes_per_token", row.bytes_per_token},
                        {"compression", row.compression},
                        {"prefill_tokens_per_s", row.prefill_rate},
                        {"decode_tokens_per_s", row.decode_rate}});
        if (!row.klds.empty()) rows.back()["klds"] = row.klds;
    }
    const Json out = {{"model", comparison.model},  {"model_path", options.model},
                      {"text", options.file},       {"tokens", options.tokens},
                      {"windows", options.windows}, {"chunk", options.chunk},
                      {"skip", options.skip},       {"positions", comparison.positions},
                      {"cached", options.tokens},   {"decoded", options.decode},
                      {"threads", options.threads}, {"rows", rows}};
    return out.dump(2) + "\n";
}

}  // namespace lowkv::cli
