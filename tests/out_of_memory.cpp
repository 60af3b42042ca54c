// A filtered sequence that packs with each of its allocations failing in turn. Other operations, of
// which some allocations fail: blocks_*.cpp.

#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cache_common.h"
#include "lowkv/filter.h"
#include "lowkv/scheme.h"
#include "sample.h"
#include "shortage.h"

using namespace lowkv;
using cache_test::Rng;
using cache_test::Row;
using lowkv::test::Shortage;

namespace {

constexpr Shape shape{2, 32};

// Half of what is packed goes first, so that cells move.
FilteredSequence filtered() {
    const Scheme scheme = parse_scheme("kivi2,filter=random,keep=20%,evict=40%,window=32,sinks=5");
    FilteredSequence sequence(std::make_shared<Store>(), cache_test::make_plan(scheme.base, shape),
                              scheme.retention);
    Rng rng(4);
    for (const std::uint32_t tokens : {150u, 130u}) {
        const Row keys = cache_test::random_rows(rng, tokens, shape.channels()),
                  values = cache_test::random_rows(rng, tokens, shape.channels());
        if (sequence.size() > 0) sequence.pack();
        sequence.append(keys.data(), values.data(), tokens);
    }
    return sequence;
}

// By position: key and value.
std::vector<std::vector<Row>> rows_of(const FilteredSequence& sequence) {
    std::vector<std::vector<Row>> rows(sequence.size());
    for (std::uint32_t cell = 0; cell < sequence.cells().size(); ++cell)
        rows[sequence.position(cell)] = {cache_test::read_key(sequence.cells(), cell),
                                         cache_test::read_value(sequence.cells(), cell)};
    return rows;
}

}  // namespace

TEST_CASE("a filtered sequence that packs keeps every key with its value") {
    FilteredSequence whole = filtered();
    const auto unpacked = rows_of(whole);
    whole.pack();
    const auto want = rows_of(whole);
    std::size_t number = 0;
    for (bool felt = true; felt; ++number) {
        if (!lowkv::test::in_sample(static_cast<unsigned>(number))) continue;
        CAPTURE(number);
        FilteredSequence sequence = filtered();
        const std::uint32_t undecided = sequence.undecided();
        try {
            const Shortage shortage(Shortage::Kind::single, number);
            try {
                sequence.pack();
            } catch (...) {
                felt = shortage.felt();
                throw;
            }
            felt = shortage.felt();
        } catch (const std::bad_alloc&) {
            const auto rows = rows_of(sequence);
            for (std::size_t position = 0; position < rows.size(); ++position)
                REQUIRE((rows[position].empty() || rows[position] == unpacked[position]));
            if (sequence.undecided() == undecided) REQUIRE(rows == unpacked);
            sequence.pack();
        }
        REQUIRE(rows_of(sequence) == want);
    }
    CHECK(number > 20);
}
