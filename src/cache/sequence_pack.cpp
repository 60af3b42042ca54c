// Packing blocks: of one sequence, or of several that share some.

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache/block.h"
#include "cache/encode.h"
#include "cache/store.h"
#include "lowkv/cache.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

// A block that is due, with what it becomes.
struct Due {
    cache::Block* block = nullptr;  // null: its rows are elsewhere
    std::uint32_t holders = 0;      // among the sequences that pack it
    bool replaced = false;          // `fresh` takes its place
    std::unique_ptr<cache::Block> fresh;
    cache::Block* made = nullptr;  // `fresh`, once its holders have it
};

}  // namespace

void Sequence::pack(Executor& executor) {
    if (plan_->scheme().exact()) return;
    const std::uint32_t tokens = plan_->block_tokens();
    const PackedTokens packed = packed_tokens(retention_, tokens, size_);
    const auto end = static_cast<std::uint32_t>(packed.end / tokens);
    std::vector<std::uint32_t> due;
    for (auto b = std::max(next_due_, static_cast<std::uint32_t>(packed.first / tokens)); b < end;
         ++b)
        due.push_back(b);
    pack(due, executor);
    next_due_ = std::max(next_due_, end);
}

void Sequence::pack(std::span<const std::uint32_t> blocks, Executor& executor,
                    std::span<const std::uint32_t> stats_from) {
    if (!stats_from.empty() && stats_from.size() != blocks.size()) {
        throw Error(ErrorCode::invalid_argument, "pack(): " + std::to_string(stats_from.size()) +
                                                     " reference blocks for " +
                                                     std::to_string(blocks.size()) + " blocks");
    }
    std::vector<Packing> places;
    for (std::size_t i = 0; i < blocks.size(); ++i)
        places.push_back({{this, blocks[i]}, stats_from.empty() ? first_packed : stats_from[i]});
    std::sort(places.begin(), places.end(),
              [](const Place& a, const Place& b) { return a.block < b.block; });
    pack(places, false, executor);
}

// Of the sequence's last packed block of that plan that leads; null: it has none.
const std::byte* Sequence::statistics(const std::shared_ptr<const Plan>& finer) const noexcept {
    const auto found = std::find_if(blocks_.rbegin(), blocks_.rend(), [&](const auto* block) {
        return block != nullptr && block->packed && block->leads && block->finer == finer;
    });
    return found == blocks_.rend() ? nullptr : (*found)->data;
}

