#pragma once
// A context shift moves tokens: it turns their keys by the RoPE of the distance. Packed keys stay
// as they are, and their queries are turned back instead, as q . R(d) k = R(-d) q . k, so that a
// shift costs packed rows nothing.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ggml.h"
#include "lowkv/codec.h"

namespace lowkv::ggml {

// What a served ROPE node does to keys of the shape, if that is a rotation and nothing else; none
// where it scales them too or is unknown to rope_of(). It begins with a head's first channel, in a
// latent row with the one behind the values; none where it begins elsewhere.
std::optional<Rope> shift_of(const ggml_tensor& node, const Shape& shape);

// The rotation of keys of the shape by one distance.
class KeyShift {
  public:
    KeyShift(const Rope& rope, const Shape& shape, std::int32_t distance);
    void turn(float* head) const noexcept;

  private:
    std::size_t first_, to_second_, to_next_;
    std::vector<float> cosine_, sine_;  // per pair
};

}  // namespace lowkv::ggml
