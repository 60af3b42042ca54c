#include "step_view.h"

#include <algorithm>

namespace lowkv::ggml {
namespace {

constexpr std::uint16_t hidden = 0xFC00;  // f16 -inf

bool any_visible(std::span<const std::uint32_t> cells, const MaskRows& mask, std::uint32_t tokens) {
    for (const std::uint32_t cell : cells) {
        if (cell >= mask.visible) continue;  // no_cell, too
        if (mask.data == nullptr) return true;
        // A sequence's newest tokens see most.
        for (std::uint32_t t = tokens; t-- > 0;)
            if (mask.data[t * mask.stride + cell] != hidden) return true;
    }
    return false;
}

}  // namespace

void StepView::see(CellTracker& tracker, std::uint64_t version, const MaskRows& mask,
                   std::uint32_t tokens, const void* owner, Executor& executor) {
    const Layout& layout = tracker.layout(version);
    const Key key{.tracker = &tracker,
                  .step = tracker.step(),
                  .layout = layout.version,
                  .mask = mask.data,
                  .stride = mask.stride,
                  .visible = mask.visible,
                  .tokens = tokens};
    if (tracker.owner() == owner && key == key_) return;

    const std::uint32_t block = tracker.groups().block();
    units_.clear();
    exact_blocks_.clear();
    cells_.clear();
    std::size_t at = 0;
    const auto choose = [&](std::span<const std::uint32_t> from,
                            std::vector<std::uint32_t>& chosen) {
        for (const std::uint32_t number : from) {
            const auto its = std::span(layout.cells).subspan(at, block);
            at += block;
            if (!any_visible(its, mask, tokens)) continue;
            chosen.push_back(number);
            cells_.insert(cells_.end(), its.begin(), its.end());
        }
    };
    choose(layout.units, units_);
    choose(layout.exact_blocks, exact_blocks_);

    mask_.resize(std::size_t{tokens} * rows());
    executor.parallel_for(tokens, [&](std::size_t t, unsigned) {
        const std::uint16_t* from = mask.data != nullptr ? mask.data + t * mask.stride : nullptr;
        std::uint16_t* to = mask_.data() + t * rows();
        for (std::size_t i = 0; i < cells_.size(); ++i) {
            const std::uint32_t cell = cells_[i];
            to[i] = cell >= mask.visible ? hidden : from != nullptr ? from[cell] : std::uint16_t{0};
        }
    });
    key_ = key;
}

}  // namespace lowkv::ggml
