#pragma once
// What the tests of images share.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "lowkv/codec.h"
#include "xxh64.h"

namespace image_test {

using Bytes = std::vector<std::byte>;

template <class T>
T number(const Bytes& bytes, std::size_t at) {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
}

// The right checksum of whatever the bytes are now.
inline void reseal(std::span<std::byte> image) {
    const std::uint64_t checksum = lowkv::xxh64(image.subspan(32));
    std::memcpy(image.data() + 24, &checksum, sizeof checksum);
}

inline lowkv::Rope rope(float base = 0.9f) {
    lowkv::Rope rope;
    for (int i = 0; i < 32; ++i)
        rope.frequencies.push_back(i == 0 ? 1 : rope.frequencies[i - 1] * base);
    return rope;
}

// With a calibration and a rope, where the codecs take them.
inline lowkv::Plan plan_of(const lowkv::LayerScheme& scheme, lowkv::Shape shape) {
    const lowkv::Rope its = rope();
    return lowkv::neutral_plan(scheme, shape, &its);
}

}  // namespace image_test
