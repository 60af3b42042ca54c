// Batches that share a store: steps that are rolled back, budgets of bytes, images, and attention.

#include "blocks_owner.h"
#include "lowkv/batch.h"
#include "round.h"

using namespace lowkv;
using namespace blocks_test;

namespace {

struct Case {
    std::string scheme;
    Shape shape;
    RowType rows;
    std::vector<std::string> rungs = {};
    std::uint32_t budget = 0;  // the store's, in exact blocks
    bool padded = false;
};

struct State {
    std::vector<Table> tables;
    std::vector<std::vector<bool>> padding;  // by sequence and token
    std::uint32_t first = 0, packed_first = 0, packed_end = 0;
    std::uint32_t tokens() const { return tables.front().size; }
};

std::span<Table> tables_of(State& its) { return its.tables; }

class Batches : public Sides<Batch, State> {
  public:
    explicit Batches(const Case& c)
        : Sides(c.rungs, c.scheme, c.shape, c.rows),
          retention_(parse_scheme(c.scheme).retention),
          padded_(c.padded),
          rungs_(model.ladder().begin(), model.ladder().end() - 1) {
        if (c.rungs.empty())
            store = lowkv::test::make_store(c.budget * plan->exact_bytes());
        else
            store = std::make_shared<Store>();  // ladders are for the CPU
        sides.push_back(
            {Batch(store, plan, retention_, 2, rungs_),
             {std::vector<Table>(2), std::vector<std::vector<bool>>(2), 0, sinks(), sinks()}});
    }

    static std::span<const Kind<Batches>> kinds() {
        using B = Batches;
        static constexpr Kind<B> all[] = {
            {"append", 32, &B::append},     {"pack", 22, &B::pack},
            {"truncate", 10, &B::truncate}, {"drop", 4, &B::drop},
            {"select", 8, &B::select},      {"fork", 3, &B::fork},
            {"leave", 2, &B::leave},        {"begin", 7, &B::begin},
            {"commit", 3, &B::commit},      {"roll back", 4, &B::rollback},
            {"save and load", 4, &B::load}, {"attend", 4, &B::attend}};
        return all;
    }

    void check() {
        check_store();
        for (const Side& side : sides) check_numbers(side);
        if (below(3) == 0) check_rows(any());
    }

  private:
    Retention retention_;
    bool padded_;
    Plans rungs_;

    std::uint32_t sinks() const { return exact() ? 0 : round_up(retention_.sinks, model.tokens()); }

    // ---- operations ----

    void append() {
        Side& side = any();
        std::vector<Table>& tables = side.now.tables;
        const std::uint32_t n = below(3) == 0 ? 1 + below(90) : 1 + below(4);
        const RowType type = batch_test::types[below(3)];  // which have the same numbers
        Buffer keys(type, plan->shape(), tables.size(), n), values = keys;
        std::vector<Tokens> tokens;
        long growth = 0;
        for (std::size_t s = 0; s < tables.size(); ++s) {
            put(keys, values, s, tokens.emplace_back(rows(n)));
            std::set<std::uint32_t> slots;
            for (std::uint32_t i = 0; i < n; ++i)
                slots.insert((tables[s].size + i) / model.tokens());
            growth += model.cost_of_writing(tables[s], slots);
        }
        if (!succeeds(growth, [&] { side.object.append(keys.rows(), values.rows(), n); })) return;
        for (std::size_t s = 0; s < tables.size(); ++s) model.append(tables[s], tokens[s]);
        mark_padding(side, n);
    }
    // Some sequences' rows begin with padding, or end with it, or have it anywhere.
    void mark_padding(Side& side, std::uint32_t n) {
        std::vector<std::uint8_t> seen;
        for (std::vector<bool>& padding : side.now.padding) {
            const std::uint32_t kind = padded_ ? below(4) : 0, length = below(n + 1);
            for (std::uint32_t t = 0; t < n; ++t) {
                padding.push_back(kind == 1   ? t < length
                                  : kind == 2 ? t >= length
                                  : kind == 3 ? below(5) == 0
                                              : false);
                seen.push_back(padding.back() ? 0 : 1);
            }
        }
        if (padded_) side.object.mark_padding(seen, n);
    }

