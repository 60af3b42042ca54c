// Filtered sequences that share a store: a rule's fates move rows, and blocks are packed of those
// that have left.

#include "blocks_owner.h"
#include "cache_common.h"
#include "lowkv/filter.h"

using namespace lowkv;
using namespace blocks_test;

namespace {

struct Case {
    std::string scheme;
    Shape shape;
    Retention retention;
    unsigned keep, evict;  // of ten tokens
};

// A rule of the user's own, which does not care for quotas.
class ByPosition final : public FilterRule {
  public:
    ByPosition(unsigned keep, unsigned evict) : keep_(keep), evict_(evict) {}
    Fate fate(std::uint32_t position) const {
        const std::uint32_t dice = (position * 2654435761u >> 16u) % 10;
        return dice < keep_ ? Fate::keep : dice < keep_ + evict_ ? Fate::evict : Fate::pack;
    }
    void decide(const LeavingTokens& tokens, std::span<Fate> fates) const override {
        for (std::size_t i = 0; i < fates.size(); ++i) fates[i] = fate(tokens.positions[i]);
    }

  private:
    unsigned keep_, evict_;
};

struct State {
    Table table = {};
    std::vector<std::uint32_t> decided = {};     // positions by cell
    std::uint32_t size = 0, tail = 0, kept = 0;  // from cell `tail` on rows still move
    std::uint32_t undecided() const {
        return table.size - static_cast<std::uint32_t>(decided.size());
    }
};

std::span<Table> tables_of(State& its) { return {&its.table, 1}; }

class Filtered : public Sides<FilteredSequence, State> {
  public:
    explicit Filtered(const Case& c)
        : Sides({}, c.scheme, c.shape, RowType::f16),
          retention_(c.retention),
          rule_(std::make_shared<ByPosition>(c.keep, c.evict)) {
        sides.push_back({FilteredSequence(store, plan, retention_, rule_), {}});
    }

    static std::span<const Kind<Filtered>> kinds() {
        using F = Filtered;
        static constexpr Kind<F> all[] = {{"append", 50, &F::append},
                                          {"pack", 25, &F::pack},
                                          {"truncate", 10, &F::truncate},
                                          {"fork", 10, &F::fork},
                                          {"leave", 5, &F::leave}};
        return all;
    }

    void check() {
        check_books();
        CHECK(store->stats().reopened_blocks == 0);  // nothing is quantized twice
        for (const Side& side : sides) check_numbers(side);
        {
            const Side& side = any();
            check_cells(side.object.cells(), side.now.table);
        }
    }

  private:
    Retention retention_;
    std::shared_ptr<const ByPosition> rule_;

    void append() {
        auto& [filtered, now, begun] = any();
        const Tokens tokens = rows(below(3) == 0 ? 1 : below(3 * model.tokens()));
        Row keys, values;
        for (const Token& token : tokens) {
            keys.insert(keys.end(), token.key.begin(), token.key.end());
            values.insert(values.end(), token.value.begin(), token.value.end());
        }
        const auto n = static_cast<std::uint32_t>(tokens.size());
        if (!succeeds(0, [&] { filtered.append(keys.data(), values.data(), n); })) return;
        model.append(now.table, tokens);
        now.size += n;
    }

