// Every operation on a cache with each of its allocations failing in turn: it leaves all as it was,
// and works when there is memory again.

#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "cache_common.h"
#include "lowkv/batch.h"
#include "lowkv/scheme.h"
#include "sample.h"
#include "shortage.h"

using namespace lowkv;
using cache_test::Rng;
using cache_test::Row;
using lowkv::test::Shortage;

namespace {

constexpr Shape shape{2, 32};
constexpr std::uint32_t block = 32;

// Eight blocks: packed, exact, and the last one not full; a fork shares them.
struct Caches {
    Rng rng{3};
    std::shared_ptr<Store> store = std::make_shared<Store>();
    std::shared_ptr<const Plan> plan = cache_test::make_plan(cache_test::kivi2, shape);
    Sequence sequence{store, plan, {.window = 3 * block, .sinks = block}};
    Sequence other{store, plan, {.window = 3 * block, .sinks = block}};
    std::optional<Sequence> fork;

    explicit Caches(bool forked) {
        for (Sequence* its : {&sequence, &other}) {
            cache_test::append(*its, rng, 7 * block + 9);
            its->pack();
        }
        if (forked) fork = sequence.fork();
    }
    // All that can be seen.
    std::vector<Row> state() const {
        std::vector<Row> state;
        for (const Sequence* its : {&sequence, &other, fork ? &*fork : nullptr}) {
            if (its == nullptr) continue;
            state.push_back({static_cast<float>(its->size())});
            for (std::uint32_t b = 0; b < its->blocks(); ++b)
                state.push_back({float(its->packed(b)), float(its->full(b)),
                                 float(its->has_values(b)), float(its->view(b).keys != nullptr)});
            for (std::uint32_t cell = 0; cell < its->size(); ++cell) {
                state.push_back(cache_test::read_key(*its, cell));
                state.push_back(cache_test::read_value(*its, cell));
            }
        }
        return state;
    }
};

struct Operation {
    const char* name;
    std::function<void(Caches&)> run;
};

std::vector<Operation> operations() {
    static std::vector<std::uint32_t> cells(5 * block);
    std::iota(cells.begin(), cells.end(), block + 7);
    cells.push_back(20 * block);
    static Rng rng(9);
    static const Row rows = cache_test::random_rows(rng, cells.size(), shape.channels());
    static const Rows many{rows.data(), RowType::f32, shape.head_dim, shape.channels()};
    static const std::vector<std::uint32_t> all{0, 1, 2, 3, 4, 5, 6, 7, 8}, absent{9, 12},
        sources = [] {
            std::vector<std::uint32_t> its(2 * block);
            std::iota(its.begin(), its.end(), 4 * block + 3);
            return its;
        }();
    return {
        {"append", [](Caches& c) { c.sequence.append(many, many, 4 * block); }},
        {"write_keys", [](Caches& c) { c.sequence.write_keys(cells, many); }},
        {"write_values", [](Caches& c) { c.sequence.write_values(cells, many); }},
        {"write", [](Caches& c) { c.sequence.write(cells, many, many); }},
        {"pack", [](Caches& c) { c.sequence.pack(all); }},
        {"pack_from", [](Caches& c) { c.sequence.pack_from(c.other, absent, sources); }},
        {"pack_keys_from", [](Caches& c) { c.sequence.pack_keys_from(c.other, absent, sources); }},
        {"fork", [](Caches& c) { c.other = c.sequence.fork(); }},
        {"a step",
         [](Caches& c) {
             c.sequence.begin();
             try {
                 c.sequence.write(cells, many, many);
                 c.sequence.pack(all);
             } catch (...) {
                 c.sequence.rollback();
                 throw;
             }
             c.sequence.commit();
         }},
    };
}

}  // namespace

TEST_CASE("a sequence's operations") {
    for (const Operation& operation : operations()) {
        for (const bool forked : {false, true}) {
            CAPTURE(operation.name);
            CAPTURE(forked);
            Caches whole(forked);
            operation.run(whole);
            const auto want = whole.state();
            for (const Shortage::Kind kind : {Shortage::Kind::single, Shortage::Kind::lasting}) {
                std::size_t number = 0;
                for (bool felt = true; felt; ++number) {
                    if (!lowkv::test::in_sample(static_cast<unsigned>(number))) continue;
                    CAPTURE(number);
                    Caches caches(forked);
                    const auto before = caches.state();
                    const StoreStats stats = caches.store->stats();
                    bool failed = false;
                    try {
                        const Shortage shortage(kind, number);
                        try {
                            operation.run(caches);
                        } catch (...) {
                            felt = shortage.felt();
                            throw;
                        }
                        felt = shortage.felt();
                    } catch (const std::bad_alloc&) {
                        failed = true;
                    }
                    CHECK(failed == felt);
                    if (failed) {
                        REQUIRE(caches.state() == before);
                        CHECK(caches.store->stats().exact_bytes == stats.exact_bytes);
                        CHECK(caches.store->stats().packed_bytes == stats.packed_bytes);
                        operation.run(caches);
                    }
                    REQUIRE(caches.state() == want);
                }
                CHECK(number > 1);
            }
        }
    }
}