    // Slots of a sequence that have left its window, but for those of its sinks.
    struct Due {
        std::uint32_t sinks, sinks_end, end;
        bool has(std::uint32_t slot) const {
            return slot < end && (slot < sinks || slot >= sinks_end);
        }
    };
    Due due(const std::vector<bool>& padding, std::uint32_t spared) const {
        std::vector<std::uint32_t> seen;
        for (std::uint32_t t = 0; t < padding.size(); ++t)
            if (!padding[t]) seen.push_back(t);
        const auto tokens = static_cast<std::uint32_t>(padding.size());
        const auto count = static_cast<std::uint32_t>(seen.size());
        const auto place = [&](std::uint32_t number) {
            return number < count ? seen[number] : tokens;
        };
        Due due{0, 0,
                place(left_window(retention_, count - std::min(count, spared))) / model.tokens()};
        if (sinks() > 0)
            due.sinks = place(0) / model.tokens(),
            due.sinks_end = ceil_div(place(sinks() - 1) + 1, model.tokens());
        return due;
    }

    void pack() {
        Side& side = any();
        State& now = side.now;
        const std::uint32_t spared = below(3) == 0 ? below(40) : 0;
        if (!rungs_.empty()) return pack_within(side, spared);
        if (!succeeds(0, [&] { side.object.pack(spared, executor()); }) || exact()) return;
        std::vector<Packing> places;
        for (std::size_t s = 0; s < now.tables.size(); ++s) {
            const Due its = due(now.padding[s], spared);
            for (std::uint32_t slot = now.first / model.tokens(); slot < its.end; ++slot)
                if (its.has(slot)) places.push_back({&now.tables[s], slot});
            now.packed_end = std::max(now.packed_end, its.end * model.tokens());
        }
        model.pack(std::move(places), model.last_rung(), true);
    }