    // Full blocks of kept tokens, full blocks of others, which are packed, and what is left of
    // both.
    void pack() {
        auto& [filtered, now, begun] = any();
        filtered.pack(executor());
        const std::uint32_t unit = retention_.flush > 0 ? retention_.flush : model.tokens();
        const std::uint32_t left = left_window(retention_, now.size) / unit * unit;
        const std::uint32_t first = now.size - now.undecided();
        if (left <= first) return;
        std::vector<std::uint32_t> kept, packed;  // cells
        const auto end = static_cast<std::uint32_t>(now.decided.size());
        for (std::uint32_t cell = now.tail; cell < end; ++cell)
            (cell < now.tail + now.kept ? kept : packed).push_back(cell);
        for (std::uint32_t position = first; position < left; ++position) {
            const Fate fate = position < retention_.sinks ? Fate::keep : rule_->fate(position);
            if (fate != Fate::evict)
                (fate == Fate::keep ? kept : packed).push_back(end + position - first);
        }
        const std::size_t kept_blocks = kept.size() / model.tokens();
        const std::size_t packed_blocks = packed.size() / model.tokens();
        std::vector<std::uint32_t> order;
        const auto take = [&](std::vector<std::uint32_t>& cells, std::size_t count) {
            const auto last = cells.begin() + static_cast<std::ptrdiff_t>(count);
            order.insert(order.end(), cells.begin(), last);
            cells.erase(cells.begin(), last);
        };
        take(kept, kept_blocks * model.tokens());
        take(packed, packed_blocks * model.tokens());
        now.kept = static_cast<std::uint32_t>(kept.size());
        take(kept, kept.size());
        take(packed, packed.size());
        std::vector<std::uint32_t> decided(now.decided.begin(), now.decided.begin() + now.tail);
        for (const std::uint32_t cell : order)
            decided.push_back(cell < end ? now.decided[cell] : first + cell - end);
        for (std::uint32_t cell = end + left - first; cell < now.table.size; ++cell)
            order.push_back(cell);
        Tokens moved;
        for (const std::uint32_t cell : order) moved.push_back(model.at(now.table, cell));
        for (std::uint32_t i = 0; i < moved.size(); ++i)
            model.write(now.table, now.tail + i) = moved[i];
        model.truncate(now.table, now.tail + static_cast<std::uint32_t>(moved.size()));
        std::vector<Packing> places;
        const auto slot = static_cast<std::uint32_t>(now.tail / model.tokens() + kept_blocks);
        for (std::uint32_t b = 0; b < packed_blocks; ++b) places.push_back({&now.table, slot + b});
        now.tail += static_cast<std::uint32_t>((kept_blocks + packed_blocks) * model.tokens());
        now.decided = std::move(decided);
        if (!plan->scheme().exact()) model.pack(std::move(places), model.last_rung(), false);
    }

    void truncate() {
        auto& [filtered, now, begun] = any();
        const std::uint32_t back = below(2) == 0 ? below(5) : below(100);
        const std::uint32_t to = now.size - std::min(now.size, back);
        if (to < now.size - now.undecided()) {
            CHECK_THROWS_AS(filtered.truncate(to), Error);
            return;
        }
        filtered.truncate(to);
        model.truncate(now.table, now.table.size - (now.size - to));
        now.size = to;
    }

    void check_numbers(const Side& side) const {
        const auto& [filtered, now, begun] = side;
        const Sequence& cells = filtered.cells();
        REQUIRE(filtered.size() == now.size);
        REQUIRE(filtered.undecided() == now.undecided());
        REQUIRE(filtered.evicted() == now.size - now.table.size);
        REQUIRE(cells.size() == now.table.size);
        REQUIRE(cells.blocks() == now.table.slots.size());
        for (std::uint32_t slot = 0; slot < cells.blocks(); ++slot)
            REQUIRE(cells.packed(slot) == (model.block(now.table, slot)->rung > 0));
        const auto decided = static_cast<std::uint32_t>(now.decided.size());
        for (std::uint32_t cell = 0; cell < now.table.size; ++cell)
            if (filtered.position(cell) !=
                (cell < decided ? now.decided[cell] : now.size - now.table.size + cell))
                FAIL("cell ", cell, " at ", filtered.position(cell));
    }
};

const Case cases[] = {
    {"int8", {2, 16}, {.window = 32, .sinks = 5}, 2, 4},
    {"int8", {2, 16}, {.window = 40, .sinks = 0, .flush = 64}, 3, 0},
    {"int8", {2, 16}, {.window = 0, .sinks = 40}, 0, 9},
    {"int8", {2, 16}, {.window = 33, .sinks = 1}, 0, 10},
    {"kivi2", {2, 16}, {.window = 20, .sinks = 0}, 0, 0},
    {"lowkv2.8", {1, 64}, {.window = 10, .sinks = 3, .flush = 32}, 1, 5},
    {"k=exact,v=token-8-g64", {2, 16}, {.window = 64, .sinks = 33}, 2, 3},
    {"exact", {2, 16}, {.window = 16, .sinks = 2}, 1, 6},
};

}  // namespace

TEST_CASE("random operations on filtered sequences leave what the model says") {
    for (const Case& c : cases) {
        for (unsigned seed = 1; seed <= 4; ++seed) {
            if (!lowkv::test::in_sample(seed - 1)) continue;
            CAPTURE(c.scheme);
            Filtered filtered(c);
            run(filtered, seed, 150);
        }
    }
}
