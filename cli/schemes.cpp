// lowkv schemes: what can be stored, in words and in bits.

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <string>

#include "app.h"
#include "lowkv/codec.h"
#include "lowkv/scheme.h"
#include "terminal.h"

namespace lowkv::cli {

namespace {

constexpr const char* footer = R"(Examples:
  lowkv schemes
  lowkv schemes kivi2
  lowkv schemes "k=channel-3-g64,v=token-2-g32-fp8,window=64"
  lowkv schemes kivi2,layer.0-1=kivi4)";

constexpr const char* grammar = R"(
A scheme is a preset, options, or a preset and what differs from it, separated by commas:

  k=CODEC        how keys are stored once packed
  v=CODEC        how values are stored once packed
  window=N       the newest N tokens stay exact
  sinks=N        the first N tokens stay exact
  flush=N        tokens leave the window N at a time (0: a block at a time)
  layer.A=...    another preset, or KEY-CODEC/VALUE-CODEC, for layer A; layer.A-B for layers A to B

  CODEC          exact, or AXIS-BITS-gGROUP, and -fp8 behind it for 8-bit scales and zeros
  AXIS           channel: one channel of GROUP tokens shares a scale; token: GROUP channels of one token
  BITS           2, 3, 4, 8
  GROUP          32, 64, 128

`lowkv schemes SCHEME` explains one.
)";

// The bits of a layer scheme at a head dimension.
double bits(const LayerScheme& scheme, std::uint32_t head_dim) {
    return Plan(scheme, {.kv_heads = 8, .head_dim = head_dim}).bits_per_element();
}

std::string in_words(const Codec& codec) {
    if (codec.exact()) return "exact: f16, as they come";
    const std::string group = std::to_string(codec.group);
    const std::string shared =
        codec.axis == Axis::channel
            ? "of one channel over " + group + " consecutive tokens"
            : "of one token over " + group + " consecutive channels of a head";
    return std::to_string(codec.bits) + " bits a number; the numbers " + shared +
           " share a scale and a zero (" +
           (codec.metadata == Metadata::fp16 ? "16 bits each" : "8 bits each") + ")";
}

void explain_layer(const LayerScheme& scheme) {
    std::printf("  keys    %s\n  values  %s\n", in_words(scheme.key).c_str(),
                in_words(scheme.value).c_str());
}

void explain_retention(const Retention& retention, std::uint32_t block) {
    std::printf("  window  the newest %u tokens stay exact", retention.window);
    if (retention.flush > 0) {
        std::printf("; they leave it %u at a time\n", retention.flush);
    } else {
        std::printf("; older ones are packed in blocks of %u\n", block);
    }
    if (retention.sinks > 0) {
        std::printf("  sinks   the first %u tokens stay exact (with their block)\n",
                    retention.sinks);
    } else {
        std::printf("  sinks   none: the first tokens are packed like all others\n");
    }
}

// Bytes of one token of all layers, once packed.
double packed_bytes(const Scheme& scheme, std::uint32_t layers, const Shape& shape) {
    double sum = 0;
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
        const Plan plan(scheme.layer(layer), shape);
        sum += static_cast<double>(plan.packed_bytes()) / plan.block_tokens();
    }
    return sum;
}

void explain(const std::string& text) {
    const Scheme scheme = parse_scheme(text);
    std::printf("%s\n", to_string(scheme).c_str());
    for (const Preset& preset : presets()) {
        if (preset.name == to_string(scheme))
            std::printf("  %s\n", std::string(preset.summary).c_str());
    }
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

    std::printf("\nBits per number, scales and zeros included:\n");
    Table table({"head_dim", "keys", "values", "both"});
    for (const std::uint32_t head_dim : {64U, 80U, 96U, 128U, 256U}) {
        const Plan plan(scheme.base, {.kv_heads = 8, .head_dim = head_dim});
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

void list() {
    Table table({"scheme", "bits at head_dim 64", "at 128", "smaller than f16", "keys", "values"});
    for (const Preset& preset : presets()) {
        const LayerScheme& base = preset.scheme.base;
        table.add({std::string(preset.name), fixed(bits(base, 64), 2), fixed(bits(base, 128), 2),
                   fixed(16 / bits(base, 128), 2) + "x", to_string(base.key),
                   to_string(base.value)});
    }
    std::printf("%s\n", table.text().c_str());
    for (const Preset& preset : presets()) {
        std::printf("  %-8s %s\n", std::string(preset.name).c_str(),
                    std::string(preset.summary).c_str());
    }
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
