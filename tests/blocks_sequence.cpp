// Sequences that share a store: a block that several share is packed once for all of them.

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
    std::uint32_t budget = 0;  // in exact blocks
    RowType rows = RowType::f16;
};

class Sequences : public Sides<Sequence, Table> {
  public:
    explicit Sequences(const Case& c)
        : Sides({}, c.scheme, c.shape, c.rows), retention_(parse_scheme(c.retention).retention) {
        store = lowkv::test::make_store(c.budget * plan->exact_bytes());
        sides.push_back({Sequence(store, plan, retention_), {}});
    }

    static std::span<const Kind<Sequences>> kinds() {
        using S = Sequences;
        static constexpr Kind<S> all[] = {
            {"append", 30, &S::append},     {"truncate", 10, &S::truncate},
            {"pack", 15, &S::pack},         {"fork", 8, &S::fork},
            {"leave", 4, &S::leave},        {"begin", 6, &S::begin},
            {"commit", 3, &S::commit},      {"roll back", 5, &S::rollback},
            {"save and load", 4, &S::load}, {"move", 2, &S::move}};
        return all;
    }

    void check() {
        check_store();
        for (const Side& side : sides) check_blocks(side);
        if (below(3) == 0) check_rows(any());
    }

  private:
    Retention retention_;

    // ---- operations ----

    void append() {
        Side& side = any();
        const std::uint32_t n = below(3) == 0 ? 1 : below(3 * model.tokens());
        const Tokens tokens = rows(n);
        Buffer keys(plan->rows(), plan->shape(), 1, n), values = keys;
        blocks_test::put(keys, values, 0, tokens);
        std::set<std::uint32_t> slots;
        for (std::uint32_t i = 0; i < n; ++i) slots.insert((side.now.size + i) / model.tokens());
        if (!succeeds(model.cost_of_writing(side.now, slots), [&] {
                side.object.append(rows_of(keys, plan->rows()), rows_of(values, plan->rows()), n);
            }))
            return;
        model.append(side.now, tokens);
    }

    void truncate() {
        Side& side = any();
        Table& table = side.now;
        const std::uint32_t back = below(2) == 0 ? below(5) : below(2 * model.tokens());
        const std::uint32_t size = table.size - std::min(table.size, back);
        const long growth =
            model.cuts(table, size) ? model.cost_of_writing(table, {size / model.tokens()}) : 0;
        if (succeeds(growth, [&] { side.object.truncate(size); })) model.truncate(table, size);
    }

    void pack() {
        Side& side = any();
        const std::uint32_t left = left_window(retention_, side.now.size);
        std::vector<Packing> old;
        for (std::uint32_t slot = 0; (slot + 1) * model.tokens() <= left; ++slot)
            if (slot * model.tokens() >= retention_.sinks) old.push_back({&side.now, slot});
        if (!succeeds(0, [&] { side.object.pack(executor()); }) || exact()) return;
        model.pack(std::move(old), model.last_rung(), in_step());
    }

    void move() {
        Side& side = any();
        Sequence taken = std::move(side.object);
        Sequence other(store, plan, retention_);
        other = std::move(taken);
        side.object = std::move(other);
    }

    void load() {
        Side& side = any();
        const std::vector<std::byte> image = save_sequence(side.object);
        Table table = model.copy(side.now);
        long growth = 0;
        for (std::uint32_t slot = 0; slot < table.slots.size(); ++slot) {
            Entry& entry = table.slots[slot];
            growth += static_cast<long>(model.cost(entry->rung));
            if (entry->rung > 0)  // what the bytes say
                entry->leads = cache::leads(*plan, entry->bytes.data());
        }
        std::optional<Sequence> made;
        if (!succeeds(growth, [&] { made = load_sequence(image, store, plan, retention_); }))
            return;
        CHECK(save_sequence(*made) == image);
        side.object = std::move(*made);
        side.now = std::move(table);
        side.begun.reset();
    }

    // ---- checks ----

    void check_blocks(const Side& side) const {
        REQUIRE(side.object.size() == side.now.size);
        REQUIRE(side.object.blocks() == side.now.slots.size());
        for (std::uint32_t slot = 0; slot < side.object.blocks(); ++slot)
            REQUIRE(side.object.packed(slot) == (model.block(side.now, slot)->rung > 0));
    }
    void check_rows(const Side& side) {
        check_cells(side.object, side.now);
        if (side.now.size == 0) return;
        const std::uint32_t one = below(side.now.size);
        const Token token = model.at(side.now, one);
        CHECK(cache_test::read_key(side.object, one) == token.key);
        CHECK(cache_test::read_value(side.object, one) == token.value);
    }
};

const Case cases[] = {
    {"kivi2", {2, 16}, "kivi2,window=32,sinks=5"},
    {"kivi2", {1, 16}, "kivi2,window=40,sinks=0,flush=64"},
    {"kivi2", {2, 16}, "kivi2,window=20,sinks=0", 9},
    {"k=channel-4-g64,v=token-3-g32", {1, 16}, "kivi2,window=10,sinks=64"},
    {"k=exact,v=token-2-g64", {3, 16}, "kivi2,window=64,sinks=33,flush=32", 0, RowType::bf16},
    {"exact", {2, 16}, "exact,window=0,sinks=0", 6, RowType::f32},
    {"lowkv2.8", {2, 64}, "kivi2,window=10,sinks=1"},
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
