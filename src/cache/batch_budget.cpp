// A batch within a budget: which blocks are packed, and by which plan.

#include <algorithm>
#include <vector>

#include "cache/block.h"
#include "lowkv/batch.h"

namespace lowkv {

// A block goes down a ladder: exact, packed by each of finer_, packed by plan(). Blocks of the
// highest rung go first, the oldest of them first.
void Batch::pack_within(std::size_t budget, std::span<const Due> due, Executor& executor) {
    const BatchBytes bytes = this->bytes();
    std::size_t held = bytes.exact + bytes.packed;
    if (held <= budget) return;
    const std::uint32_t tokens = plan().block_tokens();
    const std::size_t last = finer_.size() + 1;
    const auto finer = [&](std::size_t rung) {
        return rung < last ? finer_[rung - 1] : std::shared_ptr<const Plan>();
    };
    const auto cost = [&](std::size_t rung) {
        return rung == 0     ? plan().exact_bytes()
               : rung < last ? finer_[rung - 1]->packed_bytes()
                             : plan().packed_bytes();
    };
    // A block that may be packed, or packed with fewer bits, and the sequences that share it.
    struct Item {
        std::uint32_t number;
        const cache::Block* block;
        std::size_t rung, then;
        std::vector<Sequence*> holders;
    };
    std::vector<Item> items;
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
                const auto plan_of = std::ranges::find(finer_, block->finer) - finer_.begin();
                const std::size_t rung = block->packed ? static_cast<std::size_t>(plan_of) + 1 : 0;
                found = items.insert(items.end(), {b, block, rung, rung, {}});
            }
            found->holders.push_back(&sequences_[s]);
        }
    }
    // All sequences' blocks of one age go down together.
    for (std::size_t rung = 0; rung < last; ++rung) {
        for (std::size_t i = 0; i < items.size(); ++i) {
            const bool older = i == 0 || items[i].number != items[i - 1].number;
            if (older && held <= budget) break;
            if (items[i].then != rung) continue;
            held -= cost(rung) - cost(rung + 1);
            ++items[i].then;
        }
    }
    // From the oldest on, so that packed tokens stay side by side if a rung fails.
    for (std::size_t rung = last; rung > 0; --rung) {
        std::vector<Sequence::Packing> places;
        for (const Item& item : items)
            for (Sequence* sequence : item.holders)
                if (item.then == rung && item.rung != rung)
                    places.push_back({{sequence, item.number}});
        std::ranges::stable_sort(places, {}, &Sequence::Packing::sequence);
        Sequence::pack(places, true, executor, std::nullopt, finer(rung));
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
