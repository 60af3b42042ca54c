// A batch within a budget: which blocks are packed, and by which plan.

#include <algorithm>
#include <vector>

#include "cache/block.h"
#include "lowkv/batch.h"

namespace lowkv {

// A block goes down a ladder: exact, packed by each of finer_, packed by plan(). Blocks of the
// highest rung go first, the oldest of them first.
void Batch::pack_within(std::size_t budget, std::uint32_t end, Executor& executor) {
    const BatchBytes bytes = this->bytes();
    std::size_t held = bytes.exact + bytes.packed;
    if (held <= budget) return;
    const std::uint32_t tokens = plan().block_tokens(), first = state_.packed_first / tokens;
    const std::size_t last = finer_.size() + 1;
    const auto finer = [&](std::size_t rung) {
        return rung < last ? finer_[rung - 1] : std::shared_ptr<const Plan>();
    };
    const auto cost = [&](std::size_t rung) {
        return rung == 0     ? plan().exact_bytes()
               : rung < last ? finer_[rung - 1]->packed_bytes()
                             : plan().packed_bytes();
    };
    std::vector<std::size_t> rungs, copies;  // of each block from the first that may be packed
    for (std::uint32_t b = first; b < std::max(end, state_.packed_end) / tokens; ++b) {
        const cache::Block& block = *sequences_.front().blocks_[b];
        const auto found = std::ranges::find(finer_, block.finer) - finer_.begin();
        rungs.push_back(block.packed ? static_cast<std::size_t>(found) + 1 : 0);
        std::vector<const cache::Block*> its;  // sequences may share one
        for (const Sequence& sequence : sequences_) its.push_back(sequence.blocks_[b]);
        std::ranges::sort(its);
        copies.push_back(static_cast<std::size_t>(std::ranges::unique(its).begin() - its.begin()));
    }
    std::vector<std::size_t> then = rungs;
    for (std::size_t rung = 0; rung < last; ++rung) {
        for (std::size_t i = 0; i < then.size() && held > budget; ++i) {
            if (then[i] != rung) continue;
            held -= copies[i] * (cost(rung) - cost(rung + 1));
            ++then[i];
        }
    }
    // From the oldest on, so that packed tokens stay side by side if a rung fails.
    for (std::size_t rung = last; rung > 0; --rung) {
        std::vector<Sequence::Packing> places;
        for (Sequence& sequence : sequences_)
            for (std::uint32_t i = 0; i < then.size(); ++i)
                if (then[i] == rung && rungs[i] != rung) places.push_back({{&sequence, first + i}});
        Sequence::pack(places, true, executor, std::nullopt, finer(rung));
        for (const Sequence::Packing& place : places)
            state_.packed_end = std::max(state_.packed_end, (place.block + 1) * tokens);
    }
}

std::vector<Batch::Run> Batch::runs() const {
    std::vector<Run> runs;
    if (finer_.empty()) return runs;
    const std::vector<cache::Block*>& blocks = sequences_.front().blocks_;
    for (std::uint32_t first = 0; first < tokens(); first += plan().block_tokens()) {
        const cache::Block* block = blocks[first / plan().block_tokens()];
        const Plan& its = block != nullptr ? block->plan(plan()) : plan();
        if (runs.empty() || runs.back().plan != &its) runs.push_back({&its, first, first});
        runs.back().end = std::min(first + plan().block_tokens(), tokens());
    }
    return runs;
}

}  // namespace lowkv
