#pragma once
// A model of blocks that is too simple to be wrong. Packed blocks are in it what the codec makes of
// their rows, bit for bit.

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "blocks_codec.h"

namespace blocks_test {

struct Block {
    Tokens tokens;         // as they are read
    std::size_t rung = 0;  // 0: rows; n: codes by the n-th plan of the ladder
    Bytes bytes = {};      // those codes
    bool leads = true;     // of a packed one: others may take its statistics over
};
using Entry = std::shared_ptr<Block>;

struct Table {
    std::vector<Entry> slots = {};  // null: absent
    std::uint32_t size = 0;         // cells; rows behind them are stale, if there are any
    // Of an open step: the block in which the size was. Rows behind that may come in place.
    const Block* kept = nullptr;
    std::uint32_t kept_size = 0;
};

struct Packing {
    Table* table;
    std::uint32_t slot;
    Tokens gathered = {};  // rows from elsewhere, for a slot that is absent
    // Whose statistics it takes over: those of a slot, or, without one, nobody's.
    std::optional<std::uint32_t> stats_from = first_packed;
    static constexpr std::uint32_t first_packed = 0xFFFFFFFE;
};

class Model {
  public:
    explicit Model(Plans ladder) : ladder_(std::move(ladder)) {}

    std::uint64_t reopened = 0, encodings = 0;

    std::uint32_t tokens() const { return ladder_.back()->block_tokens(); }
    std::size_t last_rung() const { return ladder_.size(); }
    const Plans& ladder() const { return ladder_; }
    const Plan& plan(std::size_t rung) const { return *ladder_[rung - 1]; }
    std::size_t cost(std::size_t rung) const {
        return rung == 0 ? ladder_.back()->exact_bytes() : plan(rung).packed_bytes();
    }
    const Block* block(const Table& table, std::uint32_t slot) const {
        return slot < table.slots.size() ? table.slots[slot].get() : nullptr;
    }
    bool full(const Table& table, std::uint32_t slot) const {
        const Block* its = block(table, slot);
        return its != nullptr && std::ranges::none_of(its->tokens, [](const Token& token) {
                   return token.key.empty() || token.value.empty();
               });
    }
    // What is read of a cell.
    Token at(const Table& table, std::uint32_t cell) const {
        const Block* its = cell < table.size ? block(table, cell / tokens()) : nullptr;
        return shown(its != nullptr ? its->tokens[cell % tokens()] : Token());
    }
    Token shown(Token token) const {
        for (Row* row : {&token.key, &token.value})
            row->resize(plan(last_rung()).shape().channels());
        return token;
    }

    // The slot's block can be written: the table's own, rows. Of rows that are appended, the first
    // one.
    Block& touch(Table& table, std::uint32_t slot, std::uint32_t first = 0) {
        if (slot >= table.slots.size()) table.slots.resize(slot + 1);
        Entry& entry = table.slots[slot];
        if (!entry) entry = make({Tokens(tokens())});
        if (entry->rung > 0) ++reopened;
        const bool in_place =
            entry->rung == 0 && entry.get() == table.kept && first >= table.kept_size;
        if (entry.use_count() > (in_place ? 2 : 1)) entry = make(*entry);
        entry->rung = 0;
        return *entry;
    }
    // Bytes more that writing cells of these slots takes.
    long cost_of_writing(const Table& table, const std::set<std::uint32_t>& slots) const {
        long bytes = 0;
        for (const std::uint32_t slot : slots) {
            const Block* its = block(table, slot);
            const bool shared = its == nullptr || table.slots[slot].use_count() > 1;
            if (shared || its->rung > 0) bytes += static_cast<long>(cost(0));
            if (!shared && its->rung > 0) bytes -= static_cast<long>(cost(its->rung));
        }
        return bytes;
    }
    void grow(Table& table, std::uint32_t size) const { table.size = std::max(table.size, size); }
    Token& write(Table& table, std::uint32_t cell, std::uint32_t first = 0) {
        grow(table, cell + 1);
        return touch(table, cell / tokens(), first).tokens[cell % tokens()];
    }
    void append(Table& table, const Tokens& rows) {
        const std::uint32_t first = table.size;
        for (const Token& row : rows) write(table, table.size, first) = row;
    }
    // A table that is kept for a rollback.
    void begin(Table& table) const {
        table.kept = block(table, table.size / tokens());
        table.kept_size = table.size;
    }
    // As an owner does that keeps an order: a packed block that is cut is opened.
    bool cuts(const Table& table, std::uint32_t size) const {
        const Block* its = block(table, size / tokens());
        return size < table.size && size % tokens() != 0 && its != nullptr && its->rung > 0;
    }
    void truncate(Table& table, std::uint32_t size) {
        if (size >= table.size) return;
        if (cuts(table, size)) touch(table, size / tokens());
        table.size = size;
        table.slots.resize((size + tokens() - 1) / tokens());
    }
    void drop(Table& table, std::uint32_t slot) const {
        if (slot < table.slots.size()) table.slots[slot] = nullptr;
    }
    void put(Table& table, std::uint32_t slot, Block block) {
        grow(table, (slot + 1) * tokens());
        if (slot >= table.slots.size()) table.slots.resize(slot + 1);
        table.slots[slot] = make(std::move(block));
    }
    // Nothing is shared with it.
    Table copy(const Table& table) {
        Table copy = table;
        copy.kept = nullptr;
        for (Entry& entry : copy.slots)
            if (entry) entry = make(*entry);
        return copy;
    }

