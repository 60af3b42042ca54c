#pragma once
// Applying a Rope to rows of keys, and undoing it.

#include <cstdint>
#include <span>
#include <vector>

#include "lowkv/codec.h"

namespace lowkv::calibration {

// Rows hold Shape::channels() floats. Without frequencies nothing changes.
class Rotary {
  public:
    Rotary(const Rope& rope, const Shape& shape, std::uint32_t positions);
    void apply(std::span<float> row, std::uint32_t position) const noexcept;
    void undo(std::span<float> row, std::uint32_t position) const noexcept;

  private:
    void turn(std::span<float> row, std::uint32_t position, bool back) const noexcept;

    std::uint32_t head_dim_ = 0;
    std::size_t pairs_ = 0, to_second_ = 0, to_next_ = 0;
    float magnitude_ = 1.0f;
    std::vector<float> cos_, sin_;  // [positions][pairs]
};

}  // namespace lowkv::calibration
