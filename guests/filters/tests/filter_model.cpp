// Random operations on filtered sequences that share a store, against a model that is too simple to
// be wrong: a list of tokens with their rows and fates.

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "cache_common.h"
#include "lowkv/error.h"
#include "lowkv/filter.h"
#include "sample.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace cache_test;

namespace {

struct Token {
    Row key, value;  // as f16
    bool undecided = true;
    Fate fate = Fate::pack;
};

// By position; evicted tokens stay in the list.
using Model = std::vector<Token>;

struct Case {
    std::string name;
    LayerScheme scheme;
    Retention retention;
    unsigned keep, evict;  // of ten tokens
};

// A rule of the user's own, which does not care for quotas.
class ByPosition final : public FilterRule {
  public:
    ByPosition(unsigned keep, unsigned evict) : keep_(keep), evict_(evict) {}
    Fate fate(std::uint32_t position) const {
        const std::uint32_t dice = position * 2654435761u >> 16u;
        if (dice % 10 < keep_) return Fate::keep;
        return dice % 10 < keep_ + evict_ ? Fate::evict : Fate::pack;
    }
    void decide(const LeavingTokens& tokens, std::span<Fate> fates) const override {
        for (std::size_t i = 0; i < fates.size(); ++i) fates[i] = fate(tokens.positions[i]);
    }

  private:
    unsigned keep_, evict_;
};

class Fuzz {
  public:
    Fuzz(const Case& c, unsigned seed)
        : rng_(seed),
          plan_(make_plan(c.scheme, {2, 16})),
          store_(lowkv::test::make_store()),
          retention_(c.retention),
          rule_(std::make_shared<ByPosition>(c.keep, c.evict)),
          tokens_(plan_->block_tokens()),
          channels_(plan_->shape().channels()),
          threads_(make_thread_executor(2)) {}

    void run(int steps) {
        add(FilteredSequence(store_, plan_, retention_, rule_), {});
        for (int i = 0; i < steps; ++i) {
            step();
            check_store();
            check(below(static_cast<std::uint32_t>(sequences_.size())));
        }
        sequences_.clear();
        check_store();
    }

  private:
    Rng rng_;
    std::shared_ptr<const Plan> plan_;
    std::shared_ptr<Store> store_;
    Retention retention_;
    std::shared_ptr<const ByPosition> rule_;
    std::uint32_t tokens_;
    std::uint32_t channels_;
    std::unique_ptr<Executor> threads_;
    std::vector<FilteredSequence> sequences_;
    std::vector<Model> models_;  // parallel

    std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(rng_() % n); }

    void add(FilteredSequence sequence, Model model) {
        sequences_.push_back(std::move(sequence));
        models_.push_back(std::move(model));
    }

