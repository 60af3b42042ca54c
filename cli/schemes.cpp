// lowkv schemes: what can be stored, in words and in bits.

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "app.h"
#include "lowkv/calibration.h"
#include "lowkv/codec.h"
#include "lowkv/scheme.h"
#include "scheme_quality.h"
#include "scheme_words.h"
#include "terminal.h"

namespace lowkv::cli {

namespace {

constexpr const char* footer = R"(Examples:
  lowkv schemes
  lowkv schemes lowkv2.8
  lowkv schemes kivi2,layer.0-1=kivi4
  lowkv schemes "k=token-3-head-normal-hadamard-mean,v=token-2-g32-fp8,window=64")";

// What quality is measured against.
constexpr std::string_view reference = "exact";

constexpr const char* grammar = R"(
A scheme is a preset, options, or a preset and what differs from it, separated by commas:

  k=CODEC        how keys are stored once packed
  v=CODEC        how values are stored once packed
  window=N       the newest N tokens stay exact
  sinks=N        the first N tokens stay exact
  flush=N        tokens leave the window N at a time (0: a block at a time)
  layer.A=...    another preset, or KEY-CODEC/VALUE-CODEC, for layer A; layer.A-B for A to B; the
                 last one that names a layer wins
  filter=RULE    heavy (by the attention they got) or random: which tokens that leave the window
  keep=P%        stay exact, and which
  evict=P%       are dropped. Only the C++ library can (lowkv/filter.h): llama.cpp and transformers
                 decide themselves which tokens they hold

  CODEC          exact, or AXIS-BITS-GROUP and any of the words below behind it, in their order
  AXIS           channel: GROUP tokens of one channel share a scale
                 token: GROUP channels of one token share a scale
  BITS           1.5 (three levels, five codes to a byte), 2, 2.6 (six levels, three codes to
                 a byte: 8/3 bits), 3, 4, 8
  GROUP          g32, g64, g128; with token also head: all channels of a head, and row: those of
                 all kv heads; with channel also static: a calibrated range

Words for token codecs only:
  -normal        normal (Lloyd-Max) levels times a norm, not a scale and a zero; up to 4 bits
  -hadamard      a Hadamard rotation of each head comes first
  -random        or a random orthogonal matrix, another one in each layer
  -mean          keys only: each block's mean per channel is subtracted and stored apart
  -unbiased      with normal: a scale that keeps products unbiased, not the norm
  -lsq           with normal: the scale of the least squared error
  -reorder       groups of like channels of all heads (SKVQ; calibrated)
  -clip          with reorder: a calibrated share of each group's range
Words for every codec:
  -varnorm       tokens and channels scaled to one variance (KVarN); channel-...-g128 for keys,
                 token-...-head for values
  -search        the share of each group's range with the least squared error
  -fp8           8-bit scales, zeros and norms
Words for row and static, KVQuant's (calibrated):
  -learned       levels learned from a text
  -0.5% -1% -2%  so many outliers of a token are kept beside, in 16 bits
  -pre           keys before their rotary embedding; with reorder too

`lowkv schemes SCHEME` explains one.
)";

// One line of an explanation, and those that it runs on to.
void line(std::string_view label, std::string_view text) {
    constexpr std::size_t indent = 11;
    std::string first = "  " + std::string(label);
    first.resize(indent, ' ');
    std::fputs(wrapped(first, text, indent).c_str(), stdout);
}

// The bits of a layer scheme at a head dimension.
double bits(const LayerScheme& scheme, std::uint32_t head_dim) {
    return neutral_plan(scheme, {.kv_heads = 8, .head_dim = head_dim}).bits_per_element();
}

void explain_half(std::string_view label, const Codec& codec, Half half) {
    line(label, in_words(codec));
    if (codec.exact()) return;
    const Formulas arithmetic = formulas(codec, half);
    line("", "store: " + arithmetic.store);
    line("", "read:  " + arithmetic.read);
}

void explain_layer(const LayerScheme& scheme) {
    explain_half("keys", scheme.key, Half::keys);
    explain_half("values", scheme.value, Half::values);
}

void explain_retention(const Retention& retention, std::uint32_t block) {
    line("window", "the newest " + std::to_string(retention.window) + " tokens stay exact; " +
                       (retention.flush > 0
                            ? "they leave it " + std::to_string(retention.flush) + " at a time"
                            : "older ones are packed in blocks of " + std::to_string(block)));
    line("sinks", retention.sinks > 0 ? "the first " + std::to_string(retention.sinks) +
                                            " tokens stay exact (with their block)"
                                      : "none: the first tokens are packed like all others");
    if (retention.filter == Filter::none) return;
    line("filter", "of the tokens that leave the window, " + std::to_string(retention.keep) +
                       "% stay exact and " + std::to_string(retention.evict) + "% are dropped,");
    line("", std::string(retention.filter == Filter::heavy ? "by the attention they got; "
                                                           : "chosen at random (a control); ") +
                 "only in the C++ library (lowkv/filter.h): llama.cpp and transformers decide "
                 "themselves which tokens they hold");
}

// The preset whose codecs these are.
const Preset* preset_of(const LayerScheme& base) {
    const auto found =
        std::ranges::find(presets(), base, [](const Preset& preset) { return preset.scheme.base; });
    return found == presets().end() ? nullptr : &*found;
}

void explain_quality(const std::string& name, bool filtered) {
    if (name == reference) return line("quality", "what the others are measured against");
    if (const Quality* quality = find_quality(name)) {
        line("quality", "mean KLD " + std::string(quality->mean_kld) + ", perplexity " +
                            std::string(quality->perplexity) + " against the exact cache");
        line("", quality_protocol);
        line("", quality_floor);
        return line("", "from docs/quality.md, measured by `make quality`");
    }
    if (filtered) return line("quality", "not measured");
    std::string argument = name;
    std::ranges::replace(argument, ',', '+');
    line("quality", "known of presets only (docs/quality.md has more); measure it with");
    line("", "lowkv compare -m model.gguf -f text.txt --schemes \"exact," + argument + "\"");
}

