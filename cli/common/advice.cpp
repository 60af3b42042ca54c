#include "common/advice.h"

#include <algorithm>

#include "common/terminal.h"

namespace lowkv::cli {

namespace {

// What a scheme loses depends on the keys: the first rule that applies chooses it.
struct Rule {
    bool (*applies)(const ModelShape& shape);
    const char* scheme;
    const char* measured_on;
    const char* keys;    // what this model has in common with that one
    const char* losses;  // mean KLD from `exact`, 2,048 tokens of prose
};
constexpr Rule rules[] = {
    {[](const ModelShape& shape) { return std::ranges::any_of(shape.layers, &Shape::latent); },
     "lowkv2.8", "SmolLM2 135M written with latent rows", "Multi-head latent attention",
     "rows of 3.4 bits, which lowkv1.5 to lowkv3 all have, .0014 to .0026, stock q4_0 .0045 to "
     ".038 (1,024 tokens)"},
    {[](const ModelShape& shape) { return shape.key_bias >= large_key_bias; }, "lowkv2.8",
     "SmolLM2 135M with biases of Qwen2.5's size", "Keys with large biases",
     "lowkv2.8 .0015, lowkv4 .0004, lowkv2 .0030, as without biases; keys with one scale per token "
     "lose much (stock q4_0 .106 for .033 without, turboquant4 .041 for .002)"},
    {[](const ModelShape& shape) { return shape.key_norms; }, "lowkv2.8", "Gemma 3 270M",
     "Normed keys",
     "lowkv2.8 .0026, lowkv4 .0005, lowkv2 .0047; keys with one scale per token lose more (stock "
     "q4_0 .073)"},
    {[](const ModelShape&) { return true; }, "lowkv2.8", "SmolLM2 135M",
     "Keys without norms or large biases",
     "lowkv2.8 .0015, lowkv4 .0003, lowkv2 .0033, stock q4_0 .033"},
};

// Layers whose cache grows with the text.
std::size_t growing(const ModelShape& shape) {
    std::size_t layers = 0;
    for (std::size_t i = 0; i < shape.layers.size(); ++i)
        layers += shape.layers[i].kv_heads > 0 && !(i < shape.sliding.size() && shape.sliding[i]);
    return layers;
}

}  // namespace

Advice advise(const ModelShape& shape) {
    const Rule& rule =
        *std::ranges::find_if(rules, [&](const Rule& r) { return r.applies(shape); });
    Advice advice{.scheme = rule.scheme, .measured_on = rule.measured_on, .lines = {}};
    std::string keys = rule.keys;
    if (shape.key_bias >= large_key_bias) keys += ", of " + fixed(shape.key_bias, 0) + " a head";
    advice.lines.push_back(advice.scheme + ". " + keys + ": measured on " + advice.measured_on +
                           ", reckoned for other models. Mean KLD there: " + rule.losses + ".");
    if (const std::size_t layers = growing(shape); 2 * layers <= shape.layers.size())
        advice.lines.push_back(
            "Only " + count(layers) + " of " + count(shape.layers.size()) +
            " layers grow with the text, so there is less to win: Gemma 3 270M, where 3 of 18 do, "
            "decodes 1.1 times as fast as stock f16 at 4,096 tokens and 1.3 times at 16,384.");
    return advice;
}

}  // namespace lowkv::cli
