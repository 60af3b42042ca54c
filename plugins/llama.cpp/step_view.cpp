#include "step_view.h"

#include <algorithm>

namespace lowkv::ggml {

// Row by row: a mask's columns lie far apart.
void StepView::find_seen(const MaskRows& mask, std::uint32_t tokens, Executor& executor) {
    constexpr std::uint32_t chunk = 4096;
    seen_.assign(mask.visible, mask.data == nullptr ? 1 : 0);
    if (mask.data == nullptr) return;
    executor.parallel_for((mask.visible + chunk - 1) / chunk, [&](std::size_t i, unsigned) {
        const std::size_t first = i * chunk;
        const std::size_t end = std::min<std::size_t>(first + chunk, mask.visible);
        for (std::size_t t = 0; t < tokens; ++t) {
            const std::uint16_t* row = mask.data + t * mask.stride;
            for (std::size_t c = first; c < end; ++c)
                seen_[c] = static_cast<std::uint8_t>(seen_[c] | (row[c] != hidden ? 1 : 0));
        }
    });
}

void StepView::see(CellTracker& tracker, std::uint64_t version, const MaskRows& mask,
                   std::uint32_t tokens, const void* owner, Executor& executor) {
    const Layout& layout = tracker.layout(version);
    const Key key{&tracker, tracker.step(), layout.arrangement, mask, tokens};
    const bool lasts = mask.data == nullptr || mask.tensor != nullptr;
    if (lasts && tracker.owner() == owner && key == key_) return;

    key_ = {};
    find_seen(mask, tokens, executor);
    const auto is_seen = [&](std::uint32_t cell) {
        return cell < mask.visible && seen_[cell] != 0;  // no_cell is beyond
    };
    units_.clear();
    exact_blocks_.clear();
    cells_.clear();
    std::size_t at = 0;
    const auto choose = [&](std::span<const std::uint32_t> from, std::uint32_t rows,
                            std::vector<std::uint32_t>& chosen) {
        for (const std::uint32_t number : from) {
            const auto its = std::span(layout.cells).subspan(at, rows);
            at += rows;
            if (std::none_of(its.begin(), its.end(), is_seen)) continue;
            chosen.push_back(number);
            cells_.insert(cells_.end(), its.begin(), its.end());
        }
    };
    choose(layout.units, tracker.groups().block(), units_);
    choose(layout.exact_blocks, tracker.groups().row_block(), exact_blocks_);

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