    // The blocks of an age go down the ladder together: the finest first, of them the oldest.
    void pack_within(Side& side, std::uint32_t spared) {
        State& now = side.now;
        const std::size_t last = model.last_rung();
        std::size_t held = bytes(now).exact + bytes(now).packed;
        const std::size_t budget = 1 + below(held + held / 4 + 1);
        if (below(4) == 0) allocations_left = below(60);
        bool failed = false;
        try {
            side.object.pack(spared, executor(), budget);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
        allocations_left = -1;
        std::vector<std::map<const Block*, std::size_t>> ages(now.tokens() / model.tokens());
        for (std::size_t s = 0; s < now.tables.size(); ++s) {
            const Due its = due(now.padding[s], spared);
            for (std::uint32_t slot = now.first / model.tokens(); slot < ages.size(); ++slot) {
                const Block* block = now.tables[s].slots[slot].get();
                if (its.has(slot) || block->rung > 0) ages[slot][block] = block->rung;
            }
        }
        for (std::size_t rung = 0; rung < last; ++rung)
            for (auto& blocks : ages) {
                if (held <= budget) break;
                for (auto& [block, its] : blocks)
                    if (its == rung) held -= model.cost(its) - model.cost(rung + 1), ++its;
            }
        // From the oldest on: if memory lacks, the others stay where they are.
        std::vector<std::tuple<std::size_t, Table*, std::uint32_t>> places;
        for (Table& table : now.tables)
            for (std::uint32_t slot = 0; slot < ages.size(); ++slot) {
                const auto found = ages[slot].find(model.block(table, slot));
                if (found != ages[slot].end() && found->second > found->first->rung)
                    places.emplace_back(found->second, &table, slot);
            }
        for (std::size_t rung = last; rung > 0; --rung) {
            if (failed && same_bytes(side)) return;
            std::vector<Packing> these;
            for (const auto& [to, table, slot] : places) {
                if (to != rung) continue;
                these.push_back({table, slot});
                now.packed_end = std::max(now.packed_end, (slot + 1) * model.tokens());
            }
            model.pack(std::move(these), rung, true);
        }
    }
    BatchBytes bytes(const State& now) const {
        std::set<const Block*> blocks;
        for (const Table& table : now.tables)
            for (const Entry& block : table.slots)
                if (block) blocks.insert(block.get());
        BatchBytes bytes;
        for (const Block* block : blocks)
            (block->rung > 0 ? bytes.packed : bytes.exact) += model.cost(block->rung);
        return bytes;
    }
    bool same_bytes(const Side& side) const {
        const BatchBytes is = side.object.bytes(), should = bytes(side.now);
        return is.exact == should.exact && is.packed == should.packed;
    }

    void truncate() {
        Side& side = any();
        State& now = side.now;
        const std::uint32_t back = below(below(3) == 0 ? 200 : 5);
        const std::uint32_t to = std::max(now.first, now.tokens() - std::min(now.tokens(), back));
        const std::uint32_t last = to / model.tokens();
        long growth = 0;
        for (const Table& table : now.tables)
            growth += model.cuts(table, to) ? model.cost_of_writing(table, {last}) : 0;
        if (!succeeds(growth, [&] { side.object.truncate(to); })) return;
        for (Table& table : now.tables) model.truncate(table, to);
        for (std::vector<bool>& padding : now.padding)
            padding.resize(std::min<std::size_t>(padding.size(), to));
        if (to < now.packed_end) now.packed_end = std::max(now.packed_first, last * model.tokens());
        if (now.first > 0) CHECK_THROWS_AS(side.object.truncate(now.first - 1), Error);
    }

    void drop() {
        Side& side = any();
        State& now = side.now;
        const std::uint32_t before = below(now.tokens() / 2 + 1), end = before / model.tokens();
        side.object.drop_before(before);
        for (Table& table : now.tables)
            for (std::uint32_t slot = now.first / model.tokens(); slot < end; ++slot)
                model.drop(table, slot);
        now.first = std::max(now.first, end * model.tokens());
        now.packed_first = std::max(now.packed_first, now.first);
        now.packed_end = std::max(now.packed_end, now.packed_first);
    }

    void select() {
        Side& side = any();
        std::vector<std::uint32_t> rows(1 + below(3));
        State then = side.now;
        then.tables.clear();
        then.padding.clear();
        for (std::uint32_t& row : rows) row = below(side.object.size());
        if (below(2) == 0) std::ranges::fill(rows, rows[0]);  // they share all blocks
        for (const std::uint32_t row : rows) {
            then.tables.push_back(side.now.tables[row]);
            then.padding.push_back(side.now.padding[row]);
        }
        if (side.begun)
            CHECK_THROWS_AS(side.object.select(rows), Error);
        else if (succeeds(0, [&] { side.object.select(rows); }))
            side.now = std::move(then);
    }

    // All of it, or a range, as if the tokens before it had been dropped.
    void load() {
        Side& side = any();
        State now = side.now;
        const std::uint32_t tokens = model.tokens();
        std::uint32_t first = now.first, last = now.tokens();
        if (below(2) == 0) {
            first += below(last - first + 1);
            last = first + below(last - first + 1);
        }
        const auto inside = [&](std::uint32_t end) {
            return end > now.packed_first && end < now.packed_end &&
                   (end - now.packed_first) % tokens != 0;
        };
        if (!rungs_.empty()) return;  // one that was loaded has no ladder
        if (!exact() && std::ranges::any_of(now.padding, [](const std::vector<bool>& its) {
                return std::ranges::find(its, true) != its.end();
            })) {
            CHECK_THROWS_AS(side.object.save(), Error);
            return;
        }
        if (inside(first) || inside(last)) {
            CHECK_THROWS_AS(side.object.save(first, last), Error);
            return;
        }
        const std::vector<std::byte> image = side.object.save(first, last);
        long growth = 0;
        for (Table& table : now.tables) {
            table = model.copy(table);
            for (std::uint32_t slot = 0; slot < table.slots.size(); ++slot) {
                Entry& block = table.slots[slot];
                const std::uint32_t begin = slot * tokens;
                if (block && (begin + tokens <= first || begin >= last)) block = nullptr;
                for (std::uint32_t t = 0; block && block->rung == 0 && t < tokens; ++t)
                    if (begin + t < first || begin + t >= last) block->tokens[t] = {};
                if (block && block->tokens == Tokens(tokens)) block = nullptr;
                if (block && block->rung > 0)  // what the bytes say
                    block->leads = cache::leads(*plan, block->bytes.data());
                growth += block ? static_cast<long>(model.cost(block->rung)) : 0;
            }
            table.slots.resize(ceil_div(last, tokens));
            table.size = last;
        }
        now.padding.assign(now.tables.size(), std::vector<bool>(last));
        now.first = first;
        now.packed_first = std::max(now.packed_first, first);
        now.packed_end = std::min(now.packed_end, last);
        if (now.packed_first >= now.packed_end)
            now.packed_first = now.packed_end = first < sinks() ? sinks() : round_up(first, tokens);
        std::optional<Batch> made;
        if (!succeeds(growth, [&] { made = Batch::load(image, store, plan, retention_); })) return;
        CHECK(made->save() == image);
        side = {std::move(*made), std::move(now)};
    }

    void attend() {
        Side& side = any();
        const State& now = side.now;
        const std::uint32_t held = now.tokens() - now.first, sequences = side.object.size();
        if (held == 0) return;
        const std::uint32_t kind = below(3), queries = std::min(held, below(2) == 0 ? 1 : 7u);
        const std::uint32_t asked = below(2) == 0 ? 0 : below(now.tokens() - queries + 1);
        const std::uint32_t first = std::max(asked, now.first), cells = now.tokens() - asked;
        const bool additive = kind == 2, causal = kind == 1;
        const std::uint32_t window = !causal || below(2) == 0 ? 0
                                     : below(4) == 0          ? UINT32_MAX
                                                              : 1 + below(80);
        Asked its(*this, std::size_t{sequences} * queries);
        std::vector<float> lse(sequences * queries * its.heads), mask(sequences * queries * cells);
        for (float& x : mask) x = below(3) == 0 ? -INFINITY : static_cast<float>(below(5));
        BatchAttention a{its.io, its.params};
        a.io.lse = lse.data();
        a.io.tokens = queries;
        a.io.first_cell = asked;
        a.io.q_head_stride = a.io.out_head_stride = queries * its.dim;
        a.io.q_token_stride = a.io.out_token_stride = its.dim;
        a.q_sequence_stride = a.out_sequence_stride = its.heads * queries * its.dim;
        if (!causal) a.params.alibi_slopes = nullptr;
        if (causal) a.params.mask = {.kind = Mask::Kind::causal, .window = window};
        if (additive)
            a.params.mask = {
                .kind = Mask::Kind::additive_f32, .data = mask.data(), .row_stride = cells};
        if (additive) a.mask_sequence_stride = std::size_t{queries} * cells;
        AttentionWorkspace workspace;
        side.object.attend(a, workspace, executor());
        for (std::uint32_t s = 0; s < sequences; ++s) {
            Tokens seen;
            for (std::uint32_t cell = first; cell < now.tokens(); ++cell)
                seen.push_back(model.at(now.tables[s], cell));
            for (std::uint32_t query = 0; query < queries; ++query) {
                const std::size_t head = below(its.heads);
                const std::uint32_t own = now.tokens() - queries + query;
                double want_lse = 0;
                const double error = its.error(
                    seen, (s * its.heads + head) * queries + query, head,
                    [&](std::size_t i) -> double {
                        const auto cell = static_cast<std::uint32_t>(first + i);
                        if (additive) return mask[(s * queries + query) * cells + cell - asked];
                        if (causal && (cell > own || (window > 0 && own - cell >= window)))
                            return -INFINITY;
                        return a.params.alibi_slopes != nullptr
                                   ? -double{its.slopes[head]} * (own - cell)
                                   : 0;
                    },
                    &want_lse);
                // The rows that are read back are rounded to their type.
                CHECK(error < (plan->rows() == RowType::bf16 ? 0.02 : 6e-3));
                const double is = lse[(std::size_t{s} * queries + query) * its.heads + head];
                CHECK((is == want_lse || std::fabs(is - want_lse) < 0.02));
            }
        }
    }

    // ---- checks ----

    void check_numbers(const Side& side) const {
        const State& now = side.now;
        REQUIRE(side.object.size() == now.tables.size());
        REQUIRE(side.object.tokens() == now.tokens());
        REQUIRE(side.object.first() == now.first);
        REQUIRE(side.object.packed_first() == now.packed_first);
        REQUIRE(side.object.packed_end() == now.packed_end);
        REQUIRE(same_bytes(side));
        std::uint32_t most = 0;
        for (const Table& table : now.tables) {
            std::uint32_t rows = now.tokens() - now.first;
            for (const Entry& block : table.slots)
                rows -= block && block->rung > 0 ? model.tokens() : 0;
            most = std::max(most, rows);
        }
        CHECK(side.object.exact_tokens() == most);
    }
    // Of all sequences or some, all of their tokens or some.
    void check_rows(const Side& side) {
        const State& now = side.now;
        const std::uint32_t s = below(2) == 0 ? 0 : below(side.object.size());
        const std::uint32_t first = now.first + below(2) * below(now.tokens() - now.first + 1);
        const std::uint32_t count = now.tokens() - first;
        Buffer keys(plan->rows(), plan->shape(), side.object.size() - s, count), values = keys;
        side.object.read(first, count, keys.out(), values.out(), executor(), s,
                         side.object.size() - s);
        for (std::uint32_t i = s; i < side.object.size(); ++i)
            for (std::uint32_t t = 0; t < count; ++t)
                if (Token{keys.get(i - s, t), values.get(i - s, t)} !=
                    model.at(now.tables[i], first + t))
                    FAIL("sequence ", i, " token ", first + t, " of ", now.tokens());
    }
};

const Case cases[] = {
    {"kivi2,window=20,sinks=4", {2, 16}, RowType::f16},
    {"kivi2,window=20,sinks=4", {2, 16}, RowType::f32, {}, 16},
    {"int4,window=0,sinks=0", {1, 16}, RowType::bf16},
    {"k=token-3-head-normal-hadamard-mean,v=token-2-head-normal-hadamard-unbiased,window=33,"
     "sinks=40,flush=64",
     {2, 16},
     RowType::f32},
    {"k=exact,v=token-2-g32,window=5,sinks=32", {1, 32}, RowType::bf16},
    {"exact", {2, 16}, RowType::f32},
    {"exact,sinks=3", {1, 16}, RowType::bf16},
    {"lowkv2.8,window=5,sinks=0", {1, 64}, RowType::f16},
    {"kivi2,window=40,sinks=5", {2, 16}, RowType::f32, {}, 0, true},
    {"kivi2,window=10,flush=32,sinks=70", {2, 16}, RowType::f32, {}, 0, true},
    {"kivi2,window=0,sinks=32", {2, 16}, RowType::f32, {"kivi4"}, 0, true},
    {"kivi2,window=20,sinks=4", {2, 32}, RowType::f32, {"kivi4"}},
    {"kivi2,window=20,sinks=0", {2, 32}, RowType::bf16, {"int8", "kivi4"}},
    {"lowkv2,window=20,sinks=4", {1, 64}, RowType::f16, {"lowkv4", "lowkv2.8"}},
};

}  // namespace

TEST_CASE("random operations on batches leave what the model says") {
    unsigned number = 0;
    for (const Case& c : cases) {
        for (unsigned seed = 0; seed < 6; ++seed) {
            if (!lowkv::test::in_sample(number++)) continue;
            CAPTURE(c.scheme);
            Batches batches(c);
            run(batches, seed, 150);
        }
    }
}
