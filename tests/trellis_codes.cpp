// The trellis' codes (docs/methods.md): paths through words, and what they lose.

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "codec/trellis.h"
#include "families/codes_part.h"
#include "families/rotated/trellis_codes.h"
#include "kernels/table.h"
#include "lowkv/codec.h"
#include "lowkv/implementation.h"

using namespace lowkv;
using namespace lowkv::codec;

namespace {

constexpr std::uint32_t words = kernels::trellis_words, count = LOWKV_WORD_CODES;

struct Words {
    std::vector<float> samples = std::vector<float>(std::size_t{count} * words);
    std::vector<std::uint8_t> codes = std::vector<std::uint8_t>(samples.size());

    std::uint8_t& code(std::uint32_t i, std::uint32_t word) {
        return codes[i % count * words + word];
    }
    std::uint32_t window(std::uint32_t i, std::uint32_t word) {
        return code(i, word) | code(i + 1, word) << 2u | code(i + 2, word) << 4u;
    }
    double error(std::uint32_t word, const std::array<float, 64>& levels) {
        double sum = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
            const double off = samples[i * words + word] - double{levels[window(i, word)]};
            sum += off * off;
        }
        return sum;
    }
};

std::array<float, 64> book_levels() {
    std::array<float, 64> levels{};
    for (std::uint32_t w = 0; w < 64; ++w)
        levels[w] = trellis_step *
                    static_cast<float>(trellis_book.first[w & 15] + trellis_book.second[w >> 2]);
    return levels;
}

Words encoded(const kernels::Table& table, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Words made;
    for (float& x : made.samples) x = normal(random);
    table.encode_trellis(made.samples.data(), book_levels().data(), made.codes.data());
    return made;
}

}  // namespace

TEST_CASE("the book is odd, and its part's levels are it") {
    const Plan plan(parse_scheme("k=token-2-head-trellis,v=token-2-head-trellis").base,
                    Shape{1, 64});
    const auto& layout = dynamic_cast<const CodesPart&>(plan.keys());
    const std::array<float, 64> levels = book_levels();
    for (std::uint32_t w = 0; w < 64; ++w) {
        CHECK(levels[w] == -levels[63 - w]);
        CHECK(layout.level_of(w) * layout.level_step + layout.level_zero ==
              doctest::Approx(levels[w]).epsilon(1e-5).scale(1));
    }
}

TEST_CASE("no other code makes a path better, and every implementation finds the same one") {
    const std::array<float, 64> levels = book_levels();
    const kernels::Table& best = kernels::select("");
    for (unsigned seed = 0; seed < 20; ++seed) {
        Words found = encoded(best, seed);
        for (const Implementation& other : implementations()) {
            if (!other.supported) continue;
            CAPTURE(other.name);
            CHECK(encoded(kernels::select(other.name), seed).codes == found.codes);
        }
        // The codes of the state that a word starts from were chosen by its neighbourhood.
        for (std::uint32_t word = 0; word < words; ++word) {
            const double chosen = found.error(word, levels);
            for (std::uint32_t i = 2; i < count; ++i) {
                const std::uint8_t own = found.code(i, word);
                for (std::uint8_t other = 0; other < 4; ++other) {
                    found.code(i, word) = other;
                    REQUIRE(found.error(word, levels) >= chosen * (1 - 1e-5));
                }
                found.code(i, word) = own;
            }
        }
    }
}

TEST_CASE("of N(0, 1) it loses a quarter less than Lloyd-Max levels do") {
    const std::array<float, 64> levels = book_levels();
    double sum = 0;
    constexpr unsigned turns = 200;
    for (unsigned seed = 0; seed < turns; ++seed) {
        Words found = encoded(kernels::select(""), seed);
        for (std::uint32_t word = 0; word < words; ++word) sum += found.error(word, levels);
    }
    const double mse = sum / (turns * words * count);
    CHECK(mse < 0.0855);  // Lloyd-Max: .1175
    CHECK(mse > 0.0625);  // the bound for 2 bits
}

TEST_CASE("windows are those of the codes as they lie in a block") {
    std::mt19937 random(4);
    CodeTile tile;
    for (auto& row : tile.row)
        for (auto& code : row) code = random() & 3;
    const CodeTile codes = tile;
    constexpr std::uint32_t lanes = 64;
    std::vector<std::uint8_t> bytes(lowkv_codes_bytes(LOWKV_TWO, lanes, LOWKV_UNIT_STEPS));
    HeadShape head;
    head.lanes = lanes;
    head.steps = LOWKV_UNIT_STEPS;
    pack_tile(codes, Width::two, head, 0, bytes.data());
    open_windows(tile, lanes);
    for (std::uint32_t lane = 0; lane < lanes; ++lane)
        for (std::uint32_t step = 0; step < LOWKV_UNIT_STEPS; ++step)
            CHECK(tile.row[step][lane] ==
                  lowkv_load_window(bytes.data(), LOWKV_UNIT_STEPS, lane, step));
}