    // In the order of tables and their slots. Those that can't be packed stay as they are. `apart`:
    // a block that others share is replaced, and not changed for them.
    void pack(std::vector<Packing> places, std::size_t rung, bool apart) {
        std::erase_if(places, [&](const Packing& its) {
            return its.gathered.empty() &&
                   (!full(*its.table, its.slot) || block(*its.table, its.slot)->rung == rung);
        });
        std::map<const Block*, long> holders;
        for (const Packing& its : places)
            if (its.gathered.empty()) ++holders[block(*its.table, its.slot)];
        std::vector<Due> due;
        DueAt due_at;
        std::map<const Block*, std::size_t> numbers;
        for (const Packing& its : places) {
            Block* old = its.gathered.empty() ? its.table->slots[its.slot].get() : nullptr;
            std::size_t number = due.size();
            if (old != nullptr) number = numbers.try_emplace(old, number).first->second;
            if (number == due.size()) {
                const bool shared =
                    old != nullptr && its.table->slots[its.slot].use_count() > holders[old];
                Statistics statistics = stats_for(its, rung, due, due_at);
                Block now{old != nullptr ? old->tokens : its.gathered, rung};
                now.bytes = encoded(plan(rung), now.tokens, statistics);
                now.tokens = decoded(plan(rung), now.bytes);
                now.leads = statistics.leads;
                due.push_back({old, old == nullptr || (apart && shared), std::move(now),
                               std::move(statistics)});
                ++encodings;
            }
            due_at[{its.table, its.slot}] = number;
        }
        std::vector<Entry> made(due.size());
        for (std::size_t i = 0; i < due.size(); ++i) {
            if (due[i].replaced)
                made[i] = make(std::move(due[i].now));
            else
                *due[i].block = std::move(due[i].now);
        }
        for (const auto& [place, number] : due_at) {
            if (!due[number].replaced) continue;
            auto& [table, slot] = place;
            grow(*table, due[number].block == nullptr ? (slot + 1) * tokens() : 0);
            if (slot >= table->slots.size()) table->slots.resize(slot + 1);
            table->slots[slot] = made[number];
        }
    }

    // Of all live blocks, shared ones once.
    StoreStats books() {
        std::erase_if(all_, [](const auto& block) { return block.expired(); });
        StoreStats books;
        for (const auto& its : all_) {
            const std::size_t rung = its.lock()->rung;
            (rung > 0 ? books.packed_blocks : books.exact_blocks) += 1;
            (rung > 0 ? books.packed_bytes : books.exact_bytes) += cost(rung);
        }
        return books;
    }

  private:
    struct Due {
        Block* block;  // null: it is absent
        bool replaced;
        Block now;
        Statistics statistics;  // that it took over, or made
    };
    using DueAt = std::map<std::pair<Table*, std::uint32_t>, std::size_t>;

    Plans ladder_;  // from the most bits to the fewest
    std::vector<std::weak_ptr<Block>> all_;

    Entry make(Block block) {
        const Entry made = std::make_shared<Block>(std::move(block));
        all_.push_back(made);
        return made;
    }
    // Those of the slot before it that is due too, or the newest there are; or as it is told.
    Statistics stats_for(const Packing& its, std::size_t rung, const std::vector<Due>& due,
                         const DueAt& due_at) const {
        if (its.stats_from == Packing::first_packed) {
            const auto next = due_at.lower_bound({its.table, its.slot});
            if (next != due_at.begin() && std::prev(next)->first.first == its.table)
                return due[std::prev(next)->second].statistics;
            for (auto slot = its.table->slots.rbegin(); slot != its.table->slots.rend(); ++slot)
                if (*slot && (*slot)->rung == rung && (*slot)->leads) return {(*slot)->bytes, true};
            return {};
        }
        if (!its.stats_from) return {};
        const Block* named = block(*its.table, *its.stats_from);
        if (named != nullptr && named->rung == rung && named->leads) return {named->bytes, true};
        const auto found = due_at.find({its.table, *its.stats_from});
        return found != due_at.end() ? due[found->second].statistics : Statistics();
    }
};

}  // namespace blocks_test
