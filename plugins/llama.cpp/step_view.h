#pragma once
// What a step's queries see of a stream: its rows lie by sequence and age, llama.cpp's mask goes by
// cell. One for all layers of a step.

#include <cstdint>
#include <span>
#include <vector>

#include "cell_tracker.h"
#include "lowkv/executor.h"

namespace lowkv::ggml {

class StepView {
  public:
    // Brings the mask into the order of the rows of a layer that has followed the stream's groups
    // up to `version`. Units and blocks that no query sees are left out: other sequences' rows
    // aren't read. `owner`: who runs the graph; what was made for a layer before serves again if it
    // began the step and the mask is the same input.
    void see(CellTracker& tracker, std::uint64_t version, const MaskRows& mask,
             std::uint32_t tokens, const void* owner, Executor& executor);

    std::span<const std::uint32_t> units() const noexcept { return units_; }
    std::span<const std::uint32_t> exact_blocks() const noexcept { return exact_blocks_; }
    std::uint32_t rows() const noexcept { return static_cast<std::uint32_t>(cells_.size()); }
    const std::uint16_t* mask() const noexcept { return mask_.data(); }  // [tokens][rows()]

  private:
    struct Key {
        const CellTracker* tracker = nullptr;
        std::uint64_t step = 0;
        std::uint64_t layout = 0;
        MaskRows mask;
        std::uint32_t tokens = 0;
        friend bool operator==(const Key&, const Key&) = default;
    };
    void find_seen(const MaskRows& mask, std::uint32_t tokens, Executor& executor);

    Key key_;
    std::vector<std::uint32_t> units_, exact_blocks_, cells_;
    std::vector<std::uint16_t> mask_;
    std::vector<std::uint8_t> seen_;  // scratch, per cell
};

}  // namespace lowkv::ggml
