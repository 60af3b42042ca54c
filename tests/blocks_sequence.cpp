// Sequences that share a store, and the tables that a llama.cpp stream has of them: rows by cell,
// packed blocks by plan, gathered from rows and packed again from finer codes.

#include <set>

#include "blocks_owner.h"
#include "cache_common.h"
#include "lowkv/serial.h"

using namespace lowkv;
using namespace blocks_test;

namespace {

struct Case {
    std::string scheme;
    Shape shape;
    std::string retention;
    std::vector<std::string> finer = {};
    std::uint32_t budget = 0;  // in exact blocks
    RowType rows = RowType::f16;
};

struct State {
    Table table;
    std::size_t rung;  // of its plan
};
std::span<Table> tables_of(State& its) { return {&its.table, 1}; }

class Sequences : public Sides<Sequence, State> {
  public:
    explicit Sequences(const Case& c)
        : Sides(c.finer, c.scheme, c.shape, c.rows),
          retention_(parse_scheme(c.retention).retention) {
        store = lowkv::test::make_store(c.budget * plan->exact_bytes());
        for (std::size_t rung = 1; rung <= model.last_rung(); ++rung) add(rung);
    }

    static std::span<const Kind<Sequences>> kinds() {
        using S = Sequences;
        static constexpr Kind<S> all[] = {
            {"append", 25, &S::append},     {"write", 18, &S::write},
            {"truncate", 8, &S::truncate},  {"pack", 12, &S::pack_old},
            {"pack these", 8, &S::pack},    {"gather", 8, &S::gather},
            {"coarsen", 5, &S::coarsen},    {"put", 5, &S::put},
            {"drop", 3, &S::drop},          {"fork", 6, &S::fork},
            {"leave", 4, &S::leave},        {"begin", 5, &S::begin},
            {"commit", 3, &S::commit},      {"roll back", 4, &S::rollback},
            {"save and load", 3, &S::load}, {"move", 2, &S::move}};
        return all;
    }

    void check() {
        if (!in_step()) check_books();
        const StoreStats stats = store->stats();
        REQUIRE(stats.reopened_blocks == model.reopened);
        REQUIRE(stats.encoded_blocks == model.encodings);
        for (const Side& side : sides) check_blocks(side);
        if (below(3) == 0) check_rows(any());
    }

  private:
    Retention retention_;

    void add(std::size_t rung) {
        sides.push_back({Sequence(store, model.ladder()[rung - 1], retention_), {{}, rung}});
    }

    // ---- operations ----

    void append() {
        Side& side = any();
        const std::uint32_t n = below(3) == 0 ? 1 : below(3 * model.tokens());
        const Tokens tokens = rows(n);
        Buffer keys(plan->rows(), plan->shape(), 1, n), values = keys;
        blocks_test::put(keys, values, 0, tokens);
        std::set<std::uint32_t> slots;
        for (std::uint32_t i = 0; i < n; ++i)
            slots.insert((side.now.table.size + i) / model.tokens());
        if (!succeeds(model.cost_of_writing(side.now.table, slots), [&] {
                side.object.append(rows_of(keys, plan->rows()), rows_of(values, plan->rows()), n);
            }))
            return;
        model.append(side.now.table, tokens);
    }

    // Runs, single cells, holes; keys, values or both; of floats a cell may be named twice.
    void write() {
        Side& side = any();
        const bool floats = below(3) == 0;
        std::vector<std::uint32_t> cells;
        const std::uint32_t end =
            side.now.table.size + 1 + (below(4) == 0 ? 3 * model.tokens() : 0);
        for (std::uint32_t runs = 1 + below(3); runs > 0; --runs) {
            std::uint32_t cell = below(end);
            for (std::uint32_t n = 1 + below(below(2) == 0 ? 3 : model.tokens()); n > 0; --n)
                if (floats || std::ranges::find(cells, cell) == cells.end())
                    cells.push_back(cell++);
        }
        const std::uint32_t parts = floats ? 1 + below(2) : 1 + below(3);
        const Tokens tokens = rows(cells.size());
        Buffer keys(plan->rows(), plan->shape(), 1, cells.size()), values = keys;
        blocks_test::put(keys, values, 0, tokens);
        std::set<std::uint32_t> slots;
        for (const std::uint32_t cell : cells) slots.insert(cell / model.tokens());
        const std::size_t channels = plan->shape().channels(), stride = channels + below(3);
        Row numbers(stride * cells.size(), NAN);
        for (std::size_t i = 0; i < cells.size(); ++i)
            std::ranges::copy(parts == 1 ? tokens[i].key : tokens[i].value,
                              numbers.begin() + static_cast<std::ptrdiff_t>(i * stride));
        if (!succeeds(model.cost_of_writing(side.now.table, slots), [&] {
                if (floats && parts == 1)
                    side.object.write_keys(cells, numbers.data(), stride);
                else if (floats)
                    side.object.write_values(cells, numbers.data(), stride);
                else if (parts == 1)
                    side.object.write_keys(cells, rows_of(keys, plan->rows()), {}, executor());
                else if (parts == 2)
                    side.object.write_values(cells, rows_of(values, plan->rows()), executor());
                else
                    side.object.write(cells, rows_of(keys, plan->rows()),
                                      rows_of(values, plan->rows()), {}, executor());
            }))
            return;
        for (std::size_t i = 0; i < cells.size(); ++i) {
            Token& token = model.write(side.now.table, cells[i]);
            if (parts != 2) token.key = tokens[i].key;
            if (parts != 1) token.value = tokens[i].value;
        }
    }

