// Packing the blocks of tables, some of which share them: in place, once more, or of rows gathered
// from another table; and packed bytes that come from elsewhere.

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "cache/block.h"
#include "cache/encode.h"
#include "cache/store.h"
#include "lowkv/cache.h"
#include "lowkv/device.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... what) {
    throw Error(ErrorCode::invalid_argument, "Blocks: ", what...);
}

bool is_before(const Blocks::Packing& a, const Blocks::Packing& b) noexcept {
    return a.table != b.table ? std::less<>()(a.table, b.table) : a.slot < b.slot;
}

// One by one where blocks have other lengths: that takes memory and may fail.
template <typename Gather>
void gather_each(std::size_t count, bool alike, Executor& executor, const Gather& gather) {
    if (alike) return executor.parallel_for(count, [&](std::size_t i, unsigned) { gather(i); });
    for (std::size_t i = 0; i < count; ++i) gather(i);
}

}  // namespace

// Of the table's last packed block of that rung that leads; null: it has none.
const std::byte* Blocks::statistics(std::uint8_t rung) const noexcept {
    const auto found = std::find_if(blocks_.rbegin(), blocks_.rend(), [&](const auto* block) {
        return block != nullptr && block->rung == rung && block->leads;
    });
    return found == blocks_.rend() ? nullptr : (*found)->data;
}

// One call of pack().
class Blocks::Packer {
  public:
    Packer(std::span<const Packing> places, const How& how, Executor& executor)
        : places_(places),
          how_(how),
          executor_(executor),
          own_(places.front().table->plan()),
          plan_(how.rung > 0 ? places.front().table->plan_of(how.rung) : own_),
          store_(places.front().table->store_->impl()),
          gathers_(!places.front().cells.empty()) {}

    void run() {
        {
            const std::scoped_lock lock(store_.mutex);
            find_due();
            if (due_.empty()) return;
            find_statistics();
        }
        for (Due& due : due_)
            if (due.replaced) due.fresh = std::make_unique<cache::Block>();
        for (const auto& [place, number] : holders_) place->table->reserve(place->slot);
        // Packing in place is never refused: it comes into the books when it is done.
        using As = cache::Slots::As;
        const As as = !gathers_ ? As::scratch : how_.rung > 0 ? As::packed : As::exact;
        cache::Slots slots(store_, as, how_.rung > 0 ? plan_.packed_bytes() : plan_.exact_bytes(),
                           due_.size(), freed_bytes_);
        make(slots);
        const std::scoped_lock lock(store_.mutex);
        finish(slots);
    }

  private:
    // A block that is due, with what it becomes.
    struct Due {
        cache::Block* block = nullptr;  // null: its rows are elsewhere
        const Packing* place = nullptr;
        std::uint32_t holders = 0;  // among the tables that pack it
        bool replaced = false;      // `fresh` takes its place
        std::unique_ptr<cache::Block> fresh = nullptr;
    };

    std::span<const Packing> places_;
    const How& how_;
    Executor& executor_;
    const Plan &own_, &plan_;
    Store::Impl& store_;
    bool gathers_;
    std::vector<Due> due_;
    std::vector<cache::Encoding> encodings_;                       // of the due
    std::vector<std::pair<const Packing*, std::size_t>> holders_;  // and which they hold
    std::size_t freed_bytes_ = 0;  // of blocks that gathered rows take the place of

    void find_due() {
        std::map<const cache::Block*, std::size_t> numbers;
        for (const Packing& place : places_) {
            Blocks& table = *place.table;
            cache::Block* held = table.at(place.slot);
            if (gathers_) {
                if (held != nullptr && held->refs == 1 && !table.guarded(place.slot))
                    freed_bytes_ += table.bytes(*held);
                held = nullptr;
            } else if (!table.full(place.slot) || held->rung == how_.rung ||
                       (!holders_.empty() && holders_.back().first->table == &table &&
                        holders_.back().first->slot == place.slot)) {
                continue;
            }
            std::size_t number = due_.size();
            if (held != nullptr) number = numbers.try_emplace(held, number).first->second;
            if (number == due_.size()) due_.push_back({held, &place});
            ++due_[number].holders;
            due_[number].replaced |= gathers_ || table.guarded(place.slot);
            holders_.emplace_back(&place, number);
        }
        // Others than the holders may be in a step, or need the block for their rollback.
        const bool apart = how_.apart || store_.open_steps > 0;
        for (Due& due : due_) due.replaced |= apart && !gathers_ && due.block->refs > due.holders;
    }

