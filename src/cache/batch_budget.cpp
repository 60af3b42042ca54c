// A batch within a budget: which blocks are packed, and by which plan.

#include <algorithm>
#include <vector>

#include "lowkv/batch.h"

namespace lowkv {

void Batch::pack_within(std::size_t budget, std::span<const Due> due, Executor& executor) {
    const BatchBytes now = bytes();
    if (now.exact + now.packed <= budget) return;
    const std::uint32_t tokens = plan().block_tokens();
    std::vector<std::size_t> rung_bytes{plan().exact_bytes()};
    for (const auto& rung : sequences_.front().ladder()) rung_bytes.push_back(rung->packed_bytes());
    // A block that may be packed, or packed with fewer bits, and the sequences that share it.
    struct Item {
        std::uint32_t number;
        const std::byte* block;
        std::vector<std::size_t> holders;
    };
    std::vector<Item> items;
    std::vector<LadderBlock> ladder;  // of the items: all sequences' blocks of an age together
    std::uint32_t end = state_.packed_end / tokens;
    for (const Due& entry : due) end = std::max(end, entry.end);
    end = std::min(end, state_.tokens / tokens);  // packed_end may lie behind, where none is
    for (std::uint32_t b = state_.first / tokens; b < end; ++b) {
        const auto begin = static_cast<std::ptrdiff_t>(items.size());
        for (std::size_t s = 0; s < size(); ++s) {
            const std::byte* block = sequences_[s].view(b).keys;
            const std::uint32_t rung = sequences_[s].rung(b);
            if (rung == 0 && !due[s].has(b)) continue;
            auto found = std::find_if(items.begin() + begin, items.end(),
                                      [&](const Item& item) { return item.block == block; });
            if (found == items.end()) {
                found = items.insert(items.end(), {b, block, {}});
                ladder.push_back({rung, 0, b});
            }
            found->holders.push_back(s);
        }
    }
    const std::vector<LadderBlock> before = ladder;
    descend(ladder, rung_bytes, now.exact + now.packed, budget);
    // From the oldest on, so that packed tokens stay side by side if a rung fails.
    for (std::uint8_t rung = last_rung(); rung > 0; --rung) {
        std::vector<Blocks::Packing> places;
        std::uint32_t packed_end = state_.packed_end;
        for (std::size_t i = 0; i < items.size(); ++i) {
            if (ladder[i].rung != rung || before[i].rung == rung) continue;
            for (const std::size_t s : items[i].holders)
                places.push_back(packing(s, items[i].number));
            packed_end = std::max(packed_end, (items[i].number + 1) * tokens);
        }
        Blocks::pack(std::move(places), {.rung = rung, .apart = true}, executor);
        state_.packed_end = packed_end;
    }
}

// Unquantized blocks belong to the piece that they are next to: their rows are alike in all plans.
void Batch::add_pieces(const Blocks& sequence, std::span<const BlockView> views,
                       std::vector<AttentionPiece>& pieces) const {
    const std::size_t first = pieces.size();
    const std::uint32_t block_tokens = plan().block_tokens();
    pieces.push_back({.blocks = views, .cells = tokens()});
    for (std::uint32_t b = 0; b < (last_rung() == 1 ? 0 : sequence.slots()); ++b) {
        if (!sequence.packed(b)) continue;
        const Plan* its = &sequence.plan_of(sequence.rung(b));
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