    void truncate() {
        Side& side = any();
        const std::uint32_t back = below(2) == 0 ? below(5) : below(2 * model.tokens());
        const std::uint32_t size = side.now.table.size - std::min(side.now.table.size, back);
        side.object.truncate(size);
        model.truncate(side.now.table, size);
    }

    // `pack` of the sequence, of these slots.
    template <class F>
    void pack(Side& side, std::vector<Packing> places, F pack) {
        if (!succeeds(0, pack) || exact()) return;
        model.pack(std::move(places), side.now.rung, in_step());
    }
    void pack_old() {
        Side& side = any();
        const std::uint32_t left = left_window(retention_, side.now.table.size);
        std::vector<Packing> old;
        for (std::uint32_t slot = 0; (slot + 1) * model.tokens() <= left; ++slot)
            if (slot * model.tokens() >= retention_.sinks) old.push_back({&side.now.table, slot});
        pack(side, std::move(old), [&] { side.object.pack(executor()); });
    }
    void pack() {
        Side& side = any();
        std::set<std::uint32_t> slots;
        for (int i = 0; i < 4; ++i) slots.insert(below(side.now.table.slots.size() + 2));
        std::vector<std::uint32_t> order(slots.begin(), slots.end()), stats;
        std::vector<Packing> places;
        for (const std::uint32_t slot : slots) places.push_back({&side.now.table, slot});
        if (below(3) == 0) stats = choose_stats(places);
        pack(side, std::move(places), [&] { side.object.pack(order, executor(), stats); });
    }
    // Of slots that are packed, or are to be before.
    std::vector<std::uint32_t> choose_stats(std::span<Packing> places) {
        std::vector<std::uint32_t> slots;
        for (std::size_t i = 0; i < places.size(); ++i) {
            Packing& its = places[i];
            its.stats_from.reset();
            const std::uint32_t other = below(its.table->slots.size() + 1);
            const Block* block = model.block(*its.table, other);
            if (i > 0 && below(2) == 0)
                its.stats_from = places[below(i)].slot;
            else if (block != nullptr && block->rung > 0 && below(2) == 0)
                its.stats_from = other;
            slots.push_back(its.stats_from.value_or(Sequence::no_cell));
        }
        return slots;
    }

    // Slots of the side that are absent, ascending.
    std::vector<std::uint32_t> absent(const Side& side, std::size_t most) {
        std::set<std::uint32_t> slots;
        for (std::size_t i = 0; i < most; ++i) {
            const std::uint32_t slot = below(side.now.table.slots.size() + 3);
            if (model.block(side.now.table, slot) == nullptr) slots.insert(slot);
        }
        // A cut block is opened before, and stays open where the rest fails.
        calm = side.now.table.cut;
        if (calm && store->stats().budget_bytes > 0) slots.clear();
        return {slots.begin(), slots.end()};
    }

