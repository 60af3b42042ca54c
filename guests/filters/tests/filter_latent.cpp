// Layers of multi-head latent attention: what is read as values is in their keys.

#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "cache_common.h"
#include "lowkv/filter.h"
#include "sealed_device.h"

using namespace lowkv;
using cache_test::Rng;
using cache_test::Row;

namespace {

constexpr Shape shape{1, 96, 80};

}  // namespace

TEST_CASE("a latent layer is filtered as any other") {
    for (const char* scheme : {"exact", "int8", "lowkv2.8"}) {
        CAPTURE(scheme);
        Rng rng(6);
        FilteredSequence sequence(
            lowkv::test::make_store(),
            std::make_shared<const Plan>(parse_scheme(scheme).base, shape),
            {.window = 40, .sinks = 5, .filter = Filter::random, .keep = 20, .evict = 40});
        std::vector<Row> keys;
        for (int round = 0; round < 4; ++round) {
            const std::uint32_t tokens = 150;
            const Row rows = cache_test::random_rows(rng, tokens, shape.channels());
            sequence.append(rows.data(), nullptr, tokens);
            for (std::uint32_t t = 0; t < tokens; ++t) {
                keys.emplace_back(rows.begin() + std::ptrdiff_t{t} * shape.channels(),
                                  rows.begin() + std::ptrdiff_t{t + 1} * shape.channels());
                for (float& x : keys.back()) x = cache_test::round_to_f16(x);
            }
            sequence.pack();
        }
        CHECK(sequence.evicted() > 0);
        const Sequence& cells = sequence.cells();
        for (std::uint32_t cell = 0; cell < cells.size(); ++cell) {
            const Row key = cache_test::read_key(cells, cell);
            Row value(shape.value_dim);
            cells.read_value(cell, value.data());
            REQUIRE(value == Row(key.begin(), key.begin() + shape.value_dim));
            if (!cells.packed(cell / cells.plan().block_tokens()))
                CHECK(key == keys[sequence.position(cell)]);
        }
    }
}
