#pragma once
// What the tests of all who own blocks share: sequences, batches, a host's pages, filtered
// sequences (blocks_*.cpp). An owner's operations are data, a kind and a number from which the rest
// is drawn, and are done on the owner and on the model.

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "blocks_model.h"
#include "failing_new.h"
#include "lowkv/batch.h"
#include "sample.h"
#include "sealed_device.h"

namespace blocks_test {

template <class Owner>
struct Kind {
    const char* name;
    unsigned weight;
    void (Owner::*apply)();
};

// Rows of one sequence.
inline Rows rows_of(const Buffer& buffer, RowType type) {
    return {buffer.rows().data, type, buffer.strides().head, buffer.strides().token};
}

// What owners share: a store, random rows, and a lack of memory.
struct Owned {
    Owned(std::vector<std::string> rungs, const std::string& scheme, Shape shape, RowType rows)
        : model([&] {
              rungs.push_back(scheme);
              Plans plans;
              for (const std::string& its : rungs)
                  plans.push_back(batch_test::make_plan(its, shape, rows));
              return plans;
          }()) {}

    Rng rng;
    Model model;
    std::shared_ptr<const Plan> plan = model.ladder().back();
    std::shared_ptr<Store> store = lowkv::test::make_store();
    std::unique_ptr<Executor> threads = make_thread_executor(2);
    bool calm = false;  // the next operation has all the memory that it wants

    bool exact() const { return plan->scheme().exact(); }
    std::uint32_t below(std::size_t n) { return static_cast<std::uint32_t>(rng() % n); }
    Executor& executor() { return below(2) == 0 ? serial_executor() : *threads; }
    Tokens rows(std::size_t count) {
        const std::size_t channels = plan->shape().channels();
        Tokens tokens;
        while (tokens.size() < count)
            tokens.push_back(
                {batch_test::random_row(rng, channels), batch_test::random_row(rng, channels)});
        return tokens;
    }

    // f may fail for want of memory, and does for a budget if it takes so many bytes more, unless a
    // step is open, which may hold more. Then it has changed nothing.
    template <class F>
    bool succeeds(long growth, bool in_step, F f) {
        const StoreStats before = store->stats();
        const long held = static_cast<long>(before.exact_bytes + before.packed_bytes);
        const bool over = before.budget_bytes > 0 && growth > 0 &&
                          held + growth > static_cast<long>(before.budget_bytes);
        bool failed = false, refused = false;
        if (!std::exchange(calm, false) && below(4) == 0) allocations_left = below(24);
        try {
            f();
        } catch (const std::bad_alloc&) {
            failed = true;
        } catch (const Error& error) {
            allocations_left = -1;
            refused = true;
            const std::string words = error.what();
            INFO(words);
            CHECK(error.code() == ErrorCode::over_budget);
            for (const std::size_t number : {before.budget_bytes, static_cast<std::size_t>(held)})
                CHECK(words.find(std::to_string(number)) != std::string::npos);
        }
        allocations_left = -1;
        if (!failed && !in_step) CHECK(refused == over);
        const StoreStats after = store->stats();
        if (failed || refused) {
            CHECK(after.exact_bytes == before.exact_bytes);
            CHECK(after.packed_bytes == before.packed_bytes);
        }
        return !failed && !refused;
    }
    void check_books() {
        const StoreStats stats = store->stats(), books = model.books();
        REQUIRE(stats.packed_blocks == books.packed_blocks);
        REQUIRE(stats.exact_blocks == books.exact_blocks);
        REQUIRE(stats.packed_bytes == books.packed_bytes);
        REQUIRE(stats.exact_bytes == books.exact_bytes);
        CHECK(stats.peak_bytes >= stats.exact_bytes + stats.packed_bytes);
        CHECK(stats.reserved_bytes >= stats.exact_bytes + stats.packed_bytes);
    }
    // What is read of a sequence.
    void check_cells(const Sequence& sequence, const Table& table) {
        check_cells(table, [&](const BatchRowsOut& keys, const BatchRowsOut& values) {
            sequence.read(0, table.size, {keys.data, keys.strides.head, keys.strides.token},
                          {values.data, values.strides.head, values.strides.token}, executor());
        });
    }
    template <class Read>
    void check_cells(const Table& table, Read read) {
        Buffer keys(plan->rows(), plan->shape(), 1, table.size), values = keys;
        read(keys.out(), values.out());
        for (std::uint32_t cell = 0; cell < table.size; ++cell)
            if (Token{keys.get(0, cell), values.get(0, cell)} != model.at(table, cell))
                FAIL("cell ", cell, " of ", table.size);
    }
    // That n tokens have left: packed are those of whole blocks before.
    static std::uint32_t left_window(const Retention& retention, std::uint32_t tokens) {
        const std::uint32_t left = tokens > retention.window ? tokens - retention.window : 0;
        return retention.flush > 0 ? left / retention.flush * retention.flush : left;
    }
};

// Attention of two query heads for each kv head: queries, what is known of them, and what they must
// give. Rows are [whatever][head_dim].
struct Asked {
    static constexpr float scale = 0.03f;

    std::size_t dim, heads;
    std::vector<float> q, out, slopes, logits;
    AttentionIO io;
    AttentionParams params;