    void gather() {
        Side &side = any(), &source = any();
        std::vector<std::uint32_t> known;
        for (std::uint32_t cell = 0; cell < source.now.table.size; ++cell) {
            const Block* block = model.block(source.now.table, cell / model.tokens());
            if (block != nullptr && block->rung == 0) known.push_back(cell);
        }
        const std::vector<std::uint32_t> slots = absent(side, 3);
        if (&side == &source || known.empty() || slots.empty()) return;
        std::vector<std::uint32_t> cells;
        std::vector<Packing> places;
        for (const std::uint32_t slot : slots) {
            Tokens tokens;
            std::size_t at = below(known.size());
            // 0: one block as it is, if it is. 3: of few different rows.
            const std::uint32_t kind = below(4);
            if (kind == 0) at = at / model.tokens() * model.tokens();
            for (std::uint32_t t = 0; t < model.tokens(); ++t, ++at) {
                if (kind == 1 && below(4) == 0) at = below(known.size());
                const bool missing = kind >= 2 && (below(4) == 0) == (kind == 2);
                cells.push_back(missing ? Sequence::no_cell : known[at % known.size()]);
                const Token token = model.at(source.now.table, known[at % known.size()]);
                if (!missing) tokens.resize(t, tokens.empty() ? token : tokens.back());
                if (!missing) tokens.push_back(token);
            }
            tokens.resize(model.tokens(), tokens.empty() ? model.shown({}) : tokens.back());
            places.push_back({&side.now.table, slot, std::move(tokens)});
        }
        std::vector<std::uint32_t> stats;
        if (below(3) == 0) stats = choose_stats(places);
        const auto growth =
            static_cast<long>(slots.size() * model.cost(exact() ? 0 : side.now.rung));
        if (!exact() && below(2) == 0) {
            if (!succeeds(growth, [&] {
                    side.object.pack_keys_from(source.object, slots, cells, executor(), stats);
                }))
                return;
            for (const std::uint32_t slot : slots) {
                CHECK_FALSE(side.object.full(slot));
                CHECK_FALSE(side.object.has_values(slot));
            }
            while (!succeeds(0, [&] {
                side.object.pack_values_from(source.object, slots, cells, executor());
            })) {
            }
        } else if (!succeeds(growth, [&] {
                       side.object.pack_from(source.object, slots, cells, executor(), stats);
                   })) {
            return;
        }
        model.grow(side.now.table, (slots.back() + 1) * model.tokens());
        if (!exact()) return model.pack(std::move(places), side.now.rung, true);
        for (Packing& its : places) model.put(side.now.table, its.slot, {std::move(its.gathered)});
    }

    // A finer sequence's packed blocks, packed again.
    void coarsen() {
        Side &side = any(), &source = any();
        if (source.now.rung >= side.now.rung || side.now.table.cut) return;
        std::vector<std::uint32_t> slots = absent(side, 8);
        std::erase_if(slots, [&](std::uint32_t slot) {
            return !model.full(source.now.table, slot) ||
                   model.block(source.now.table, slot)->rung == 0;
        });
        if (slots.empty()) return;
        std::vector<Packing> places;
        for (const std::uint32_t slot : slots)
            places.push_back({&side.now.table, slot, model.block(source.now.table, slot)->tokens});
        if (succeeds(static_cast<long>(slots.size() * model.cost(side.now.rung)),
                     [&] { side.object.pack_again_from(source.object, slots, executor()); }))
            model.pack(std::move(places), side.now.rung, true);
    }

    // Codes as a state has them, at once or keys first.
    void put() {
        Side &side = any(), &source = any();
        std::vector<const Block*> blocks;
        for (const Entry& block : source.now.table.slots)
            if (block != nullptr && block->rung > 0) blocks.push_back(block.get());
        const std::vector<std::uint32_t> slots = absent(side, 3);
        if (source.now.rung != side.now.rung || blocks.empty() || slots.empty() || side.begun)
            return;
        std::vector<const std::byte*> bytes, values;
        std::vector<Block> put;
        for (std::size_t i = 0; i < slots.size(); ++i) {
            put.push_back(*blocks[below(blocks.size())]);
            put.back().leads = cache::leads(model.plan(side.now.rung), put.back().bytes.data());
            bytes.push_back(put.back().bytes.data());  // which stay where they are
            values.push_back(bytes.back() + model.plan(side.now.rung).keys().bytes());
        }
        const bool whole = below(2) == 0;
        if (!succeeds(static_cast<long>(slots.size() * model.cost(side.now.rung)), [&] {
                side.object.put_packed(slots, bytes,
                                       whole ? std::nullopt : std::optional(Part::keys));
            }))
            return;
        if (!whole && below(2) == 0)
            side.object.put_packed(slots, values, Part::values);
        else if (!whole)
            side.object.put_packed(slots, bytes);
        for (std::size_t i = 0; i < slots.size(); ++i)
            model.put(side.now.table, slots[i], std::move(put[i]));
    }

    void drop() {
        Side& side = any();
        const std::uint32_t slots[] = {below(side.now.table.slots.size() + 2), 1000};
        side.object.drop(slots);
        model.drop(side.now.table, slots[0]);
    }

    void leave() {
        const std::size_t rung = sides[below(sides.size())].now.rung;
        const auto same = [&](const Side& side) { return side.now.rung == rung; };
        const auto first = std::ranges::find_if(sides, same);
        sides.erase(first);
        if (std::ranges::none_of(sides, same)) add(rung);
    }
    void move() {
        Side& side = any();
        Sequence taken = std::move(side.object);
        Sequence other(store, model.ladder()[side.now.rung - 1], retention_);
        other = std::move(taken);
        side.object = std::move(other);
    }

