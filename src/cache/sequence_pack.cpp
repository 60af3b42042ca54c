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
#include "cache/leader.h"
#include "cache/store.h"
#include "lowkv/cache.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

constexpr std::size_t none = ~std::size_t{0};

// A block that is due, with what it becomes.
struct Due {
    cache::Block* block = nullptr;
    std::uint32_t holders = 0;  // among the sequences that pack it
    Sequence* first_holder = nullptr;
    // A packed block whose statistics it takes over. Null: it asks the due block before it in its
    // sequence, `before`, for those that this one has.
    const std::byte* stats_from = nullptr;
    std::size_t before = none;
    // Found by find_leaders(): the due block whose statistics it takes over; its own number if it
    // makes them.
    std::size_t leader = none;
    bool uniform = false;   // makes statistics that no other block should take over
    bool replaced = false;  // `fresh` takes its place
    std::unique_ptr<cache::Block> fresh;
    QueryEnergy::Means queries;    // for statistics of its own
    cache::Block* made = nullptr;  // `fresh`, once its holders have it
};

// Whose statistics each due block takes over. A block takes what the one before it in its sequence
// has, unless that one made them for itself alone.
void find_leaders(const Device& device, const Plan& plan, std::vector<Due>& due) {
    if (!plan.has_statistics()) return;
    std::vector<std::size_t> chain;
    for (std::size_t i = 0; i < due.size(); ++i) {
        // Back to a block whose leader is known; a chain that closes is broken there.
        chain.assign(1, i);
        while (true) {
            const Due& last = due[chain.back()];
            if (last.stats_from != nullptr || last.leader != none || last.before == none ||
                std::ranges::find(chain, last.before) != chain.end())
                break;
            chain.push_back(last.before);
        }
        for (; !chain.empty(); chain.pop_back()) {
            const std::size_t number = chain.back();
            Due& its = due[number];
            if (its.stats_from != nullptr || its.leader != none) continue;
            const Due* before = its.before == none ? nullptr : &due[its.before];
            if (before != nullptr && before->stats_from != nullptr) {
                its.stats_from = before->stats_from;
            } else if (before != nullptr && before->leader != none &&
                       !due[before->leader].uniform) {
                its.leader = before->leader;
            } else {
                its.leader = number;
                its.uniform = !cache::is_varied(device, plan, its.block->data);
            }
        }
    }
}

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
    pack(blocks, executor, stats_from, std::nullopt);
}

void Sequence::pack(std::span<const std::uint32_t> blocks, Executor& executor,
                    std::span<const std::uint32_t> stats_from, std::optional<Part> only) {
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
    pack(places, false, executor, only);
}

// Of the sequence's first packed block that leads; null: it has none.
const std::byte* Sequence::statistics() const noexcept {
    const auto found = std::ranges::find_if(blocks_, [](const cache::Block* block) {
        return block != nullptr && block->packed && block->leads;
    });
    return found == blocks_.end() ? nullptr : (*found)->data;
}

