// The named points of the codec space.

#include <algorithm>
#include <array>

#include "lowkv/scheme.h"
#include "scheme/fields.h"

namespace lowkv {
namespace {

constexpr Codec uniform(Width width, Axis axis, Group group) {
    return {.width = width, .axis = axis, .group = group};
}

constexpr Codec normal(Width width) {
    return {.width = width,
            .axis = Axis::token,
            .group = Group::head,
            .levels = Levels::normal,
            .rotation = Rotate::hadamard};
}

// Better for values, not for keys (docs/quality.md).
constexpr Codec unbiased(Codec codec) {
    codec.fit = Fit::unbiased;
    return codec;
}

// lowkv's own keys: the channels that matter most to queries get the most bits, the two shortest
// keys are repaired.
constexpr Codec sorted(Width first, const std::array<std::uint8_t, 4>& bits) {
    Codec codec{.width = first,
                .axis = Axis::sorted,
                .group = Group::head,
                .quarter_bits = bits,
                .exact_rows = 2,
                .weighted = true};
    if (bits[3] < 4) codec.levels = Levels::trellis;  // there is none of 4 bits
    return codec;
}

constexpr Codec own_values(Width width) {
    Codec codec = unbiased(normal(width));
    if (width != Width::four) codec.levels = Levels::trellis;
    codec.metadata = Metadata::fp8_e5m3;
    return codec;
}

constexpr Codec rotated(Codec codec, Rotate rotation) {
    codec.rotation = rotation;
    return codec;
}

// SKVQ: groups of 128 channels of all heads.
constexpr Codec skvq(Width width, Stage stage) {
    return {.width = width,
            .axis = Axis::token,
            .group = Group::g128,
            .reordered = true,
            .clip = Clip::calibrated,
            .stage = stage,
            .metadata = Metadata::fp8_e4m3};
}

constexpr LayerScheme kvquant(Width width, std::uint8_t outliers) {
    return {.key = {.width = width,
                    .axis = Axis::channel,
                    .group = Group::calibrated,
                    .levels = Levels::learned,
                    .outliers = outliers,
                    .stage = Stage::pre},
            .value = {.width = width,
                      .axis = Axis::token,
                      .group = Group::row,
                      .levels = Levels::learned,
                      .outliers = outliers}};
}

constexpr std::string_view own =
    "lowkv's own hybrid: keys in sorted channels with unequal bits, values after TurboQuant's "
    "rotation (Zandieh et al., 2025), both by a trellis (Marcellin and Fischer, 1990)";
constexpr std::string_view own_4 =
    "lowkv's own hybrid: keys in sorted channels with unequal bits, below 4 by a trellis "
    "(Marcellin and Fischer, 1990), values after TurboQuant's rotation (Zandieh et al., 2025)";
constexpr std::string_view kivi =
    "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (Liu et al., ICML 2024); the "
    "paper has no sinks: add sinks=0";
constexpr std::string_view turboquant =
    "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate (Zandieh et al., "
    "2025), without its 1-bit residual, and with a Hadamard rotation for the random one";
constexpr std::string_view turboquant_random =
    "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate (Zandieh et al., "
    "2025), without its 1-bit residual";
constexpr std::string_view skvq_paper =
    "SKVQ: Sliding-window Key and Value Cache Quantization for Large Language Models (Duanmu et "
    "al., COLM 2024); ranges are shortened about their centre";
constexpr std::string_view kvquant_paper =
    "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization (Hooper "
    "et al., NeurIPS 2024)";
constexpr std::string_view integers = "no paper: integers, each rounded to the nearest";

constexpr bool recommended = true;

struct Words {
    std::string_view name, summary, source;
    bool recommended = false;
};

Preset preset(const Words& words, Codec key, Codec value, Codec latent) {
    return {.name = words.name,
            .summary = words.summary,
            .source = words.source,
            .recommended = words.recommended,
            .scheme = {.base = {.key = key, .value = value}, .retention = {}, .overrides = {}},
            .latent = latent};
}

Preset preset(const Words& words, Codec key, Codec value) { return preset(words, key, value, key); }

Preset preset(const Words& words, Codec both) { return preset(words, both, both); }

// As values all channels of a latent row count alike (docs/quality/mla.md).
constexpr Codec latent_3 = sorted(Width::three, {3, 3, 3, 3});
constexpr Codec latent_4 = sorted(Width::four, {4, 4, 4, 4});

// KVQuant has no window, and one sink.
Preset kvquant_preset(const Words& words, Width width, std::uint8_t outliers) {
    const LayerScheme codecs = kvquant(width, outliers);
    Preset made = preset(words, codecs.key, codecs.value);
    made.scheme.retention = {.window = 0, .sinks = 1};
    return made;
}

}  // namespace

std::span<const Preset> scheme::all_presets() {
    static const std::array all{
        preset({"exact", "the reference: f16, nothing is quantized", "no paper: f16 as it comes",
                recommended},
               Codec{}),
        preset({"lowkv1.5", "when memory is shortest: 1.5-bit keys and 1-bit values", own,
                recommended},
               sorted(Width::two, {2, 2, 1, 1}), own_values(Width::one), latent_3),
        preset({"lowkv2", "a step smaller than the default: 2 bits for both", own, recommended},
               sorted(Width::four, {4, 2, 1, 1}), own_values(Width::two), latent_3),
        preset({"lowkv2.8", "when nothing else is known: 3-bit keys and 2-bit values", own,
                recommended},
               sorted(Width::four, {5, 3, 2, 2}), own_values(Width::two), latent_3),
        preset({"lowkv3", "a step safer: 3 bits for both, a fifth of f16's size", own, recommended},
               sorted(Width::four, {5, 3, 2, 2}), own_values(Width::three), latent_3),
        preset({"lowkv4", "when next to nothing may be lost: 4 bits, a quarter of f16's size",
                own_4, recommended},
               sorted(Width::four, {5, 4, 4, 3}), own_values(Width::four), latent_4),
        preset({"kivi2", "KIVI's 2 bits, to compare with what others publish", kivi},
               uniform(Width::two, Axis::channel, Group::g32),
               uniform(Width::two, Axis::token, Group::g32)),
        preset({"kivi4", "KIVI's 4 bits, likewise: a third of f16's size", kivi},
               uniform(Width::four, Axis::channel, Group::g32),
               uniform(Width::four, Axis::token, Group::g32)),
        preset({"int8", "the safest step below f16", integers},
               uniform(Width::eight, Axis::channel, Group::g32),
               uniform(Width::eight, Axis::token, Group::g128)),
        preset({"int4", "a yardstick: what plain integer caches do", integers},
               uniform(Width::four, Axis::token, Group::g32)),
        preset(
            {"int4h", "a yardstick: int4 after a Hadamard rotation, one scale per head", integers},
            rotated(uniform(Width::four, Axis::token, Group::head), Rotate::hadamard)),
        preset({"turboquant4", "to compare: rotated keys and values of 4 bits", turboquant},
               normal(Width::four)),
        preset({"turboquant3", "to compare: the same with 3 bits", turboquant},
               normal(Width::three)),
        preset({"turboquant2", "to compare: the same with 2 bits", turboquant}, normal(Width::two)),
        preset({"turboquant4-qr", "turboquant4 with the paper's random rotation in each layer",
                turboquant_random},
               rotated(normal(Width::four), Rotate::random)),
        preset({"turboquant3-qr", "turboquant3 with the paper's random rotation in each layer",
                turboquant_random},
               rotated(normal(Width::three), Rotate::random)),
        preset({"turboquant2-qr", "turboquant2 with the paper's random rotation in each layer",
                turboquant_random},
               rotated(normal(Width::two), Rotate::random)),
        preset({"skvq-k4v4", "SKVQ's 4 bits; needs a calibration", skvq_paper},
               skvq(Width::four, Stage::pre), skvq(Width::four, Stage::post)),
        preset({"skvq-k2v2", "SKVQ's 2 bits; needs a calibration", skvq_paper},
               skvq(Width::two, Stage::pre), skvq(Width::two, Stage::post)),
        preset({"skvq-k2v1.5",
                "SKVQ's smallest: 2-bit keys and 1.5-bit values; needs a calibration", skvq_paper},
               skvq(Width::two, Stage::pre), skvq(Width::ternary, Stage::post)),
        kvquant_preset({"kvquant4", "KVQuant's nuq4; needs a calibration", kvquant_paper},
                       Width::four, 0),
        kvquant_preset({"kvquant3", "KVQuant's nuq3; needs a calibration", kvquant_paper},
                       Width::three, 0),
        kvquant_preset({"kvquant2", "KVQuant's nuq2; needs a calibration", kvquant_paper},
                       Width::two, 0),
        kvquant_preset(
            {"kvquant4-1%", "KVQuant's nuq4-1%: a hundredth kept in f16; needs a calibration",
             kvquant_paper},
            Width::four, 10),
        kvquant_preset({"kvquant3-1%", "KVQuant's nuq3-1%; needs a calibration", kvquant_paper},
                       Width::three, 10),
        kvquant_preset({"kvquant2-1%", "KVQuant's nuq2-1%; needs a calibration", kvquant_paper},
                       Width::two, 10),
    };
    return all;
}

std::span<const Preset> presets() {
    // Guests' are the last ones.
    static const auto missing = std::ranges::find_if(scheme::all_presets(), [](const Preset& p) {
        return !scheme::restriction(p.scheme.base.key, Part::keys).empty();
    });
    return {scheme::all_presets().begin(), missing};
}

const Preset* preset_of(const LayerScheme& codecs) {
    const auto found = std::ranges::find(presets(), codecs,
                                         [](const Preset& preset) { return preset.scheme.base; });
    return found == presets().end() ? nullptr : &*found;
}

LayerScheme latent_scheme(const LayerScheme& scheme) {
    const Preset* preset = preset_of(scheme);
    return {.key = preset != nullptr ? preset->latent : scheme.key, .value = {}};
}

}  // namespace lowkv