    // Whether it looks like one that was appended to and packed in order: no row is missing, and
    // what is packed follows the sinks without a gap.
    bool is_in_order(const Table& table) const {
        std::uint32_t packed = (retention_.sinks + model.tokens() - 1) / model.tokens();
        for (std::uint32_t cell = 0; cell < table.size; ++cell) {
            const std::uint32_t slot = cell / model.tokens(), row = cell % model.tokens();
            const Block* block = model.block(table, slot);
            if (block == nullptr || block->tokens[row].key.empty() ||
                block->tokens[row].value.empty())
                return false;
            if (block->rung == 0 || row > 0) continue;
            if (slot != packed) return false;
            ++packed;
        }
        return true;
    }

    // Through an image, where it has one.
    void load() {
        Side& side = any();
        if (!is_in_order(side.now.table)) {
            CHECK_THROWS_AS(save_sequence(side.object), Error);
            return;
        }
        const std::vector<std::byte> image = save_sequence(side.object);
        Table table = model.copy(side.now.table);
        const auto& its_plan = model.ladder()[side.now.rung - 1];
        for (std::uint32_t slot = 0; slot < table.slots.size(); ++slot) {
            Entry& entry = table.slots[slot];
            if (entry && entry->rung > 0)  // what the bytes say
                entry->leads = cache::leads(*its_plan, entry->bytes.data());
            if (!entry || entry->rung > 0) continue;
            const auto shown = std::min(model.tokens(), table.size - slot * model.tokens());
            std::fill(entry->tokens.begin() + shown, entry->tokens.end(), Token());
            if (entry->tokens == Tokens(model.tokens())) entry = nullptr;
        }
        if (table.cut) table.cut = table.slots.back() && table.slots.back()->rung > 0;
        long growth = 0;
        for (const Entry& entry : table.slots)
            growth += entry ? static_cast<long>(model.cost(entry->rung)) : 0;
        std::optional<Sequence> made;
        if (!succeeds(growth, [&] { made = load_sequence(image, store, its_plan, retention_); }))
            return;
        CHECK(save_sequence(*made) == image);
        side.object = std::move(*made);
        side.now.table = std::move(table);
        side.begun.reset();
    }

    // ---- checks ----

    void check_blocks(const Side& side) const {
        const Sequence& sequence = side.object;
        REQUIRE(sequence.size() == side.now.table.size);
        REQUIRE(sequence.blocks() == side.now.table.slots.size());
        for (std::uint32_t slot = 0; slot < sequence.blocks(); ++slot) {
            const Block* block = model.block(side.now.table, slot);
            std::vector<std::byte> copy;
            const BlockView view = lowkv::test::readable(sequence, slot, copy);
            const bool packed = block != nullptr && block->rung > 0;
            bool same = (view.keys != nullptr) == (block != nullptr) && view.packed == packed &&
                        sequence.packed(slot) == packed &&
                        sequence.full(slot) == model.full(side.now.table, slot);
            if (same && packed)
                same = std::equal(block->bytes.begin(), block->bytes.end(), view.keys);
            if (!same) FAIL("block ", slot, " of ", sequence.blocks());
        }
    }
    void check_rows(const Side& side) {
        check_cells(side.object, side.now.table);
        const std::uint32_t one = below(side.now.table.size + 3);
        const Token token = model.at(side.now.table, one);
        CHECK(cache_test::read_key(side.object, one) == token.key);
        CHECK(cache_test::read_value(side.object, one) == token.value);
    }
};

const Case cases[] = {
    {"kivi2", {2, 16}, "kivi2,window=32,sinks=5"},
    {"kivi2", {1, 16}, "kivi2,window=40,sinks=0,flush=64"},
    {"kivi2", {1, 32}, "kivi2,window=0,sinks=0", {"int8", "kivi4"}},
    {"kivi2", {2, 16}, "kivi2,window=20,sinks=0", {}, 9},
    {"k=channel-4-g64,v=token-3-g32", {1, 16}, "kivi2,window=10,sinks=64"},
    {"k=token-8-g32-fp8,v=channel-4-g128", {1, 16}, "kivi2,window=0,sinks=1"},
    {"k=exact,v=token-2-g64", {3, 16}, "kivi2,window=64,sinks=33,flush=32", {}, 0, RowType::bf16},
    {"exact", {2, 16}, "exact,window=0,sinks=0"},
    {"exact", {2, 16}, "exact,window=0,sinks=0", {}, 6, RowType::f32},
    {"lowkv2.8", {2, 64}, "kivi2,window=10,sinks=1"},
    {"lowkv2", {1, 64}, "kivi2,window=10,sinks=1", {"lowkv4", "lowkv2.8"}, 0, RowType::f32},
};

}  // namespace

TEST_CASE("random operations on sequences leave what the model says") {
    unsigned number = 0;
    for (const Case& c : cases) {
        for (unsigned seed = 1; seed <= 4; ++seed) {
            if (!lowkv::test::in_sample(number++)) continue;
            CAPTURE(c.scheme);
            CAPTURE(c.retention);
            Sequences sequences(c);
            run(sequences, seed, 200);
        }
    }
}