    void step() {
        const std::size_t s = below(static_cast<std::uint32_t>(sequences_.size()));
        const std::uint32_t dice = below(100);
        if (dice < 50) {
            append(s);
        } else if (dice < 75) {
            pack(s);
        } else if (dice < 85) {
            truncate(s);
        } else if (dice < 95) {
            if (sequences_.size() < 4) add(sequences_[s].fork(), models_[s]);
        } else if (sequences_.size() > 1) {
            sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(s));
            models_.erase(models_.begin() + static_cast<std::ptrdiff_t>(s));
        }
    }

    // ---- operations, on the real thing and on the model ----

    void append(std::size_t s) {
        const std::uint32_t n = below(3) == 0 ? 1 : below(3 * tokens_);
        const Row keys = random_rows(rng_, n, channels_), values = random_rows(rng_, n, channels_);
        sequences_[s].append(keys.data(), values.data(), n);
        for (std::uint32_t i = 0; i < n; ++i) {
            const auto at = static_cast<std::ptrdiff_t>(i) * channels_;
            Token token{Row(keys.begin() + at, keys.begin() + at + channels_),
                        Row(values.begin() + at, values.begin() + at + channels_)};
            for (float& x : token.key) x = round_to_f16(x);
            for (float& x : token.value) x = round_to_f16(x);
            models_[s].push_back(std::move(token));
        }
    }

    void pack(std::size_t s) {
        sequences_[s].pack(below(2) == 0 ? serial_executor() : *threads_);
        Model& m = models_[s];
        const std::size_t unit = retention_.flush > 0 ? retention_.flush : tokens_;
        const std::size_t old = m.size() > retention_.window ? m.size() - retention_.window : 0;
        for (std::uint32_t p = 0; p < old / unit * unit; ++p) {
            if (!m[p].undecided) continue;
            m[p].undecided = false;
            m[p].fate = p < retention_.sinks ? Fate::keep : rule_->fate(p);
        }
    }

    void truncate(std::size_t s) {
        Model& m = models_[s];
        const auto size = static_cast<std::uint32_t>(m.size());
        const std::uint32_t to = size - std::min(size, below(2) == 0 ? below(5) : below(100));
        if (to < size && !m[to].undecided) {
            CHECK_THROWS_AS(sequences_[s].truncate(to), Error);
            return;
        }
        sequences_[s].truncate(to);
        m.resize(to);
    }

    // ---- checks ----

    bool near(const Codec& codec, const Row& was, const Row& is, float largest) const {
        const float levels = codec.exact() ? 1.0f : static_cast<float>(codec.level_count() - 1);
        const float bound = codec.exact() ? 0.0f : (1.01f / levels + 0.01f) * largest;
        for (std::size_t c = 0; c < was.size(); ++c) {
            if (std::abs(was[c] - is[c]) > bound) return false;
        }
        return true;
    }

    void check(std::size_t s) {
        const FilteredSequence& sequence = sequences_[s];
        const Sequence& cells = sequence.cells();
        const Model& m = models_[s];
        std::uint32_t left = 0, undecided = 0, packed = 0, kept = 0;
        float largest = 0;
        for (const Token& token : m) {
            undecided += token.undecided ? 1 : 0;
            kept += !token.undecided && token.fate == Fate::keep ? 1 : 0;
            packed += !token.undecided && token.fate == Fate::pack ? 1 : 0;
            for (const float x : token.key) largest = std::max(largest, std::abs(x));
            for (const float x : token.value) largest = std::max(largest, std::abs(x));
        }
        left = undecided + kept + packed;
        REQUIRE(sequence.size() == m.size());
        REQUIRE(sequence.undecided() == undecided);
        REQUIRE(cells.size() == left);
        REQUIRE(sequence.evicted() == m.size() - left);
        // What is evicted takes no memory, and all that can be packed is.
        REQUIRE(cells.blocks() == (left + tokens_ - 1) / tokens_);
        std::uint32_t packed_blocks = 0;
        for (std::uint32_t b = 0; b < cells.blocks(); ++b) packed_blocks += cells.packed(b) ? 1 : 0;
        REQUIRE(packed_blocks == (plan_->scheme().exact() ? 0 : packed / tokens_));

        std::vector<bool> seen(m.size());
        for (std::uint32_t cell = 0; cell < left; ++cell) {
            const std::uint32_t position = sequence.position(cell);
            if (position >= m.size() || seen[position]) FAIL("cell ", cell, " at ", position);
            seen[position] = true;
            const Token& token = m[position];
            const bool exact = !cells.packed(cell / tokens_);
            const bool in_place =
                token.undecided ? exact && position == m.size() - left + cell
                                : token.fate == Fate::pack || (exact && token.fate == Fate::keep);
            if (!in_place) FAIL("position ", position, " has no place in cell ", cell);
            // Each read of a packed cell decodes its block: a few will do.
            if (!exact && below(tokens_) != 0) continue;
            const Row key = read_key(cells, cell), value = read_value(cells, cell);
            const bool same = exact ? key == token.key && value == token.value
                                    : near(plan_->scheme().key, token.key, key, largest) &&
                                          near(plan_->scheme().value, token.value, value, largest);
            if (!same) FAIL("position ", position, " in cell ", cell);
        }
    }

    // Blocks are told apart by their memory.
    void check_store() const {
        std::map<const std::byte*, bool> live;
        for (const FilteredSequence& sequence : sequences_) {
            for (std::uint32_t b = 0; b < sequence.cells().blocks(); ++b) {
                const BlockView view = sequence.cells().view(b);
                live[view.keys] = view.packed;
            }
        }
        const auto packed = static_cast<std::size_t>(
            std::ranges::count_if(live, [](const auto& block) { return block.second; }));
        const StoreStats stats = store_->stats();
        REQUIRE(stats.packed_blocks == packed);
        REQUIRE(stats.exact_blocks == live.size() - packed);
        REQUIRE(stats.packed_bytes == packed * plan_->packed_bytes());
        REQUIRE(stats.exact_bytes == (live.size() - packed) * plan_->exact_bytes());
        // Nothing is quantized twice.
        REQUIRE(stats.reopened_blocks == 0);
    }
};

}  // namespace

TEST_CASE("random operations against a model") {
    const LayerScheme int8{uniform_codec(8, Axis::channel, 32), uniform_codec(8, Axis::token, 32)};
    const Case cases[] = {
        {"all fates", int8, {.window = 32, .sinks = 5}, 2, 4},
        {"keep only", int8, {.window = 40, .sinks = 0, .flush = 64}, 3, 0},
        {"evict only", int8, {.window = 0, .sinks = 40}, 0, 9},
        {"evict all", int8, {.window = 33, .sinks = 1}, 0, 10},
        {"pack all", int8, {.window = 20, .sinks = 0}, 0, 0},
        {"blocks of 128, flushed by 32",
         {uniform_codec(8, Axis::channel, 128), uniform_codec(4, Axis::token, 32)},
         {.window = 10, .sinks = 3, .flush = 32},
         1,
         5},
        {"exact keys",
         {Codec{}, uniform_codec(8, Axis::token, 64)},
         {.window = 64, .sinks = 33},
         2,
         3},
        {"exact", exact, {.window = 16, .sinks = 2}, 1, 6},
    };
    for (const Case& c : cases) {
        for (unsigned seed = 1; seed <= 4; ++seed) {
            if (!lowkv::test::in_sample(seed - 1)) continue;
            CAPTURE(c.name);
            CAPTURE(seed);
            Fuzz(c, seed).run(150);
        }
    }
}
