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

// What a served ROPE node does to keys, if that is a rotation of whole heads and nothing else; none
// where it scales them too, leaves out a head's first channels or is unknown to rope_of().
std::optional<Rope> shift_of(const ggml_tensor& node);

// The rotation by one distance.
class KeyShift {
  public:
    KeyShift(const Rope& rope, std::int32_t distance);
    void turn(float* head) const noexcept;

  private:
    std::size_t to_second_, to_next_;
    std::vector<float> cosine_, sine_;  // per pair
};

}  // namespace lowkv::ggml
