// A batch within a budget: which blocks are packed, and by which plan.

#include <algorithm>
#include <vector>

#include "cache/block.h"
#include "lowkv/batch.h"

namespace lowkv {

void Batch::pack_within(std::size_t budget, std::span<const Due> due, Executor& executor) {
    const BatchBytes now = bytes();
    if (now.exact + now.packed <= budget) return;
    const std::uint32_t tokens = plan().block_tokens();
    std::vector<std::size_t> rung_bytes{plan().exact_bytes()};
    for (const auto& its : finer_) rung_bytes.push_back(its->packed_bytes());
    rung_bytes.push_back(plan().packed_bytes());
    // A block that may be packed, or packed with fewer bits, and the sequences that share it.
    struct Item {
        std::uint32_t number;
        const cache::Block* block;
        std::vector<Sequence*> holders;
    };
    std::vector<Item> items;
    std::vector<LadderBlock> ladder;  // of the items: all sequences' blocks of an age together
    std::uint32_t end = state_.packed_end / tokens;
    for (const Due& entry : due) end = std::max(end, entry.end);
    end = std::min(end, sequences_.front().blocks());  // packed_end may lie behind, where none is
    for (std::uint32_t b = state_.first / tokens; b < end; ++b) {
        const auto begin = static_cast<std::ptrdiff_t>(items.size());
        for (std::size_t s = 0; s < size(); ++s) {
            const cache::Block* block = sequences_[s].blocks_[b];
            if (!block->packed && !due[s].has(b)) continue;
            auto found = std::find_if(items.begin() + begin, items.end(),
                                      [&](const Item& item) { return item.block == block; });
            if (found == items.end()) {
                found = items.insert(items.end(), {b, block, {}});
                const auto plan_of = std::ranges::find(finer_, block->finer) - finer_.begin();
                ladder.push_back(
                    {block->packed ? static_cast<std::uint32_t>(plan_of) + 1 : 0, 0, b});
            }
            found->holders.push_back(&sequences_[s]);
        }
    }
    const std::vector<LadderBlock> before = ladder;
    descend(ladder, rung_bytes, now.exact + now.packed, budget);
    // From the oldest on, so that packed tokens stay side by side if a rung fails.
    for (std::size_t rung = finer_.size() + 1; rung > 0; --rung) {
        std::vector<Sequence::Packing> places;
        for (std::size_t i = 0; i < items.size(); ++i)
            for (Sequence* sequence : items[i].holders)
                if (ladder[i].rung == rung && before[i].rung != rung)
                    places.push_back({{sequence, items[i].number}});
        std::ranges::stable_sort(places, {}, &Sequence::Packing::sequence);
        Sequence::pack(places, true, executor, std::nullopt,
                       rung <= finer_.size() ? finer_[rung - 1] : nullptr);
        for (const Sequence::Packing& place : places)
            state_.packed_end = std::max(state_.packed_end, (place.block + 1) * tokens);
    }
}

// Unquantized blocks belong to the piece that they are next to: their rows are alike in all plans.
void Batch::add_pieces(const Sequence& sequence, std::span<const BlockView> views,
                       std::vector<AttentionPiece>& pieces) const {
    const std::size_t first = pieces.size();
    const std::uint32_t block_tokens = plan().block_tokens();
    pieces.push_back({.blocks = views, .cells = tokens()});
    for (std::uint32_t b = 0; b < (finer_.empty() ? 0 : sequence.blocks()); ++b) {
        const cache::Block* block = sequence.blocks_[b];
        if (block == nullptr || !block->packed) continue;
        const Plan* its = &block->plan(plan());
        AttentionPiece& last = pieces.back();
        if (last.plan == nullptr) last.plan = its;
        if (last.plan == its) continue;
        const std::uint32_t cell = b * block_tokens;
        last.cells = cell - last.first_cell;
        pieces.push_back({its, views.subspan(b), cell, tokens() - cell});
    }
    if (pieces[first].plan == nullptr) pieces[first].plan = &plan();
}

}  // namespace lowkv
