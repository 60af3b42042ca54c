#pragma once
// The rotary position embedding of a model's keys. Codecs that store keys before it (Stage::pre)
// undo it when a block is packed and apply it again when the block is attended to.
//
// Undoing and applying are inverse for any parameters and positions: wrong ones cost quality, never
// correctness.

#include <cstdint>
#include <vector>

namespace lowkv {

struct Rope {
    enum class Pairs : std::uint8_t {
        halves,      // NeoX: channels i and i + frequencies.size()
        neighbours,  // channels 2i and 2i + 1
    };
    Pairs pairs = Pairs::halves;
    // Pair i of a token at position p is turned by p * frequencies[i] radians. Frequency factors,
    // linear scaling and YaRN's mix of both are in here. The channels of a head beyond
    // 2 * frequencies.size() pass unchanged (partial rotary).
    std::vector<float> frequencies;
    float magnitude = 1.0f;  // of what is turned, YaRN's attention factor

    friend bool operator==(const Rope&, const Rope&) = default;
};

}  // namespace lowkv
