// Tables that share a store: rows by cell, blocks packed in place, gathered from rows, packed once
// more by other plans, and put as codes.

#include <set>

#include "blocks_owner.h"

using namespace lowkv;
using namespace blocks_test;

namespace {

struct Case {
    std::string scheme;
    Shape shape;
    std::vector<std::string> rungs = {};
    std::uint32_t budget = 0;  // in exact blocks
    RowType rows = RowType::f16;
};

class Tables : public Sides<Blocks, Table> {
  public:
    explicit Tables(const Case& c)
        : Sides(c.rungs, c.scheme, c.shape, c.rows),
          ladder_(std::make_shared<const Blocks::Ladder>(model.ladder())) {
        store = lowkv::test::make_store(c.budget * plan->exact_bytes());
        for (int i = 0; i < 2; ++i) sides.push_back({Blocks(store, ladder_), {}});
    }

    static std::span<const Kind<Tables>> kinds() {
        using T = Tables;
        static constexpr Kind<T> all[] = {{"write", 40, &T::write},  {"pack", 18, &T::pack},
                                          {"gather", 8, &T::gather}, {"put", 6, &T::put},
                                          {"drop", 3, &T::drop},     {"fork", 6, &T::fork},
                                          {"leave", 4, &T::leave},   {"begin", 5, &T::begin},
                                          {"commit", 3, &T::commit}, {"roll back", 4, &T::rollback},
                                          {"move", 2, &T::move}};
        return all;
    }

    void check() {
        check_store();
        for (const Side& side : sides) check_blocks(side);
        if (below(3) == 0) check_rows(any());
    }

  private:
    std::shared_ptr<const Blocks::Ladder> ladder_;

    // ---- operations ----

    // Runs, single cells, holes; keys, values or both.
    void write() {
        Side& side = any();
        std::vector<std::uint32_t> cells;
        const std::uint32_t end = side.now.size + 1 + (below(4) == 0 ? 3 * model.tokens() : 0);
        for (std::uint32_t runs = 1 + below(3); runs > 0; --runs) {
            std::uint32_t cell = below(end);
            for (std::uint32_t n = 1 + below(below(2) == 0 ? 3 : 2 * model.tokens()); n > 0; --n)
                if (std::ranges::find(cells, cell) == cells.end()) cells.push_back(cell++);
        }
        const std::uint32_t parts = 1 + below(5);  // above 2: both
        const Tokens tokens = rows(cells.size());
        Buffer keys(plan->rows(), plan->shape(), 1, cells.size()), values = keys;
        blocks_test::put(keys, values, 0, tokens);
        const Rows its[] = {rows_of(keys, plan->rows()), rows_of(values, plan->rows())};
        std::set<std::uint32_t> slots;
        for (const std::uint32_t cell : cells) slots.insert(cell / model.tokens());
        if (!succeeds(model.cost_of_writing(side.now, slots), [&] {
                side.object.write(cells, parts != 2 ? its[0] : Rows{}, parts != 1 ? its[1] : Rows{},
                                  {}, executor());
            }))
            return;
        for (std::size_t i = 0; i < cells.size(); ++i) {
            Token& token = model.write(side.now, cells[i]);
            if (parts != 2) token.key = tokens[i].key;
            if (parts != 1) token.value = tokens[i].value;
        }
    }

    Blocks::Packing packing(Side& side, const Packing& its, bool named) const {
        return {&side.object, its.slot,
                named ? its.stats_from.value_or(Blocks::no_cell) : Blocks::newest};
    }
    std::size_t any_rung() { return exact() ? 1 : 1 + below(model.last_rung()); }

    // In place, on any rung.
    void pack() {
        Side& side = any();
        const std::size_t rung = any_rung();
        const bool apart = below(2) == 0, named = below(3) == 0;
        std::set<std::uint32_t> slots;
        for (int i = 0; i < 6; ++i) slots.insert(below(side.now.slots.size() + 2));
        std::vector<Packing> places;
        for (const std::uint32_t slot : slots) places.push_back({&side.now, slot});
        if (named) choose_stats(places, rung);
        std::vector<Blocks::Packing> blocks;
        for (const Packing& its : places) blocks.push_back(packing(side, its, named));
        if (!succeeds(0,
                      [&] {
                          Blocks::pack(blocks,
                                       {.rung = static_cast<std::uint8_t>(rung), .apart = apart},
                                       executor());
                      }) ||
            exact())
            return;
        model.pack(std::move(places), rung, apart || in_step());
    }
    // Of slots that are packed, or are to be before.
    void choose_stats(std::span<Packing> places, std::size_t rung) {
        for (std::size_t i = 0; i < places.size(); ++i) {
            Packing& its = places[i];
            its.stats_from.reset();
            const std::uint32_t other = below(its.table->slots.size() + 1);
            const Block* block = model.block(*its.table, other);
            if (i > 0 && below(2) == 0)
                its.stats_from = places[below(i)].slot;
            else if (block != nullptr && block->rung == rung && below(2) == 0)
                its.stats_from = other;
        }
    }

