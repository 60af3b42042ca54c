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

constexpr Codec rotated(Codec codec, Rotate rotation) {
    codec.rotation = rotation;
    return codec;
}

Preset preset(std::string_view name, std::string_view summary, Codec key, Codec value) {
    return {.name = name,
            .summary = summary,
            .scheme = {.base = {.key = key, .value = value}, .retention = {}, .overrides = {}}};
}

}  // namespace

std::span<const Preset> presets() {
    static const std::array all{
        preset("exact", "f16 storage, f32 arithmetic: the baseline, nothing is quantized", Codec{},
               Codec{}),
        preset("lowkv2",
               "keys less their mean and values, rotated, norm and 2-bit normal levels: the "
               "smallest cache; loses a third of what kivi2 does",
               centred(normal(2)), normal(2)),
        preset("lowkv2.8",
               "3-bit keys and 2-bit values of the same kind: the one to use when nothing else is "
               "known",
               centred(normal(3)), normal(2)),
        preset("lowkv3", "3 bits of the same kind for both: next to no loss at a fifth of f16",
               centred(normal(3)), normal(3)),
        preset("lowkv4", "4 bits of the same kind for both: as good as kivi4 in fewer bits",
               centred(normal(4)), normal(4)),
        preset("kivi2",
               "KIVI at 2 bits: keys per channel, values per token, 3.0 bits per element (the "
               "paper has no sinks: kivi2,sinks=0)",
               uniform(2, Axis::channel, 32), uniform(2, Axis::token, 32)),
        preset("kivi4",
               "KIVI at 4 bits, 5.0 bits per element: next to no loss at a third of f16's size",
               uniform(4, Axis::channel, 32), uniform(4, Axis::token, 32)),
        preset("int8", "8 bits per token in groups of 128: the safest step below f16",
               uniform(8, Axis::token, 128), uniform(8, Axis::token, 128)),
        preset(
            "int4",
            "4 bits per token in groups of 32, as plain integer caches do: a yardstick for kivi4",
            uniform(4, Axis::token, 32), uniform(4, Axis::token, 32)),
        preset("int4h", "int4 after a Hadamard rotation: what the rotation alone is worth",
               rotated(uniform(4, Axis::token, 32), Rotate::hadamard),
               rotated(uniform(4, Axis::token, 32), Rotate::hadamard)),
        preset("turboquant4", "TurboQuant/PolarQuant at 4 bits: norm, Hadamard, Lloyd-Max levels",
               normal(4), normal(4)),
        preset("turboquant3", "TurboQuant/PolarQuant at 3 bits", normal(3), normal(3)),
        preset("turboquant2", "TurboQuant/PolarQuant at 2 bits", normal(2), normal(2)),
        preset("turboquant4-qr", "turboquant4 with the paper's random orthogonal matrix per layer",
               rotated(normal(4), Rotate::random), rotated(normal(4), Rotate::random)),
        preset("turboquant3-qr", "turboquant3 with a random orthogonal matrix per layer",
               rotated(normal(3), Rotate::random), rotated(normal(3), Rotate::random)),
        preset("turboquant2-qr", "turboquant2 with a random orthogonal matrix per layer",
               rotated(normal(2), Rotate::random), rotated(normal(2), Rotate::random)),
    };
    return all;
}

}  // namespace lowkv
