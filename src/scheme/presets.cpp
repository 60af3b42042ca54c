// The named points of the codec space.

#include <array>

#include "lowkv/scheme.h"

namespace lowkv {
namespace {

constexpr Codec uniform(std::uint8_t bits, Axis axis, std::uint16_t group) {
    return {.bits = bits, .axis = axis, .group = group, .metadata = Metadata::fp16};
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
        preset("kivi2",
               "KIVI at 2 bits: keys per channel, values per token, 3.0 bits per element; the "
               "smallest cache (the paper has no sinks: kivi2,sinks=0)",
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
    };
    return all;
}

}  // namespace lowkv