    // Rows of another table, or its own, whatever the slots are.
    void gather() {
        Side &side = any(), &source = any();
        std::vector<std::uint32_t> known;
        for (std::uint32_t cell = 0; cell < source.now.size; ++cell) {
            const Block* block = model.block(source.now, cell / model.tokens());
            if (block != nullptr && block->rung == 0) known.push_back(cell);
        }
        std::set<std::uint32_t> slots;
        for (int i = 0; i < 3; ++i) slots.insert(below(side.now.slots.size() + 3));
        if (known.empty()) return;
        std::vector<std::vector<std::uint32_t>> cells;
        std::vector<Packing> places;
        for (const std::uint32_t slot : slots) {
            Tokens tokens;
            std::size_t at = below(known.size());
            // 0: one block as it is, if it is. 3: of few different rows.
            const std::uint32_t kind = below(4);
            if (kind == 0) at = at / model.tokens() * model.tokens();
            cells.emplace_back();
            for (std::uint32_t t = 0; t < model.tokens(); ++t, ++at) {
                if (kind == 1 && below(4) == 0) at = below(known.size());
                const bool missing = kind >= 2 && (below(4) == 0) == (kind == 2);
                cells.back().push_back(missing ? Blocks::no_cell : known[at % known.size()]);
                const Token token = model.at(source.now, known[at % known.size()]);
                if (!missing) tokens.resize(t, tokens.empty() ? token : tokens.back());
                if (!missing) tokens.push_back(token);
            }
            tokens.resize(model.tokens(), tokens.empty() ? model.shown({}) : tokens.back());
            places.push_back({&side.now, slot, std::move(tokens)});
        }
        const std::size_t rung = exact() || below(4) == 0 ? 0 : any_rung();
        const bool named = below(3) == 0;
        if (named) choose_stats(places, rung);
        std::vector<Blocks::Packing> blocks;
        long growth = 0;
        for (std::size_t i = 0; i < places.size(); ++i) {
            blocks.push_back(packing(side, places[i], named));
            blocks.back().cells = cells[i];
            growth += static_cast<long>(model.cost(rung));
            if (model.block(side.now, places[i].slot) != nullptr &&
                side.now.slots[places[i].slot].use_count() == 1)
                growth -=
                    static_cast<long>(model.cost(model.block(side.now, places[i].slot)->rung));
        }
        Blocks::How how{.rung = static_cast<std::uint8_t>(rung), .rows = &source.object};
        const bool keys_first = rung > 0 && !side.begun && &side != &source && below(2) == 0;
        if (keys_first) how.only = Part::keys;
        if (!succeeds(growth, [&] { Blocks::pack(blocks, how, executor()); })) return;
        if (keys_first) {
            for (const Packing& its : places) CHECK_FALSE(side.object.has_values(its.slot));
            how.only = Part::values;
            while (!succeeds(0, [&] { Blocks::pack(blocks, how, executor()); })) {
            }
        }
        model.grow(side.now, (places.back().slot + 1) * model.tokens());
        if (rung > 0) return model.pack(std::move(places), rung, true);
        for (Packing& its : places) model.put(side.now, its.slot, {std::move(its.gathered)});
    }