void Sequence::pack(std::span<const Packing> places, bool apart, Executor& executor,
                    std::optional<Part> only, const std::shared_ptr<const Plan>& finer) {
    if (places.empty() || places.front().sequence->plan_->scheme().exact()) return;
    const Plan& own = *places.front().sequence->plan_;
    const Plan& plan = finer != nullptr ? *finer : own;
    Store::Impl& store = places.front().sequence->store_->impl();
    const std::size_t packed_bytes = plan.packed_bytes();
    std::vector<Due> due;
    std::vector<cache::Encoding> encodings;                // of the due
    std::vector<std::pair<Packing, std::size_t>> holders;  // and which of the due they hold
    std::unique_lock lock(store.mutex);
    {
        std::map<const cache::Block*, std::size_t> numbers;
        std::map<std::pair<const Sequence*, std::uint32_t>, std::size_t> places_due;
        const Sequence* previous = nullptr;
        std::size_t before = cache::Encoding::none;  // the due block before, of the sequence
        for (const Packing& place : places) {
            Sequence& sequence = *place.sequence;
            if (std::exchange(previous, place.sequence) != place.sequence)
                before = cache::Encoding::none;
            if (place.rows == nullptr && !sequence.full(place.block)) continue;
            if (sequence.packed(place.block) && sequence.blocks_[place.block]->finer == finer)
                continue;
            if (!holders.empty() && holders.back().first.sequence == place.sequence &&
                holders.back().first.block == place.block)
                continue;  // named twice
            cache::Block* block = place.rows == nullptr ? sequence.blocks_[place.block] : nullptr;
            std::size_t number = due.size();
            if (block != nullptr) number = numbers.try_emplace(block, number).first->second;
            if (number == due.size()) {
                due.emplace_back().block = block;
                cache::Encoding& encoding = encodings.emplace_back();
                encoding.exact = block != nullptr ? block->data : place.rows;
                encoding.queries = &sequence.queries_;
                if (plan.has_statistics() && place.stats_from == first_packed) {
                    encoding.before = before;
                    if (before == cache::Encoding::none)
                        encoding.stats_from = sequence.statistics(finer);
                }
            }
            before = number;
            ++due[number].holders;
            due[number].replaced |= block == nullptr || sequence.guarded(place.block);
            holders.emplace_back(place, number);
            places_due[{place.sequence, place.block}] = number;
        }
        for (const auto& [place, number] : holders) {
            if (!plan.has_statistics() || place.stats_from == first_packed) continue;
            const auto& blocks = place.sequence->blocks_;
            const cache::Block* from =
                place.stats_from < blocks.size() ? blocks[place.stats_from] : nullptr;
            const auto found = places_due.find({place.sequence, place.stats_from});
            if (from != nullptr && from->packed && from->leads)
                encodings[number].stats_from = from->data;
            else if (found != places_due.end())
                encodings[number].before = found->second;
        }
    }
    if (due.empty()) return;
    // Others than the holders may be in a step, or need the block for their rollback.
    apart |= store.open_steps > 0;
    for (Due& entry : due) {
        entry.replaced |= apart && entry.block != nullptr && entry.block->refs > entry.holders;
        if (entry.replaced) entry.fresh = std::make_unique<cache::Block>();
    }
    lock.unlock();

    // Packing what is in the books is never refused, and comes into them when it is done.
    const bool booked = due.front().block == nullptr;
    cache::Slots slots(store, booked ? cache::Slots::As::packed : cache::Slots::As::scratch,
                       packed_bytes, due.size());
    for (std::size_t i = 0; i < due.size(); ++i) encodings[i].packed = slots[i];
    std::vector<std::size_t> again;  // those that another plan has packed
    for (std::size_t i = 0; i < due.size(); ++i)
        if (due[i].block != nullptr && due[i].block->packed) again.push_back(i);
    {
        const cache::Slots rows(store, cache::Slots::As::scratch, own.exact_bytes(), again.size());
        cache::Decoding decoded;
        for (std::size_t i = 0; i < again.size(); ++i) {
            const cache::Block& block = *due[again[i]].block;
            decoded[&block.plan(own)].push_back({block.data, rows[i]});
            encodings[again[i]].exact = rows[i];
        }
        cache::decode(store.device, decoded, executor);
        cache::encode_blocks(store.device, plan, encodings, executor, only);
    }
    // Who reads the keys before the values are there decodes the whole block.
    for (std::size_t i = 0; only == Part::keys && i < due.size(); ++i)
        store.device.clear(slots[i] + plan.keys().bytes(), plan.values().bytes());

    lock.lock();
    for (std::size_t i = 0; i < due.size() && !booked; ++i) store.hold(true, packed_bytes);
    for (std::size_t i = 0; i < due.size(); ++i) {
        Due& entry = due[i];
        cache::Block& block = entry.replaced ? *entry.fresh : *entry.block;
        if (entry.replaced) {
            block.refs = entry.holders;
            block.keys = entry.block != nullptr ? entry.block->keys
                                                : cache::cell_range(0, plan.block_tokens());
            if (only != Part::keys)
                block.values = entry.block != nullptr ? entry.block->values : block.keys;
            entry.made = entry.fresh.release();
        } else {
            store.pool(block.bytes(own)).deallocate(block.data);
            store.drop(block.packed, block.bytes(own));
        }
        block.data = slots.take();
        block.packed = true;
        block.finer = finer;
        block.leads = encodings[i].leads;
        if (encodings[i].anew) ++store.stats.restarted_statistics;
        ++store.stats.encoded_blocks;
    }
    store.stats.coarsened_blocks += again.size();
    for (const auto& [place, number] : holders) {
        if (!due[number].replaced) continue;
        place.sequence->let_go(place.block);
        place.sequence->blocks_[place.block] = due[number].made;
    }
}

}  // namespace lowkv