void Sequence::pack(std::span<const Packing> places, bool apart, Executor& executor,
                    std::optional<Part> only) {
    if (places.empty() || places.front().sequence->plan_->scheme().exact()) return;
    const Plan& plan = *places.front().sequence->plan_;
    Store::Impl& store = places.front().sequence->store_->impl();
    std::vector<Due> due;
    std::vector<std::pair<Packing, std::size_t>> holders;  // and which of the due they hold
    std::unique_lock lock(store.mutex);
    {
        std::map<const cache::Block*, std::size_t> numbers;
        const Sequence* previous = nullptr;
        std::size_t before = none;  // the due block before, of the sequence
        for (const Packing& place : places) {
            Sequence& sequence = *place.sequence;
            if (std::exchange(previous, place.sequence) != place.sequence) before = none;
            if (!sequence.full(place.block) || sequence.packed(place.block)) continue;
            if (!holders.empty() && holders.back().first.sequence == place.sequence &&
                holders.back().first.block == place.block)
                continue;  // named twice
            cache::Block* block = sequence.blocks_[place.block];
            const auto [found, is_new] = numbers.try_emplace(block, due.size());
            if (is_new) due.emplace_back().block = block;
            Due& its = due[found->second];
            if (is_new) {
                its.first_holder = place.sequence;
                if (plan.has_statistics() && place.stats_from == first_packed) {
                    its.stats_from = sequence.statistics();
                    if (its.stats_from == nullptr) its.before = before;
                }
            }
            before = found->second;
            ++its.holders;
            its.replaced = its.replaced || sequence.guarded(place.block);
            holders.emplace_back(place, found->second);
        }
        for (const auto& [place, number] : holders) {
            const auto& blocks = place.sequence->blocks_;
            if (!plan.has_statistics() || place.stats_from >= blocks.size() ||
                blocks[place.stats_from] == nullptr)
                continue;
            const cache::Block* stats_from = blocks[place.stats_from];
            const auto found = numbers.find(stats_from);
            if (stats_from->packed && stats_from->leads)
                due[number].stats_from = stats_from->data;
            else if (found != numbers.end())
                due[number].before = found->second;
        }
    }
    if (due.empty()) return;
    for (Due& its : due) {
        its.replaced = its.replaced || (apart && its.block->refs > its.holders);
        if (its.replaced) its.fresh = std::make_unique<cache::Block>();
    }
    lock.unlock();

    find_leaders(store.device, plan, due);

    lock.lock();
    const std::size_t packed_bytes = plan.packed_bytes(), exact_bytes = plan.exact_bytes();
    cache::ReservedSlots slots(store.pool(packed_bytes), due.size());
    std::vector<BlockCopy> encoded;
    for (const bool follow : {false, true}) {
        for (std::size_t i = 0; i < due.size(); ++i) {
            const bool follows = due[i].leader != none && due[i].leader != i;
            if (follows != follow) continue;
            const std::byte* stats_from = follows ? slots[due[i].leader] : due[i].stats_from;
            if (stats_from == nullptr && plan.wants_queries())
                due[i].queries = due[i].first_holder->queries_.means();
            encoded.push_back({due[i].block->data, slots[i], stats_from,
                               due[i].queries ? due[i].queries->data() : nullptr});
        }
    }
    lock.unlock();
    try {
        store.device.encode(plan, encoded, executor, only);
        for (std::size_t i = 0; i < due.size(); ++i) {
            if (due[i].uniform) cache::mark_uniform(store.device, plan, slots[i]);
            // A reader of the keys decodes the whole block.
            if (only == Part::keys)
                store.device.clear(slots[i] + plan.keys().bytes(), plan.values().bytes());
        }
    } catch (...) {
        lock.lock();  // for the slots
        throw;
    }

    lock.lock();
    for (std::size_t i = 0; i < due.size(); ++i) store.hold(true, packed_bytes);
    for (Due& its : due) {
        std::byte* data = slots.take();
        ++store.stats.encoded_blocks;
        if (!its.uniform) its.first_holder->queries_.keep(its.queries);
        if (its.replaced) {
            its.fresh->data = data;
            its.fresh->packed = true;
            its.fresh->leads = !its.uniform;
            its.fresh->refs = its.holders;
            its.fresh->keys = its.block->keys;
            its.fresh->values = its.block->values;
            its.made = its.fresh.release();
            continue;
        }
        store.pool(exact_bytes).deallocate(its.block->data);
        store.drop(false, exact_bytes);
        its.block->data = data;
        its.block->packed = true;
        its.block->leads = !its.uniform;
    }
    for (const auto& [place, number] : holders) {
        if (!due[number].replaced) continue;
        place.sequence->let_go(place.block);
        place.sequence->blocks_[place.block] = due[number].made;
    }
}

}  // namespace lowkv
