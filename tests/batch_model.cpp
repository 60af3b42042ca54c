// Random operations on batches that share a store, against a model that is too simple to be wrong:
// for each sequence the rows that must be read back, packed ones by the codec itself. Operations
// fail at random allocations, steps are rolled back at random points. Some batches pack within
// random budgets.

#include <doctest/doctest.h>

#include <optional>
#include <set>

#include "batch_codec.h"
#include "batch_common.h"
#include "failing_new.h"
#include "lowkv/error.h"
#include "sample.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace batch_test;

namespace {

struct Model {
    std::vector<std::vector<Token>> sequences;  // from token 0 on; dropped ones are not looked at
    std::uint32_t tokens = 0, first = 0, packed_first = 0, packed_end = 0;
    std::vector<std::size_t> rungs;  // of each block, within a budget: 0 exact, then finer to own
};

struct Case {
    std::string scheme;
    Shape shape;
    RowType rows;
    std::vector<std::string> finer = {};
};

class Fuzz {
  public:
    Fuzz(const Case& c, unsigned seed)
        : rng_(seed),
          case_(c),
          plan_(batch_test::make_plan(c.scheme, c.shape, c.rows)),
          retention_(parse_scheme(c.scheme).retention),
          store_(c.finer.empty() ? lowkv::test::make_store() : std::make_shared<Store>()),
          threads_(make_thread_executor(2)) {
        for (const std::string& scheme : c.finer)
            rungs_.push_back(batch_test::make_plan(scheme, c.shape, c.rows));
        Model model;
        model.sequences.resize(2);
        model.packed_first = model.packed_end = sinks();
        pairs_.push_back({Batch(store_, plan_, retention_, 2, rungs_), model, {}, {}, 0});
        rungs_.push_back(plan_);
    }

    void run(int steps) {
        for (int i = 0; i < steps; ++i) {
            step(any());
            for (Pair& pair : pairs_) check_counts(pair);
            if (below(4) == 0) check_rows(any());
        }
        for (Pair& pair : pairs_) {
            pair.batch.commit();
            check_rows(pair);
        }
        if (pairs_.size() == 1) {
            const BatchBytes bytes = pairs_[0].batch.bytes();
            CHECK(store_->stats().exact_bytes == bytes.exact);
            CHECK(store_->stats().packed_bytes == bytes.packed);
        }
        pairs_.clear();
        CHECK(held() == 0);
        CHECK(store_->stats().exact_blocks + store_->stats().packed_blocks == 0);
    }

  private:
    struct Pair {
        Batch batch;
        Model model;
        std::optional<Model> begun;
        std::vector<std::byte> image;  // at begin()
        std::size_t held = 0;          // likewise, if there is no other batch
    };

    Rng rng_;
    Case case_;
    std::shared_ptr<const Plan> plan_;
    std::vector<std::shared_ptr<const Plan>> rungs_;  // finer plans, then plan_
    Retention retention_;
    std::shared_ptr<Store> store_;
    std::unique_ptr<Executor> threads_;
    std::vector<Pair> pairs_;

    std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(rng_() % n); }
    Pair& any() { return pairs_[below(static_cast<std::uint32_t>(pairs_.size()))]; }
    std::uint32_t sinks() const {
        return plan_->scheme().exact() ? 0 : (retention_.sinks + block() - 1) / block() * block();
    }
    std::uint32_t block() const { return plan_->block_tokens(); }
    std::size_t held() const { return store_->stats().exact_bytes + store_->stats().packed_bytes; }

    void step(Pair& pair) {
        const std::uint32_t dice = below(100);
        if (dice < 35) {
            append(pair);
        } else if (dice < 60) {
            case_.finer.empty() ? pack_old(pair) : pack_within(pair);
        } else if (dice < 70) {
            truncate(pair);
        } else if (dice < 75) {
            drop(pair);
        } else if (dice < 80) {
            select(pair);
        } else if (dice < 84) {
            fork_or_leave(pair);
        } else if (pair.begun) {
            end(pair, dice < 94);
        } else {
            begin(pair);
        }
    }

    // f may fail for want of memory, and then has changed nothing.
    template <class F>
    bool succeeds(Pair& pair, F f) {
        const bool fails = below(4) == 0;
        const std::size_t before = held();
        if (fails) allocations_left = below(12);
        try {
            f();
        } catch (const std::bad_alloc&) {
            allocations_left = -1;
            CHECK(held() == before);
            check_counts(pair);
            check_rows(pair);
            return false;
        }
        allocations_left = -1;
        return true;
    }

