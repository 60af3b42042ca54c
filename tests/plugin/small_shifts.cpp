// Many context shifts of few tokens, as clients may ask for them: what they cost doesn't grow with
// their number.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "buffer.h"
#include "ggml_cache.h"

namespace {

using namespace lowkv::test;

constexpr std::uint32_t cells = 1024;
constexpr std::size_t span_tokens = 64;

// The same life in a packed cache and in an exact one, whose keys are the truth.
struct Life {
    Cache packed, exact;
    std::vector<Cells> sequences;  // in the order of their positions
    std::mt19937 random;

    Life(const std::string& scheme, unsigned seed, std::size_t count)
        : packed(scheme, cells), exact("exact", cells), sequences(count), random(seed) {}

    std::uint32_t below(std::size_t most) { return static_cast<std::uint32_t>(random() % most); }

    void step(Cells& sequence, std::size_t tokens) {
        Cells where = range(0, cells);
        std::erase_if(where, [&](std::uint32_t cell) {
            return std::ranges::any_of(sequences, [&](const Cells& taken) {
                return std::ranges::find(taken, cell) != taken.end();
            });
        });
        where.resize(tokens);
        REQUIRE(packed.step(where, sequence) == fine);
        REQUIRE(exact.step(where, sequence) == fine);
        sequence.insert(sequence.end(), where.begin(), where.end());
    }
    // The tokens behind `keep` go, and those behind them move up.
    void shift(Cells& sequence, std::size_t keep, std::size_t discard) {
        std::vector<std::int32_t> by(cells, 0);
        for (std::size_t i = keep + discard; i < sequence.size(); ++i)
            by[sequence[i]] = -static_cast<std::int32_t>(discard);
        REQUIRE(packed.shift(by) == fine);
        REQUIRE(exact.shift(by) == fine);
        const auto first = sequence.begin() + static_cast<std::ptrdiff_t>(keep);
        sequence.erase(first, first + static_cast<std::ptrdiff_t>(discard));
    }
    // The largest relative error of the keys of neighbours.
    double worst() const {
        double most = 0;
        for (const Cells& sequence : sequences)
            for (std::size_t first = 0; first + span_tokens <= sequence.size();
                 first += span_tokens) {
                double error = 0, size = 0;
                for (std::size_t i = first; i < first + span_tokens; ++i) {
                    const Bytes a = rows_of(packed.keys(1), sequence[i], 1);
                    const Bytes b = rows_of(exact.keys(1), sequence[i], 1);
                    for (std::size_t c = 0; c < channels; ++c) {
                        ggml_fp16_t x = 0, y = 0;
                        std::memcpy(&x, a.data() + c * sizeof x, sizeof x);
                        std::memcpy(&y, b.data() + c * sizeof y, sizeof y);
                        const double right = ggml_fp16_to_fp32(y);
                        error += std::pow(ggml_fp16_to_fp32(x) - right, 2);
                        size += right * right;
                    }
                }
                most = std::max(most, std::sqrt(error / size));
            }
        return most;
    }
    std::uint64_t reopened() const {
        lowkv::ggml::CacheStats stats;
        lowkv::ggml::cache_tensor(packed.keys(0))->buffer->add_stats(stats);
        return stats.reopened_blocks;
    }
};

}  // namespace

TEST_CASE("keys lose no more by many small context shifts than by one") {
    unsigned seed = 1;
    for (const std::string scheme : {"lowkv2.8", "lowkv4", "kivi2", "int8"}) {
        for (const std::size_t count : {1u, 2u}) {
            CAPTURE(scheme);
            CAPTURE(count);
            Life life(scheme + ",window=32,sinks=0", seed++, count);
            const std::size_t each = 900 / count;
            for (Cells& sequence : life.sequences)
                while (sequence.size() < each)
                    life.step(sequence, std::min<std::size_t>(150, each - sequence.size()));
            const double before = life.worst();
            std::size_t gone = 0;
            const std::size_t keep = life.below(each / 2);
            for (int round = 0; round < 90; ++round) {
                Cells& sequence = life.sequences[life.below(count)];
                const std::size_t discard = 1 + life.below(round % 3 == 0 ? 16 : 3);
                gone += discard;
                life.shift(sequence, keep, discard);
                life.step(sequence, discard);
            }
            MESSAGE(scheme, ": error ", before, " -> ", life.worst(), ", reopened ",
                    life.reopened(), " after ", gone, " tokens");
            CHECK(life.worst() < 1.5 * before);
            CHECK(life.reopened() <= layers * (gone / 32 + 2 * count));
        }
    }
}
