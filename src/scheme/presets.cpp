// The named points of the codec space.

#include <array>

#include "lowkv/scheme.h"

namespace lowkv {
namespace {

constexpr Codec uniform(std::uint8_t bits, Axis axis, std::uint16_t group) {
    return {.bits = bits, .axis = axis, .group = group};
}

constexpr Codec normal(std::uint8_t bits) {
    return {.bits = bits,
            .axis = Axis::token,
            .group = Codec::whole_head,
            .levels = Levels::normal,
            .rotation = Rotate::hadamard};
}

constexpr Codec centred(Codec codec) {
    codec.centred = true;
    return codec;
}

// Better for values, not for keys (docs/quality.md).
constexpr Codec unbiased(Codec codec) {
    codec.fit = Fit::unbiased;
    return codec;
}

constexpr Codec rotated(Codec codec, Rotate rotation) {
    codec.rotation = rotation;
    return codec;
}

constexpr std::string_view own =
    "lowkv's own hybrid: TurboQuant's rotation and levels (Zandieh et al., 2025), the keys less "
    "their block's mean per channel";
constexpr std::string_view kivi =
    "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (Liu et al., ICML 2024); the "
    "paper has no sinks: add sinks=0";
constexpr std::string_view turboquant =
    "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate (Zandieh et al., "
    "2025), without its 1-bit residual, and with a Hadamard rotation for the random one";
constexpr std::string_view turboquant_random =
    "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate (Zandieh et al., "
    "2025), without its 1-bit residual";
constexpr std::string_view integers = "no paper: integers, each rounded to the nearest";

struct Words {
    std::string_view name, summary, source;
};

Preset preset(const Words& words, Codec key, Codec value) {
    return {.name = words.name,
            .summary = words.summary,
            .source = words.source,
            .scheme = {.base = {.key = key, .value = value}, .retention = {}, .overrides = {}}};
}

Preset preset(const Words& words, Codec both) { return preset(words, both, both); }

}  // namespace

std::span<const Preset> presets() {
    static const std::array all{
        preset({"exact", "the reference: f16, nothing is quantized", "no paper: f16 as it comes"},
               Codec{}),
        preset({"lowkv1.5", "when memory is shortest: three levels, five codes to a byte", own},
               centred(normal(Codec::ternary_bits)), unbiased(normal(Codec::ternary_bits))),
        preset({"lowkv2", "a step smaller than the default: 2-bit keys and values", own},
               centred(normal(2)), unbiased(normal(2))),
        preset({"lowkv2.8", "when nothing else is known: 3-bit keys and 2-bit values", own},
               centred(normal(3)), unbiased(normal(2))),
        preset({"lowkv3", "a step safer: 3 bits for both, a fifth of f16's size", own},
               centred(normal(3)), unbiased(normal(3))),
        preset({"lowkv4", "when next to nothing may be lost: 4 bits, a quarter of f16's size", own},
               centred(normal(4)), unbiased(normal(4))),
        preset({"kivi2", "KIVI's 2 bits, to compare with what others publish", kivi},
               uniform(2, Axis::channel, 32), uniform(2, Axis::token, 32)),
        preset({"kivi4", "KIVI's 4 bits, likewise: a third of f16's size", kivi},
               uniform(4, Axis::channel, 32), uniform(4, Axis::token, 32)),
        preset({"int8", "the safest step below f16", integers}, uniform(8, Axis::token, 128)),
        preset({"int4", "a yardstick: what plain integer caches do", integers},
               uniform(4, Axis::token, 32)),
        preset({"int4h", "a yardstick: what a Hadamard rotation alone does for int4", integers},
               rotated(uniform(4, Axis::token, 32), Rotate::hadamard)),
        preset({"turboquant4", "to compare: lowkv4 without the keys' mean", turboquant}, normal(4)),
        preset({"turboquant3", "to compare: lowkv3 without the keys' mean", turboquant}, normal(3)),
        preset({"turboquant2", "to compare: lowkv2 without the keys' mean", turboquant}, normal(2)),
        preset({"turboquant4-qr", "turboquant4 with the paper's random rotation in each layer",
                turboquant_random},
               rotated(normal(4), Rotate::random)),
        preset({"turboquant3-qr", "turboquant3 with the paper's random rotation in each layer",
                turboquant_random},
               rotated(normal(3), Rotate::random)),
        preset({"turboquant2-qr", "turboquant2 with the paper's random rotation in each layer",
                turboquant_random},
               rotated(normal(2), Rotate::random)),
    };
    return all;
}

}  // namespace lowkv