    void find_statistics() {
        encodings_.resize(due_.size());
        for (std::size_t i = 0; i < due_.size(); ++i)
            encodings_[i].queries = due_[i].place->queries;
        if (how_.rung == 0 || !plan_.has_statistics()) return;
        for (std::size_t h = 0; h < holders_.size(); ++h) {
            const auto [place, number] = holders_[h];
            const Blocks& table = *place->table;
            cache::Encoding& encoding = encodings_[number];
            const bool follows = h > 0 && holders_[h - 1].first->table == &table;
            if (place->stats_from == newest) {
                if (due_[number].place != place) continue;  // a shared block's first holder says
                if (follows)
                    encoding.before = holders_[h - 1].second;
                else
                    encoding.stats_from = table.statistics(how_.rung);
                continue;
            }
            const cache::Block* from = table.at(place->stats_from);
            const auto found = std::ranges::find_if(holders_, [&](const auto& holder) {
                return holder.first->table == &table && holder.first->slot == place->stats_from;
            });
            if (from != nullptr && from->rung == how_.rung && from->leads)
                encoding.stats_from = from->data;
            else if (found != holders_.end())
                encoding.before = found->second;
        }
    }

    // Rows where they are, if they are one exact block as it is.
    const std::byte* whole(std::span<const std::uint32_t> cells) const noexcept {
        const auto tokens = static_cast<std::uint32_t>(cells.size());
        if (how_.rung == 0 || how_.rows->plan().block_tokens() != tokens || cells[0] % tokens != 0)
            return nullptr;  // no_cell isn't
        for (std::uint32_t t = 1; t < tokens; ++t)
            if (cells[t] != cells[0] + t) return nullptr;
        return how_.rows->at(cells[0] / tokens)->data;
    }

    // What the slots hold, out of rows that are decoded or gathered first where they must be.
    void make(const cache::Slots& slots) {
        std::vector<std::size_t> copied;  // of the due
        cache::Decoding decoded;
        for (std::size_t i = 0; i < due_.size(); ++i) {
            const cache::Block* block = due_[i].block;
            encodings_[i].packed = slots[i];
            if (gathers_)
                encodings_[i].exact = whole(due_[i].place->cells);
            else if (block->rung == 0)
                encodings_[i].exact = block->data;
            if (encodings_[i].exact == nullptr) copied.push_back(i);
        }
        const bool packs = how_.rung > 0;
        const cache::Slots copies(store_, cache::Slots::As::scratch, own_.exact_bytes(),
                                  packs ? copied.size() : 0);
        for (std::size_t c = 0; c < copied.size(); ++c) {
            const Due& due = due_[copied[c]];
            if (packs) encodings_[copied[c]].exact = copies[c];
            if (!gathers_)
                decoded[&due.place->table->plan_of(due.block->rung)].push_back(
                    {due.block->data, copies[c]});
        }
        if (gathers_)
            gather_each(copied.size(), how_.rows->plan().block_tokens() == own_.block_tokens(),
                        executor_, [&](std::size_t c) {
                            how_.rows->gather(due_[copied[c]].place->cells, own_,
                                              packs ? copies[c] : slots[c]);
                        });
        cache::decode(store_.device, decoded, executor_);
        if (packs) cache::encode_blocks(store_.device, plan_, encodings_, executor_, how_.only);
        // Who reads the keys before the values are there decodes the whole block.
        for (std::size_t i = 0; how_.only == Part::keys && i < due_.size(); ++i)
            store_.device.clear(slots[i] + plan_.keys().bytes(), plan_.values().bytes());
    }

    void finish(cache::Slots& slots) noexcept {
        const bool packs = how_.rung > 0;
        for (std::size_t i = 0; i < due_.size() && !gathers_; ++i)
            store_.hold(true, plan_.packed_bytes());
        for (std::size_t i = 0; i < due_.size(); ++i) {
            Due& due = due_[i];
            cache::Block& block = due.replaced ? *due.fresh : *due.block;
            if (due.block != nullptr && due.block->rung > 0) ++store_.stats.coarsened_blocks;
            if (due.replaced) {
                block.refs = due.holders;
                block.keys = due.block != nullptr ? due.block->keys
                                                  : cache::cell_range(0, plan_.block_tokens());
                if (how_.only != Part::keys) block.values = block.keys;
            } else {
                store_.drop(block.rung > 0, due.place->table->bytes(block), block.data);
            }
            block.data = slots.take();
            block.rung = how_.rung;
            block.leads = encodings_[i].leads;
            if (encodings_[i].anew) ++store_.stats.restarted_statistics;
            if (packs) ++store_.stats.encoded_blocks;
            if (due.replaced) due.block = due.fresh.release();
        }
        for (const auto& [place, number] : holders_) {
            if (!due_[number].replaced) continue;
            auto& blocks = place->table->blocks_;
            if (place->slot >= blocks.size()) blocks.resize(std::size_t{place->slot} + 1);
            place->table->let_go(place->slot);
            blocks[place->slot] = due_[number].block;
        }
    }
};

bool Blocks::waits_for_values(std::uint32_t slot) const noexcept {
    const cache::Block* block = at(slot);
    return block != nullptr && block->rung > 0 && block->values.none() && block->refs == 1 &&
           !guarded(slot);
}