// Bytes of one token of all layers, once packed.
double packed_bytes(const Scheme& scheme, std::uint32_t layers, const Shape& shape) {
    double sum = 0;
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
        const Plan plan = neutral_plan(scheme.layer(layer), shape);
        sum += static_cast<double>(plan.packed_bytes()) / plan.block_tokens();
    }
    return sum;
}

void explain(const std::string& text) {
    const Scheme scheme = parse_scheme(text);
    const std::string name = to_string(scheme);
    const Preset* preset = preset_of(scheme.base);
    std::printf("%s%s\n", name.c_str(), name == default_scheme ? " (the default)" : "");
    if (preset && preset->name == name) line("use", preset->summary);
    line("source", preset ? preset->source : "none: no preset stores keys and values like this");
    explain_quality(name, scheme.retention.filter != Filter::none);
    line("data", scheme.needs_calibration()
                     ? "a calibration of the model, made once with lowkv calibrate"
                     : "no calibration: nothing is learned from a text beforehand");
    std::printf("\n");
    explain_layer(scheme.base);
    explain_retention(scheme.retention, block_tokens(scheme.base));
    for (const LayerOverride& other : scheme.overrides) {
        if (other.first == other.last) {
            std::printf("Layer %u:\n", other.first);
        } else {
            std::printf("Layers %u to %u:\n", other.first, other.last);
        }
        explain_layer(other.scheme);
    }

    std::printf("\nBits per number, with all scales, zeros, norms and means%s:\n",
                scheme.base.key.by_row() || scheme.base.value.by_row() ? ", at 8 kv heads" : "");
    Table table({"head_dim", "keys", "values", "both"});
    for (const std::uint32_t head_dim : {64U, 80U, 96U, 128U, 256U}) {
        const Plan plan = neutral_plan(scheme.base, {.kv_heads = 8, .head_dim = head_dim});
        table.add({std::to_string(head_dim), fixed(plan.key_bits(), 2), fixed(plan.value_bits(), 2),
                   fixed(plan.bits_per_element(), 2)});
    }
    std::printf("%s\nA token of all layers, once packed:\n", table.text().c_str());
    struct Example {
        const char* name;
        std::uint32_t layers;
        Shape shape;
    };
    Table examples({"shape", "f16", "packed", "smaller", "32k tokens: f16", "packed"});
    for (const Example& example :
         {Example{"30 layers, 3 kv heads of 64 (SmolLM2-135M)", 30, {3, 64}},
          Example{"32 layers, 8 kv heads of 128 (Llama-3-8B)", 32, {8, 128}}}) {
        const double f16 = 4.0 * example.layers * example.shape.channels();
        const double packed = packed_bytes(scheme, example.layers, example.shape);
        examples.add({example.name, bytes(f16), bytes(packed), fixed(f16 / packed, 2) + "x",
                      bytes(f16 * 32768), bytes(packed * 32768)});
    }
    std::printf("%s", examples.text().c_str());
}

void list_figures() {
    Table table(
        {"scheme", "bits at head_dim 64", "at 128", "smaller at 128", "mean KLD", "perplexity"});
    for (const Preset& preset : presets()) {
        const LayerScheme& base = preset.scheme.base;
        const Quality* quality = find_quality(preset.name);
        std::string kld = preset.name == reference ? "reference" : "-", perplexity = "-";
        if (quality) {
            kld = quality->mean_kld;
            perplexity = quality->perplexity;
        }
        table.add({std::string(preset.name), fixed(bits(base, 64), 2), fixed(bits(base, 128), 2),
                   fixed(16 / bits(base, 128), 2) + "x", kld, perplexity});
    }
    std::printf("%s\n", table.text().c_str());
    const std::string origin = "Mean KLD and perplexity change, against the exact cache: " +
                               std::string(quality_protocol) +
                               " (docs/quality.md, `make quality`). \"-\" was not measured; " +
                               std::string(quality_floor) + ".";
    std::fputs(wrapped("", origin, 0).c_str(), stdout);
}

void list() {
    list_figures();
    std::printf("\nWhat each is for:\n");
    std::size_t longest = 0;
    for (const Preset& preset : presets()) longest = std::max(longest, preset.name.size());
    for (const Preset& preset : presets()) {
        std::string first = "  " + std::string(preset.name);
        first.resize(longest + 4, ' ');
        if (preset.name == default_scheme) first += "(the default) ";
        std::printf("%s%s\n", first.c_str(), std::string(preset.summary).c_str());
    }
    std::printf("The default serves where neither --scheme nor LOWKV_SCHEME names another.\n");
    std::fputs(grammar, stdout);
}

}  // namespace

void read_schemes(std::vector<std::string>& schemes) {
    for (std::string& scheme : schemes) {
        std::replace(scheme.begin(), scheme.end(), '+', ',');
        static_cast<void>(parse_scheme(scheme));
    }
}

void add_schemes(CLI::App& app, int& status) {
    auto scheme = std::make_shared<std::string>();
    CLI::App* command = app.add_subcommand("schemes", "What can be stored, in words and in bits");
    command->footer(footer);
    command->add_option("scheme", *scheme, "Explain this one; without it, list the presets");
    command->callback([scheme, &status] {
        if (scheme->empty()) {
            list();
        } else {
            explain(*scheme);
        }
        status = 0;
    });
}

}  // namespace lowkv::cli
