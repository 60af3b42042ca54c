// The trellis' codes (docs/methods.md): paths through words, and what they lose.

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "codec/trellis.h"
#include "codec/units.h"
#include "isa/table.h"
#include "lowkv/codec.h"
#include "lowkv/implementation.h"
#include "quantizers/codes_part.h"
#include "quantizers/grouped/trellis_codes.h"

using namespace lowkv;
using namespace lowkv::codec;

namespace {

constexpr std::uint32_t words = kernels::trellis_words, count = LOWKV_WORD_CODES;
constexpr Width widths[] = {Width::one, Width::two, Width::three};

using Levels64 = std::array<float, LOWKV_WINDOWS>;

struct Words {
    Width width;
    std::vector<float> samples = std::vector<float>(std::size_t{count} * words);
    std::vector<std::uint8_t> windows = std::vector<std::uint8_t>(samples.size());
    std::vector<std::uint8_t> codes = windows;

    std::uint8_t& code(std::uint32_t i, std::uint32_t word) {
        return codes[i % count * words + word];
    }
    // As lowkv/format.h says it in words.
    std::uint32_t window(std::uint32_t i, std::uint32_t word) {
        std::uint32_t window = code(i, word);
        switch (width) {
            case Width::one:
                for (std::uint32_t k = 1; k < 6; ++k)
                    window |= static_cast<std::uint32_t>(code(i + k, word)) << k;
                break;
            case Width::two: window |= code(i + 1, word) << 2u | code(i + 2, word) << 4u; break;
            default:
                for (std::uint32_t k = 1; k < 4; ++k)
                    window |= static_cast<std::uint32_t>(code(i + k, word) >> 2) << (2 + k);
        }
        return window;
    }
    double error(std::uint32_t word, const Levels64& levels) {
        double sum = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
            const double off = samples[i * words + word] - double{levels[window(i, word)]};
            sum += off * off;
        }
        return sum;
    }
};

Levels64 book_levels(Width width) {
    const TrellisBook& book = trellis_book(trellis_bits(width));
    Levels64 levels{};
    for (std::uint32_t w = 0; w < levels.size(); ++w)
        levels[w] = book.step * static_cast<float>(book.first[w & 15] + book.second[w >> 2]);
    return levels;
}

Words encoded(const kernels::Table& table, Width width, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Words made{.width = width};
    for (float& x : made.samples) x = normal(random);
    const std::uint32_t bits = trellis_bits(width);
    REQUIRE(bits > 0);
    table.encode_trellis[bits - 1](made.samples.data(), book_levels(width).data(),
                                   made.windows.data());
    for (std::size_t i = 0; i < made.codes.size(); ++i)
        made.codes[i] = static_cast<std::uint8_t>(made.windows[i] & ((1u << bits) - 1));
    return made;
}

}  // namespace

TEST_CASE("books are odd, and their parts' levels are them") {
    for (const Width width : widths) {
        const std::string codec = "token-" + std::string(row_of(width).word) + "-head-trellis";
        CAPTURE(codec);
        const Plan plan(parse_scheme("k=" + codec + ",v=" + codec).base, Shape{1, 64});
        const auto& layout = dynamic_cast<const CodesPart&>(plan.keys());
        const Levels64 levels = book_levels(width);
        for (std::uint32_t w = 0; w < 64; ++w) {
            CHECK(levels[w] == -levels[63 - w]);
            CHECK(layout.level_of(w) + layout.level_of(63 - w) == 2 * trellis_middle);
            CHECK(layout.level_of(w) * layout.level_step + layout.level_zero ==
                  doctest::Approx(levels[w]).epsilon(1e-5).scale(1));
        }
    }
}

TEST_CASE("no other code makes a path better, and every implementation finds the same one") {
    const kernels::Table& best = kernels::select("");
    for (const Width width : widths) {
        CAPTURE(row_of(width).word);
        const Levels64 levels = book_levels(width);
        const std::uint32_t number = kernels::number_of(width);
        for (unsigned seed = 0; seed < 20; ++seed) {
            Words found = encoded(best, width, seed);
            for (const Implementation& other : implementations()) {
                if (!other.supported) continue;
                CAPTURE(other.name);
                CHECK(encoded(kernels::select(other.name), width, seed).windows == found.windows);
            }
            for (std::uint32_t word = 0; word < words; ++word) {
                for (std::uint32_t i = 0; i < count; ++i)
                    REQUIRE(found.windows[i * words + word] == found.window(i, word));
                // The codes of the state that a word starts from were chosen by its neighbourhood.
                const double chosen = found.error(word, levels);
                for (std::uint32_t i = lowkv_window_codes(number) - 1; i < count; ++i) {
                    const std::uint8_t own = found.code(i, word);
                    for (std::uint32_t other = 0; other < lowkv_levels(number); ++other) {
                        found.code(i, word) = static_cast<std::uint8_t>(other);
                        REQUIRE(found.error(word, levels) >= chosen * (1 - 1e-5));
                    }
                    found.code(i, word) = own;
                }
            }
        }
    }
}

TEST_CASE("of N(0, 1) it loses a fifth to a third less than Lloyd-Max levels do") {
    struct Limits {
        Width width;
        double bound, most;  // of any code of so many bits; of this one
    };
    // Lloyd-Max: .3634, .1175, .0345.
    for (const Limits& limits :
         {Limits{Width::one, 0.25, 0.3005}, Limits{Width::two, 0.0625, 0.0855},
          Limits{Width::three, 0.015625, 0.0230}}) {
        CAPTURE(row_of(limits.width).word);
        const Levels64 levels = book_levels(limits.width);
        double sum = 0;
        constexpr unsigned turns = 200;
        for (unsigned seed = 0; seed < turns; ++seed) {
            Words found = encoded(kernels::select(""), limits.width, seed);
            for (std::uint32_t word = 0; word < words; ++word) sum += found.error(word, levels);
        }
        const double mse = sum / (turns * words * count);
        INFO("squared error " << mse);
        CHECK(mse < limits.most);
        CHECK(mse > limits.bound);
    }
}

TEST_CASE("windows are those of the codes as they lie in a block") {
    std::mt19937 random(4);
    constexpr std::uint32_t lanes = 64;
    for (const Width width : widths) {
        const std::uint32_t number = kernels::number_of(width);
        CodeTile tile;
        for (auto& row : tile.row)
            for (auto& code : row)
                code = static_cast<std::uint8_t>(random() % lowkv_levels(number));
        const CodeTile codes = tile;
        std::vector<std::uint8_t> bytes(lowkv_codes_bytes(number, lanes, LOWKV_UNIT_STEPS));
        HeadShape head;
        head.lanes = lanes;
        head.steps = LOWKV_UNIT_STEPS;
        pack_tile(codes, width, head, 0, bytes.data());
        open_windows(tile, width, lanes);
        // Packing a window takes its code.
        std::vector<std::uint8_t> again(bytes.size());
        pack_tile(tile, width, head, 0, again.data());
        CHECK(again == bytes);
        for (std::uint32_t lane = 0; lane < lanes; ++lane)
            for (std::uint32_t step = 0; step < LOWKV_UNIT_STEPS; ++step)
                CHECK(tile.row[step][lane] ==
                      lowkv_load_window(bytes.data(), number, LOWKV_UNIT_STEPS, lane, step));
    }
}