void Blocks::pack(std::vector<Packing> places, const How& how, Executor& executor) {
    if (places.empty()) return;
    const bool gathers = !places.front().cells.empty();
    const Plan& plan = places.front().table->plan();
    if (how.rung > places.front().table->ladder().size())
        refuse("rung ", how.rung, " of a ladder of ", places.front().table->ladder().size());
    if (plan.scheme().exact() && !gathers) return;
    if ((how.rung == 0 && !gathers) || (how.rung > 0 && plan.scheme().exact()))
        refuse("rows are packed by a plan that packs");
    const Plan& rows = how.rows != nullptr ? how.rows->plan() : plan;
    const bool alike =
        cache::same_rows(rows, plan) ||
        (rows.shape() == plan.shape() && !rows.has_positions() && !plan.has_positions());
    if (how.rows != nullptr && (!alike || &how.rows->device() != &places.front().table->device()))
        refuse("the other table has exact rows of another form, or lies on another device");
    const std::uint32_t tokens = plan.block_tokens();
    for (const Packing& place : places) {
        if (gathers != (place.cells.size() == tokens))
            refuse(place.cells.size(), " cells for a block of ", tokens, " tokens");
        place.table->check_cell((std::uint64_t{place.slot} + 1) * tokens - 1);
        for (const std::uint32_t cell : place.cells)
            if (cell != no_cell &&
                (how.rows == nullptr || how.rows->at(cell / rows.block_tokens()) == nullptr ||
                 how.rows->packed(cell / rows.block_tokens())))
                refuse("cell ", cell, " of the rows' table is not exact");
    }
    std::ranges::sort(places, is_before);
    if (gathers && std::ranges::adjacent_find(places, std::not_fn(is_before)) != places.end())
        refuse("a slot is named twice");
    if (how.only == Part::values) return pack_values(places, how, executor);
    Packer(places, how, executor).run();
}

void Blocks::pack_values(std::span<const Packing> places, const How& how, Executor& executor) {
    Blocks& table = *places.front().table;
    const Plan& plan = table.plan_of(how.rung);
    const cache::Slots copies(table.store_->impl(), cache::Slots::As::scratch, plan.exact_bytes(),
                              places.size());
    std::vector<BlockCopy> encoded;
    for (const Packing& place : places) {
        if (place.table != &table || table.rung(place.slot) != how.rung ||
            !table.waits_for_values(place.slot))
            refuse("slot ", place.slot, " doesn't wait for its values");
        encoded.push_back({copies[encoded.size()], table.at(place.slot)->data});
    }
    gather_each(places.size(), how.rows->plan().block_tokens() == plan.block_tokens(), executor,
                [&](std::size_t i) { how.rows->gather(places[i].cells, plan, copies[i]); });
    table.device().encode(plan, encoded, executor, Part::values);
    for (const Packing& place : places)
        table.at(place.slot)->values = cache::cell_range(0, plan.block_tokens());
}

void Blocks::put(std::span<const std::uint32_t> slots, std::span<const std::byte* const> bytes,
                 std::uint8_t rung, std::optional<Part> only) {
    if (plan().scheme().exact() || rung == 0 || rung > ladder_->size())
        refuse("packed bytes are put on a rung that packs");
    if (in_step()) refuse("packed bytes are put between steps");
    if (bytes.size() != slots.size()) refuse("each slot has its bytes");
    if (slots.empty()) return;
    const Plan& its = plan_of(rung);
    std::size_t absent = 0;
    const std::uint32_t last = std::ranges::max(slots);
    check_cell((std::uint64_t{last} + 1) * its.block_tokens() - 1);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const bool is_absent = at(slots[i]) == nullptr;
        const bool waits = waits_for_values(slots[i]) && this->rung(slots[i]) == rung;
        if (std::ranges::count(slots, slots[i]) > 1 ||
            !((is_absent && only != Part::values) || (waits && only != Part::keys)))
            refuse("slot ", slots[i], " is named twice, is there, or waits for no values");
        absent += is_absent ? 1 : 0;
        if (only != Part::values && !cache::names_all_channels(its, bytes[i]))
            throw Error(ErrorCode::invalid_image, "its codes lack channels of the keys");
    }
    std::vector<std::unique_ptr<cache::Block>> fresh(absent);
    for (auto& block : fresh) block = std::make_unique<cache::Block>();
    reserve(last);
    cache::Slots taken(store_->impl(), cache::Slots::As::packed, its.packed_bytes(), absent);

    const std::size_t keys_bytes = its.keys().bytes(), values_bytes = its.values().bytes();
    const cache::Cells all = cache::cell_range(0, its.block_tokens());
    if (last >= blocks_.size()) blocks_.resize(std::size_t{last} + 1);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        cache::Block*& block = blocks_[slots[i]];
        if (block == nullptr) {
            block = fresh[--absent].release();
            block->data = taken.take();
            block->rung = rung;
        }
        const std::byte* from = bytes[i];
        if (only != Part::values) {
            device().copy_in(block->data, from, keys_bytes);
            block->leads = cache::leads(its, from);
            block->keys = all;
            from += keys_bytes;
        }
        if (only != Part::keys) {
            device().copy_in(block->data + keys_bytes, from, values_bytes);
            block->values = all;
        } else {
            device().clear(block->data + keys_bytes, values_bytes);
        }
    }
    device().finish();
}

}  // namespace lowkv
