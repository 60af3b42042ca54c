#pragma once
// Sines and cosines of a Rope at any position, by the addition theorem from three tables of 128
// positions each: kernels can't call sin(), and one table of all positions would not stay in cache.

#include <cstdint>
#include <memory>
#include <vector>

#include "lowkv/codec.h"

namespace lowkv::codec {

class RopeTable {
  public:
    static constexpr std::uint32_t digit = 128;  // positions count modulo digit^3, 2,097,152
    static constexpr std::uint32_t tile = 32;    // consecutive tokens that kernels turn together
    static constexpr std::uint32_t max_pairs = 128;

    // Throws Error(invalid_argument) for a rope that doesn't fit into head_dim. Equal ropes share
    // their table.
    static std::shared_ptr<const RopeTable> of(const Rope& rope, std::uint32_t head_dim);

    const Rope& rope() const noexcept { return rope_; }
    std::uint32_t pairs() const noexcept { return pairs_; }
    // The channels of pair i.
    std::uint32_t first(std::uint32_t i) const noexcept { return halves_ ? i : 2 * i; }
    std::uint32_t second(std::uint32_t i) const noexcept {
        return halves_ ? i + pairs_ : 2 * i + 1;
    }

    // Digit d (0: the units) with value v: cosines, then sines, padded() floats each. The units are
    // times the magnitude.
    const float* turns(std::uint32_t d, std::uint32_t v) const noexcept {
        return turns_.data() + (std::size_t{d} * digit + v) * 2 * padded_;
    }
    std::uint32_t padded() const noexcept { return padded_; }
    // Of pair i at offsets 0 .. tile - 1 from a base: cosines, then sines, without the magnitude.
    const float* offsets(std::uint32_t i) const noexcept {
        return offsets_.data() + std::size_t{i} * 2 * tile;
    }

    // cos and sin of all pairs at a position, times the magnitude.
    void angles(std::int32_t position, float* cos, float* sin) const noexcept;
    // A head's row, in place: what the model did to it, and back.
    void apply(std::int32_t position, float* x) const noexcept;
    void undo(std::int32_t position, float* x) const noexcept;

    explicit RopeTable(const Rope& rope);

  private:
    Rope rope_;
    bool halves_;
    std::uint32_t pairs_, padded_;
    std::vector<float> turns_, offsets_;
};

}  // namespace lowkv::codec
