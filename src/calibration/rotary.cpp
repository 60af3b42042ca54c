#include "calibration/rotary.h"

#include <cmath>
#include <cstddef>

namespace lowkv::calibration {

Rotary::Rotary(const Rope& rope, const Shape& shape, std::uint32_t positions)
    : head_dim_(shape.head_dim),
      pairs_(rope.frequencies.size()),
      to_second_(rope.pairs == Rope::Pairs::halves ? pairs_ : 1),
      to_next_(rope.pairs == Rope::Pairs::halves ? 1 : 2),
      magnitude_(rope.magnitude) {
    for (std::uint32_t p = 0; p < positions; ++p) {
        for (const float frequency : rope.frequencies) {
            const double angle = p * static_cast<double>(frequency);
            cos_.push_back(static_cast<float>(std::cos(angle)));
            sin_.push_back(static_cast<float>(std::sin(angle)));
        }
    }
}

void Rotary::turn(std::span<float> row, std::uint32_t position, bool back) const noexcept {
    const float* cosine = cos_.data() + position * pairs_;
    const float* sine = sin_.data() + position * pairs_;
    const float size = back ? 1.0f / magnitude_ : magnitude_;
    const float direction = back ? -size : size;
    for (std::size_t head = 0; head < row.size(); head += head_dim_) {
        for (std::size_t i = 0; i < pairs_; ++i) {
            float& a = row[head + i * to_next_];
            float& b = row[head + i * to_next_ + to_second_];
            const float first = a * cosine[i] * size - b * sine[i] * direction;
            b = a * sine[i] * direction + b * cosine[i] * size;
            a = first;
        }
    }
}

void Rotary::apply(std::span<float> row, std::uint32_t position) const noexcept {
    turn(row, position, false);
}

void Rotary::undo(std::span<float> row, std::uint32_t position) const noexcept {
    turn(row, position, true);
}

}  // namespace lowkv::calibration
