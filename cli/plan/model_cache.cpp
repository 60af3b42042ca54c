#include "plan/model_cache.h"

#include <algorithm>

#include "cache_size.h"
#include "common/terminal.h"
#include "lowkv/codec.h"
#include "settings.h"

namespace lowkv::cli {

namespace {

std::uint64_t most_tokens(const ModelShape& shape, std::size_t layer) {
    return layer < shape.sliding.size() && shape.sliding[layer] ? sliding_cells(shape.window)
                                                                : all_tokens;
}

// The bytes that the plug-in announces for one context's caches. It refuses a smaller budget.
double told_bytes(const ModelShape& shape, const Scheme& scheme, std::uint64_t context,
                  std::uint64_t conversations) {
    double sum = 0;
    for (std::uint32_t layer = 0; layer < shape.layers.size(); ++layer) {
        const std::uint32_t channels = shape.layers[layer].channels();
        if (channels == 0) continue;
        const std::uint64_t cells = std::min(context, conversations * most_tokens(shape, layer));
        for (const Part part : {Part::keys, Part::values}) {
            if (part == Part::values && shape.layers[layer].latent()) continue;
            sum += static_cast<double>(std::min<std::uint64_t>(
                ggml::packed_bytes(scheme, layer, part, channels, cells, conversations),
                std::uint64_t{2} * channels * cells));
        }
    }
    return sum;
}

}  // namespace

// Plans of equal layers are alike, so runs of them are counted together.
StoredCache packed_cache(const ModelShape& shape, const Scheme& scheme) {
    require_served(scheme, Host::llama_cpp);
    require_layers(scheme, static_cast<std::uint32_t>(shape.layers.size()));
    StoredCache cache;
    for (std::uint32_t layer = 0, end = 0; layer < shape.layers.size(); layer = end) {
        const Shape& first = shape.layers[layer];
        const LayerScheme& codecs = scheme.layer(layer);
        const std::uint64_t most = most_tokens(shape, layer);
        for (end = layer + 1; end < shape.layers.size() && shape.layers[end] == first &&
                              most_tokens(shape, end) == most && scheme.layer(end) == codecs;)
            ++end;
        if (first.kv_heads == 0) continue;
        const Plan plan = neutral_plan(codecs, first);
        cache.push_back(
            {.layers = end - layer,
             .numbers = first.numbers(),
             .block_tokens = plan.block_tokens(),
             .row_tokens = std::min(plan.block_tokens(), ggml::row_block_tokens(scheme)),
             .exact_bytes = static_cast<double>(plan.exact_bytes()),
             .packed_bytes = static_cast<double>(plan.packed_bytes()),
             .most_tokens = most,
             .retention = scheme.retention});
    }
    return cache;
}

StoredCache idealised_cache(const ModelShape& shape, double bits) {
    StoredCache cache;
    for (std::size_t layer = 0; layer < shape.layers.size(); ++layer)
        if (shape.layers[layer].kv_heads > 0)
            cache.push_back(
                idealised(1, shape.layers[layer].numbers(), bits, most_tokens(shape, layer)));
    return cache;
}

Budget budget_of(const ModelShape& shape, const std::string& size, const std::string& scheme,
                 const Demand& demand) {
    const Scheme end = parse_scheme(scheme);
    std::vector<LayerScheme> schemes = rungs_before(end, "LOWKV_BUDGET");
    schemes.insert(schemes.begin(), LayerScheme{});
    schemes.push_back(end.base);
    Budget budget{.bytes = static_cast<double>(parse_size(size, "LOWKV_BUDGET")),
                  .in_parts = std::ranges::find(shape.sliding, true) != shape.sliding.end(),
                  .rungs = {}};
    constexpr std::uint64_t padding = 256;  // llama.cpp's contexts are multiples of it
    const std::uint64_t most = most_that([&](std::uint64_t steps) {
        return static_cast<double>(demand.batch) *
                   told_bytes(shape, end, steps * padding, demand.conversations) <=
               budget.bytes;
    });
    const std::uint64_t longest = most == all_tokens ? most : most * padding;
    for (const LayerScheme& codecs : schemes) {
        const Scheme step{.base = codecs, .retention = end.retention, .overrides = {}};
        budget.rungs.push_back(
            {.scheme = std::string(preset_of(codecs)->name),
             .tokens = std::min(longest, longest_context(packed_cache(shape, step),
                                                         {.batch = demand.batch,
                                                          .conversations = demand.conversations},
                                                         budget.bytes))});
        if (budget.rungs.back().tokens == longest && !budget.in_parts) break;
    }
    return budget;
}

std::string text_of(const Budget& budget) {
    std::string text = "within " + bytes(budget.bytes) + " tokens stay unquantized";
    if (budget.in_parts) text += " (at most: sliding layers and the others have fixed parts of it)";
    for (const BudgetRung& rung : budget.rungs) {
        if (&rung != &budget.rungs.front()) text += ", then " + rung.scheme;
        text += " up to " + (rung.tokens == all_tokens ? "any length" : count(rung.tokens));
    }
    return text + "; longer contexts are refused";
}

}  // namespace lowkv::cli