    // Codes as a state has them, at once or keys first.
    void put() {
        Side &side = any(), &source = any();
        const std::size_t rung = any_rung();
        std::vector<const Block*> blocks;
        for (const Entry& block : source.now.slots)
            if (block != nullptr && block->rung == rung) blocks.push_back(block.get());
        std::set<std::uint32_t> absent;
        for (int i = 0; i < 3; ++i) {
            const std::uint32_t slot = below(side.now.slots.size() + 3);
            if (model.block(side.now, slot) == nullptr) absent.insert(slot);
        }
        const std::vector<std::uint32_t> slots(absent.begin(), absent.end());
        if (blocks.empty() || slots.empty() || side.begun) return;
        std::vector<const std::byte*> bytes, values;
        std::vector<Block> put;
        for (std::size_t i = 0; i < slots.size(); ++i) {
            put.push_back(*blocks[below(blocks.size())]);
            put.back().leads = cache::leads(model.plan(rung), put.back().bytes.data());
            bytes.push_back(put.back().bytes.data());  // which stay where they are
            values.push_back(bytes.back() + model.plan(rung).keys().bytes());
        }
        const bool whole = below(2) == 0;
        const auto on = static_cast<std::uint8_t>(rung);
        if (!succeeds(static_cast<long>(slots.size() * model.cost(rung)), [&] {
                side.object.put(slots, bytes, on, whole ? std::nullopt : std::optional(Part::keys));
            }))
            return;
        if (!whole && below(2) == 0)
            side.object.put(slots, values, on, Part::values);
        else if (!whole)
            side.object.put(slots, bytes, on);
        for (std::size_t i = 0; i < slots.size(); ++i)
            model.put(side.now, slots[i], std::move(put[i]));
    }

    void drop() {
        Side& side = any();
        if (below(4) == 0) {
            const std::uint32_t from = below(side.now.slots.size() + 1);
            side.object.drop_from(from);
            for (std::uint32_t slot = from; slot < side.now.slots.size(); ++slot)
                model.drop(side.now, slot);
            return;
        }
        const std::uint32_t slots[] = {below(side.now.slots.size() + 2), 1000};
        side.object.drop(slots);
        model.drop(side.now, slots[0]);
    }

    void move() {
        Side& side = any();
        Blocks taken = std::move(side.object);
        Blocks other(store, ladder_);
        other = std::move(taken);
        side.object = std::move(other);
    }

    // ---- checks ----

    void check_blocks(const Side& side) const {
        const Blocks& table = side.object;
        for (std::uint32_t slot = 0; slot < table.slots() + 1; ++slot) {
            const Block* block = model.block(side.now, slot);
            std::vector<std::byte> copy;
            const BlockView view =
                lowkv::test::readable(table.device(), table.view(slot), table.bytes(slot), copy);
            const std::size_t rung = block != nullptr ? block->rung : 0;
            bool same = (view.keys != nullptr) == (block != nullptr) && view.packed == (rung > 0) &&
                        table.rung(slot) == rung &&
                        table.full(slot) == model.full(side.now, slot) &&
                        table.bytes(slot) == (block != nullptr ? model.cost(rung) : 0);
            if (same && rung > 0)
                same = std::equal(block->bytes.begin(), block->bytes.end(), view.keys);
            if (!same)
                FAIL("slot ", slot, " of ", table.slots(), ": rung ", int{table.rung(slot)},
                     ", not ", rung, "; full ", table.full(slot), ", not ",
                     model.full(side.now, slot));
        }
    }
    void check_rows(const Side& side) {
        check_cells(side.now, [&](const BatchRowsOut& keys, const BatchRowsOut& values) {
            Blocks::read({&side.object, 1}, 0, side.now.size, keys, values, executor());
        });
    }
};

const Case cases[] = {
    {"kivi2", {2, 16}},
    {"kivi2", {1, 32}, {"int8", "kivi4"}},
    {"kivi2", {2, 16}, {"kivi4"}, 9},
    {"k=token-8-g32-fp8,v=channel-4-g128", {1, 16}},
    {"k=exact,v=token-2-g64", {3, 16}, {}, 0, RowType::bf16},
    {"exact", {2, 16}},
    {"exact", {2, 16}, {}, 6, RowType::f32},
    {"lowkv2.8", {2, 64}},
    {"lowkv2", {1, 64}, {"lowkv4", "lowkv2.8"}, 0, RowType::f32},
};

}  // namespace

TEST_CASE("random operations on tables leave what the model says") {
    unsigned number = 0;
    for (const Case& c : cases) {
        for (unsigned seed = 1; seed <= 4; ++seed) {
            if (!lowkv::test::in_sample(number++)) continue;
            CAPTURE(c.scheme);
            Tables tables(c);
            run(tables, seed, 200);
        }
    }
}