    Asked(Owned& owner, std::size_t queries)
        : dim(owner.plan->shape().head_dim),
          heads(2 * owner.plan->shape().kv_heads),
          q(queries * heads * dim),
          out(q.size(), NAN) {
        // Of one size: a model of queries weighs no channel more than another.
        for (float& x : q) x = owner.below(2) == 0 ? -1.0f : 1.0f;
        for (std::size_t h = 0; h < heads; ++h) {
            slopes.push_back(std::exp2(-static_cast<float>(h + 2)));
            logits.push_back(static_cast<float>(owner.below(5)) - 2);
        }
        params.scale = scale;
        if (owner.below(2) == 0) params.alibi_slopes = slopes.data();
        if (owner.below(2) == 0) params.sink_logits = logits.data();
        io.q = q.data();
        io.out = out.data();
        io.heads = static_cast<std::uint32_t>(heads);
    }

    // How far a row's result is from that in double precision, in parts of its size, over those of
    // the cells that `bias` (of each, and not -inf) lets it see.
    template <class Bias>
    double error(std::span<const Token> cells, std::size_t row, std::size_t head, Bias bias,
                 double* lse = nullptr) const {
        std::vector<double> sum(dim);
        double total = params.sink_logits != nullptr ? std::exp(double{logits[head]}) : 0;
        const std::size_t channel = head / 2 * dim;
        for (std::size_t cell = 0; cell < cells.size(); ++cell) {
            double score = bias(cell);
            if (score == -INFINITY) continue;
            for (std::size_t c = 0; c < dim; ++c)
                score += double{scale} * q[row * dim + c] * double{cells[cell].key[channel + c]};
            const double weight = std::exp(score);
            total += weight;
            for (std::size_t c = 0; c < dim; ++c)
                sum[c] += weight * double{cells[cell].value[channel + c]};
        }
        double worst = 0, largest = 0;
        for (std::size_t c = 0; c < dim; ++c) {
            const double want = total > 0 ? sum[c] / total : 0;
            largest = std::max(largest, std::abs(want));
            worst = std::max(worst, std::abs(double{out[row * dim + c]} - want));
        }
        if (lse != nullptr) *lse = std::log(total);
        return worst / (largest + 0.5);
    }
};

inline std::span<Table> tables_of(Table& its) { return {&its, 1}; }

// Some of a kind, each with its model, whose tables are tables_of(State&). They fork, and have
// steps.
template <class Object, class State>
struct Sides : Owned {
    struct Side {
        Object object;
        State now;
        std::optional<State> begun = std::nullopt;
    };
    std::vector<Side> sides;

    using Owned::Owned;
    ~Sides() {
        sides.clear();
        CHECK(store->stats().exact_blocks + store->stats().packed_blocks == 0);
    }

    Side& any() { return sides[below(sides.size())]; }
    bool in_step() const {
        return std::ranges::any_of(sides, [](const Side& side) { return side.begun.has_value(); });
    }
    template <class F>
    bool succeeds(long growth, F f) {
        return Owned::succeeds(growth, in_step(), f);
    }

    // The books are right between steps, the counters always.
    void check_store() {
        if (!in_step()) check_books();
        const StoreStats stats = store->stats();
        REQUIRE(stats.reopened_blocks == model.reopened);
        REQUIRE(stats.encoded_blocks == model.encodings);
    }

    void fork() {
        if (sides.size() >= 3 + model.last_rung()) return;
        const Side& side = any();  // whose step stays its own
        std::optional<Object> made;
        if (!succeeds(0, [&] { made.emplace(side.object.fork()); })) return;
        State now = side.now;
        for (Table& table : tables_of(now)) table.kept = nullptr;
        sides.push_back({std::move(*made), std::move(now)});
    }
    void leave() {
        if (sides.size() > 1)
            sides.erase(sides.begin() + static_cast<std::ptrdiff_t>(below(sides.size())));
    }
    void begin() {
        Side& side = any();
        if (side.begun) CHECK_THROWS_AS(side.object.begin(), Error);
        if (side.begun || !succeeds(0, [&] { side.object.begin(); })) return;
        side.begun = side.now;
        for (Table& table : tables_of(side.now)) model.begin(table);
    }
    void commit() {
        Side& side = any();
        side.object.commit();
        side.begun.reset();
        for (Table& table : tables_of(side.now)) table.kept = nullptr;
    }
    void rollback() {
        Side& side = any();
        side.object.rollback();
        if (!side.begun) return;
        side.now = std::move(*side.begun);
        side.begun.reset();
    }
};

// Random operations, each the kind and the number that a failure shows.
template <class Owner>
void run(Owner& owner, unsigned seed, int steps) {
    Rng rng(seed);
    std::string done;
    INFO("seed ", seed, ", operations:", done);
    const std::span<const Kind<Owner>> kinds = Owner::kinds();
    unsigned all = 0;
    for (const auto& kind : kinds) all += kind.weight;
    for (; steps > 0; --steps) {
        auto dice = static_cast<unsigned>(rng() % all);
        const Kind<Owner>* kind = kinds.data();
        while (dice >= kind->weight) dice -= kind++->weight;
        const auto number = static_cast<unsigned>(rng());
        done += std::string(" ") + kind->name + ":" + std::to_string(number);
        owner.rng.seed(number);
        (owner.*kind->apply)();
        owner.check();
    }
}

}  // namespace blocks_test
