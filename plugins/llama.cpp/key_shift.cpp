#include "key_shift.h"

#include <cmath>

#include "lowkv/error.h"
#include "rope_params.h"

namespace lowkv::ggml {

std::optional<Rope> shift_of(const ggml_tensor& node, const Shape& shape) {
    constexpr float rounding = 1e-5f;  // of YaRN's magnitude and what llama.cpp divides it by
    const std::size_t first = shape.value_dim * sizeof(ggml_fp16_t);
    if (node.view_offs % node.nb[2] != first) return std::nullopt;
    try {
        Rope rope = rope_of(node);
        if (std::abs(rope.magnitude - 1.0f) > rounding) return std::nullopt;
        return rope;
    } catch (const Error& error) {
        if (error.code() != ErrorCode::unsupported) throw;
        return std::nullopt;
    }
}

KeyShift::KeyShift(const Rope& rope, const Shape& shape, std::int32_t distance)
    : first_(shape.value_dim),
      to_second_(rope.pairs == Rope::Pairs::halves ? rope.frequencies.size() : 1),
      to_next_(rope.pairs == Rope::Pairs::halves ? 1 : 2) {
    cosine_.reserve(rope.frequencies.size());
    sine_.reserve(rope.frequencies.size());
    for (const float frequency : rope.frequencies) {
        const double angle = distance * static_cast<double>(frequency);
        cosine_.push_back(static_cast<float>(std::cos(angle)));
        sine_.push_back(static_cast<float>(std::sin(angle)));
    }
}

void KeyShift::turn(float* head) const noexcept {
    head += first_;
    for (std::size_t i = 0; i < cosine_.size(); ++i) {
        float& a = head[i * to_next_];
        float& b = head[i * to_next_ + to_second_];
        const float first = a * cosine_[i] - b * sine_[i];
        b = a * sine_[i] + b * cosine_[i];
        a = first;
    }
}

}  // namespace lowkv::ggml