    void append(Pair& pair) {
        const std::uint32_t n = below(3) == 0 ? 1 + below(90) : 1 + below(4);
        const auto rows = random_rows(rng_, pair.batch.size(), n, case_.shape.channels());
        Buffer keys(case_.rows, case_.shape, pair.batch.size(), n), values = keys;
        for (std::size_t s = 0; s < pair.batch.size(); ++s) {
            for (std::size_t t = 0; t < n; ++t) {
                keys.set(s, t, rows.keys[s][t]);
                values.set(s, t, rows.values[s][t]);
            }
        }
        if (!succeeds(pair, [&] { pair.batch.append(keys.rows(), values.rows(), n); })) return;
        for (std::size_t s = 0; s < pair.batch.size(); ++s) {
            auto& sequence = pair.model.sequences[s];
            sequence.resize(pair.model.tokens);
            for (std::size_t t = 0; t < n; ++t)
                sequence.push_back(
                    {kept(*plan_, rows.keys[s][t]), kept(*plan_, rows.values[s][t])});
        }
        pair.model.tokens += n;
    }

    void pack_old(Pair& pair) {
        const std::uint32_t spared = below(3) == 0 ? below(40) : 0;
        Executor& executor = below(2) == 0 ? serial_executor() : *threads_;
        if (!succeeds(pair, [&] { pair.batch.pack(spared, executor); })) return;
        if (plan_->scheme().exact()) return;
        Model& m = pair.model;
        long left = std::max(long{m.tokens} - long{retention_.window} - long{spared}, 0L);
        if (retention_.flush > 0) left -= left % long{retention_.flush};
        while (m.packed_end + block() <= left) {
            for (auto& sequence : m.sequences) batch_test::pack(*plan_, sequence, m.packed_end);
            m.packed_end += block();
        }
    }

