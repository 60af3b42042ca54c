// The trellis' codes (docs/methods.md): paths through words, and what they lose.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codec/units.h"
#include "isa/table.h"
#include "lowkv/codebook.h"
#include "lowkv/codec.h"
#include "lowkv/implementation.h"
#include "quantizers/codes_part.h"
#include "quantizers/packing.h"

using namespace lowkv;
using namespace lowkv::codec;

namespace {

constexpr std::uint32_t words = 44, count = LOWKV_WORD_CODES;
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

Words encoded(const kernels::Table& table, Width width, const std::vector<float>& samples) {
    Words made{.width = width, .samples = samples};
    const std::uint32_t bits = trellis_bits(width);
    REQUIRE(bits > 0);
    // As values of 16 tokens: a word has four channels of each.
    constexpr std::uint32_t channels = words * LOWKV_WORD_LANES;
    std::vector<float> y(samples.size());
    std::vector<std::uint8_t> windows(samples.size());
    const auto place = [](std::uint32_t i, std::uint32_t word) {
        return lowkv_word_step(i) * channels + word * LOWKV_WORD_LANES + lowkv_word_lane(i);
    };
    for (std::uint32_t i = 0; i < count; ++i)
        for (std::uint32_t word = 0; word < words; ++word)
            y[place(i, word)] = samples[i * words + word];
    table.find_windows(bits, Part::values, y.data(), channels, channels, windows.data());
    for (std::uint32_t i = 0; i < count; ++i)
        for (std::uint32_t word = 0; word < words; ++word)
            made.windows[i * words + word] = windows[place(i, word)];
    for (std::size_t i = 0; i < made.codes.size(); ++i)
        made.codes[i] = static_cast<std::uint8_t>(made.windows[i] & ((1u << bits) - 1));
    return made;
}

// What two costs that differ are apart at least, in squares of N(0, 1).
double cost_step(Width width) {
    const lowkv_path_costs costs = path_costs(trellis_bits(width));
    const Levels64 levels = book_levels(width);
    const double scale = costs.square[0] / (double{levels[0]} * levels[0]);
    return (costs.marks + 1) / scale;
}

// The search as src/kernels/body/trellis.h describes it, of one word, with costs that nothing
// bounds: those of 16 bits are the same, or one of them has overflowed.
std::vector<std::uint32_t> plain_search(Width width, const Words& of, std::uint32_t word) {
    const lowkv_path_costs costs = path_costs(trellis_bits(width));
    const std::uint32_t number = kernels::number_of(width), own = lowkv_own_bits(number);
    const std::uint32_t linked = lowkv_linked_bits(number), bits = own + linked;
    const std::uint32_t states = LOWKV_WINDOWS >> bits, run_up = width == Width::one ? 32 : 16;
    using Costs = std::vector<std::int64_t>;
    Costs cost(states, 0);
    std::vector<std::vector<std::uint32_t>> best(count, std::vector<std::uint32_t>(states));
    const auto before = [&](std::uint32_t state, std::uint32_t code) {
        return code >> own | (state << linked & (states - 1));
    };
    const auto step = [&](std::uint32_t i, std::uint32_t at) {
        const std::int32_t x = path_sample(of.samples[i % count * words + word]);
        const auto product = [&](const std::int32_t* table, std::uint32_t entry) {
            const std::int32_t size =
                ((x * table[std::min(entry, 15 - entry)] + 0x4000) >> 15) & ~costs.marks;
            return entry < 8 ? size : -size;
        };
        Costs after(states, std::numeric_limits<std::int64_t>::max());
        for (std::uint32_t to = 0; to < states; ++to) {
            for (std::uint32_t link = 0; link < 1u << linked; ++link) {
                std::int64_t error = std::numeric_limits<std::int64_t>::max();
                for (std::uint32_t o = 0; o < 1u << own; ++o) {
                    const std::uint32_t w = o | link << own | to << bits;
                    error = std::min<std::int64_t>(error,
                                                   costs.square[w] - product(costs.first, w % 16));
                }
                const std::uint32_t code =
                    link << own | static_cast<std::uint32_t>(own > 0 ? error & costs.marks : 0);
                const std::int64_t sum = cost[before(to, code)] +
                                         (error & ~std::int64_t{costs.marks}) -
                                         product(costs.second, (code | to << bits) / 4);
                if (sum >= after[to]) continue;
                after[to] = sum;
                best[at][to] = code;
            }
        }
        cost = after;
    };
    for (std::uint32_t i = 0; i < 2 * run_up; ++i) step(count - run_up + i, i);
    // Of equal ones that which marks make the least.
    for (std::uint32_t s = 0; s < states; ++s) cost[s] |= s & ((1u << linked) - 1);
    auto state = static_cast<std::uint32_t>(std::ranges::min_element(cost) - cost.begin());
    for (std::uint32_t i = 2 * run_up; i-- > run_up;) state = before(state, best[i][state]);
    cost.assign(states, std::int64_t{1} << 40);
    cost[state] = 0;
    for (std::uint32_t i = 0; i < count; ++i) step(i, i);
    std::vector<std::uint32_t> windows(count);
    for (std::uint32_t i = count; i-- > 0;) {
        windows[i] = best[i][state] | state << bits;
        state = before(state, best[i][state]);
    }
    return windows;
}

std::vector<float> normal_samples(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> samples(std::size_t{count} * words);
    for (float& x : samples) x = normal(random);
    return samples;
}

Words encoded(const kernels::Table& table, Width width, unsigned seed) {
    return encoded(table, width, normal_samples(seed));
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
                // Costs are whole steps: of each window that a code is in, three may be off by one.
                const double chosen = found.error(word, levels);
                const double off = 3 * lowkv_window_codes(number) * cost_step(width);
                for (std::uint32_t i = lowkv_window_codes(number) - 1; i < count; ++i) {
                    const std::uint8_t own = found.code(i, word);
                    for (std::uint32_t other = 0; other < lowkv_levels(number); ++other) {
                        found.code(i, word) = static_cast<std::uint8_t>(other);
                        REQUIRE(found.error(word, levels) >= chosen - off);
                    }
                    found.code(i, word) = own;
                }
            }
        }
    }
}

TEST_CASE("whatever the samples are, a path is a circle and the one that unbounded costs find") {
    std::mt19937 random(8);
    std::student_t_distribution<float> wild(1);
    const float extremes[] = {-4,
                              4,
                              -1e30f,
                              1e30f,
                              std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity(),
                              0};
    for (const Width width : widths) {
        CAPTURE(row_of(width).word);
        for (unsigned turn = 0; turn < 60; ++turn) {
            CAPTURE(turn);
            std::vector<float> samples(std::size_t{count} * words);
            const std::size_t kinds = turn % 2 == 0 ? 2 : std::size(extremes);
            for (float& x : samples) x = turn % 3 == 0 ? wild(random) : extremes[random() % kinds];
            Words found = encoded(kernels::select(""), width, samples);
            for (const Implementation& other : implementations()) {
                if (!other.supported) continue;
                CAPTURE(other.name);
                CHECK(encoded(kernels::select(other.name), width, samples).windows ==
                      found.windows);
            }
            for (std::uint32_t word = 0; word < words; ++word) {
                const std::vector<std::uint32_t> plain = plain_search(width, found, word);
                for (std::uint32_t i = 0; i < count; ++i) {
                    REQUIRE(found.windows[i * words + word] == plain[i]);
                    REQUIRE(found.windows[i * words + word] == found.window(i, word));
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