    // Which blocks a budget packs is the batch's to choose: a block is now what its plan makes of
    // the rows before, in all sequences by the same plan, and never by more bits than an older one.
    void pack_within(Pair& pair) {
        const std::size_t before = bytes_of(pair);
        const std::size_t budget = 1 + below(static_cast<std::uint32_t>(before + before / 4 + 1));
        const std::uint32_t spared = below(3) == 0 ? below(40) : 0;
        Executor& executor = below(2) == 0 ? serial_executor() : *threads_;
        Model& m = pair.model;
        m.rungs.resize(m.tokens / block());
        const auto rungs = m.rungs;
        bool failed = false;
        if (below(4) == 0) allocations_left = below(60);
        try {
            pair.batch.pack(spared, executor, budget);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
        allocations_left = -1;
        find_rungs(pair);
        const std::size_t after = bytes_of(pair);
        if (before <= budget) CHECK(m.rungs == rungs);
        if (before <= budget || failed) return;
        if (after <= budget) {
            std::size_t most = 0;  // that a block loses by one rung
            for (std::size_t r = 0; r < rungs_.size(); ++r) most = std::max(most, lost(r));
            CHECK(after + most * pair.batch.size() > budget);
            return;
        }
        const long left = long{m.tokens} - long{retention_.window} - long{spared};
        CHECK(m.packed_end + block() > left);
        for (std::uint32_t b = m.packed_first / block(); b < m.packed_end / block(); ++b)
            CHECK(m.rungs[b] == rungs_.size());
    }
    static std::size_t bytes_of(const Pair& pair) {
        const BatchBytes bytes = pair.batch.bytes();
        return bytes.exact + bytes.packed;
    }
    std::size_t lost(std::size_t rung) const {
        return (rung == 0 ? plan_->exact_bytes() : rungs_[rung - 1]->packed_bytes()) -
               rungs_[rung]->packed_bytes();
    }

    void find_rungs(Pair& pair) {
        Model& m = pair.model;
        std::size_t older = rungs_.size();
        for (std::uint32_t b = m.packed_first / block(); b < m.rungs.size(); ++b) {
            Buffer keys(case_.rows, case_.shape, pair.batch.size(), block()), values = keys;
            pair.batch.read(b * block(), block(), keys.out(), values.out());
            const auto is = [&](const std::vector<std::vector<Token>>& sequences) {
                for (std::uint32_t s = 0; s < pair.batch.size(); ++s)
                    for (std::uint32_t t = 0; t < block(); ++t)
                        if (keys.get(s, t) != sequences[s][b * block() + t].key ||
                            values.get(s, t) != sequences[s][b * block() + t].value)
                            return false;
                return true;
            };
            if (!is(m.sequences)) {
                std::size_t& rung = m.rungs[b];
                auto sequences = m.sequences;
                while (rung < rungs_.size() && !is(sequences)) {
                    sequences = m.sequences;
                    for (auto& sequence : sequences)
                        batch_test::pack(*rungs_[rung], sequence, b * block());
                    ++rung;
                }
                REQUIRE(is(sequences));
                m.sequences = std::move(sequences);
                m.packed_end = std::max(m.packed_end, (b + 1) * block());
            }
            CHECK(m.rungs[b] <= older);
            older = m.rungs[b];
        }
    }

    void truncate(Pair& pair) {
        Model& m = pair.model;
        const std::uint32_t most = below(3) == 0 ? 200 : 5;
        const std::uint32_t to = std::max(m.first, m.tokens - std::min(m.tokens, below(most)));
        if (!succeeds(pair, [&] { pair.batch.truncate(to); })) return;
        m.tokens = to;
        if (to < m.packed_end) {
            const std::uint32_t kept = to > m.packed_first ? to - m.packed_first : 0;
            m.packed_end = m.packed_first + kept / block() * block();
        }
        m.rungs.resize(m.packed_end / block());
        if (m.first > 0) CHECK_THROWS_AS(pair.batch.truncate(m.first - 1), Error);
    }

    void drop(Pair& pair) {
        Model& m = pair.model;
        const std::uint32_t before = below(m.tokens / 2 + 1);
        pair.batch.drop_before(before);
        m.first = std::max(m.first, before / block() * block());
        m.packed_first = std::max(m.packed_first, m.first);
        m.packed_end = std::max(m.packed_end, m.packed_first);
    }

    void select(Pair& pair) {
        std::vector<std::uint32_t> rows;
        const std::uint32_t n = 1 + below(3);
        while (rows.size() < n) rows.push_back(below(pair.batch.size()));
        if (pair.begun) {
            CHECK_THROWS_AS(pair.batch.select(rows), Error);
            return;
        }
        if (!succeeds(pair, [&] { pair.batch.select(rows); })) return;
        std::vector<std::vector<Token>> chosen;
        for (const std::uint32_t row : rows) chosen.push_back(pair.model.sequences[row]);
        pair.model.sequences = std::move(chosen);
    }

    void fork_or_leave(Pair& pair) {
        if (pairs_.size() < 3) {
            // pair.begun's own step stays its own.
            Pair fork{pair.batch.fork(), pair.model, {}, {}, 0};
            pairs_.push_back(std::move(fork));
        } else {
            pairs_.erase(pairs_.begin() + below(3));
        }
    }

    void begin(Pair& pair) {
        if (case_.finer.empty()) pair.image = pair.batch.save();
        pair.held = pairs_.size() == 1 ? held() : 0;
        if (!succeeds(pair, [&] { pair.batch.begin(); })) return;
        pair.begun = pair.model;
        CHECK_THROWS_AS(pair.batch.begin(), Error);
    }

    void end(Pair& pair, bool keep) {
        if (keep) {
            pair.batch.commit();
        } else {
            pair.batch.rollback();
            pair.model = *pair.begun;
            if (case_.finer.empty()) CHECK(pair.batch.save() == pair.image);
            check_rows(pair);
            if (pairs_.size() == 1 && pair.held != 0) CHECK(held() == pair.held);
        }
        pair.begun.reset();
    }

    void check_counts(const Pair& pair) {
        REQUIRE(pair.batch.size() == pair.model.sequences.size());
        REQUIRE(pair.batch.tokens() == pair.model.tokens);
        REQUIRE(pair.batch.first() == pair.model.first);
        REQUIRE(pair.batch.packed_first() == pair.model.packed_first);
        REQUIRE(pair.batch.packed_end() == pair.model.packed_end);
    }

    void check_rows(Pair& pair) {
        const std::uint32_t first = pair.model.first, count = pair.model.tokens - first;
        Buffer keys(case_.rows, case_.shape, pair.batch.size(), count), values = keys;
        pair.batch.read(first, count, keys.out(), values.out(), *threads_);
        for (std::size_t s = 0; s < pair.batch.size(); ++s) {
            for (std::uint32_t t = 0; t < count; ++t) {
                const Token& token = pair.model.sequences[s][first + t];
                INFO("sequence ", s, " token ", first + t);
                REQUIRE(keys.get(s, t) == token.key);
                REQUIRE(values.get(s, t) == token.value);
            }
        }
    }
};

}  // namespace

TEST_CASE("random operations") {
    const Case cases[] = {
        {"kivi2,window=20,sinks=4,flush=0", {2, 16}, RowType::f16},
        {"kivi2,window=20,sinks=4,flush=0", {2, 16}, RowType::f32},
        {"int4,window=0,sinks=0,flush=0", {1, 16}, RowType::bf16},
        {"k=token-3-head-normal-hadamard-mean,v=token-2-head-normal-hadamard-unbiased,window=33,"
         "sinks=40,flush=64",
         {2, 16},
         RowType::f32},
        {"k=exact,v=token-2-g32,window=5,sinks=32,flush=0", {1, 32}, RowType::bf16},
        {"exact", {2, 16}, RowType::f32},
        {"exact,sinks=3", {1, 16}, RowType::bf16},
        {"kivi2,window=20,sinks=4,flush=0", {2, 32}, RowType::f32, {"kivi4"}},
        {"kivi2,window=20,sinks=0,flush=0", {2, 32}, RowType::bf16, {"int8", "kivi4"}},
    };
    unsigned number = 0;
    for (const Case& c : cases) {
        for (unsigned seed = 0; seed < 6; ++seed) {
            if (!test::in_sample(number++)) continue;
            INFO(c.scheme, " seed ", seed);
            Fuzz(c, seed).run(150);
        }
    }
}
