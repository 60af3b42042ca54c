// The shipped rules rank the tokens by a number each: the highest are kept, the lowest evicted.

#include <algorithm>
#include <numeric>
#include <vector>

#include "lowkv/error.h"
#include "lowkv/filter.h"

namespace lowkv {
namespace {

// Of equals, the older one ranks lower.
void decide_by_rank(const LeavingTokens& tokens, const std::vector<double>& rank,
                    std::span<Fate> fates) {
    std::vector<std::size_t> order(fates.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, {}, [&](std::size_t i) { return rank[i]; });
    const std::size_t evicted = std::min<std::size_t>(tokens.evict, order.size());
    const std::size_t kept = std::min<std::size_t>(tokens.keep, order.size() - evicted);
    for (std::size_t i = 0; i < evicted; ++i) fates[order[i]] = Fate::evict;
    for (std::size_t i = order.size() - kept; i < order.size(); ++i) fates[order[i]] = Fate::keep;
}

class HeavyRule final : public FilterRule {
  public:
    void decide(const LeavingTokens& tokens, std::span<Fate> fates) const override {
        std::vector<double> rank(fates.size());
        for (std::size_t i = 0; i < rank.size(); ++i) {
            if (tokens.queries[i] == 0) {
                throw Error(ErrorCode::invalid_argument,
                            "the heavy rule ranks tokens by their attention mass, and none was "
                            "reported for position ",
                            tokens.positions[i],
                            "; call add_attention_mass() between attend() and pack()");
            }
            const double mean = double{tokens.mass[i]} / tokens.queries[i];
            rank[i] = mean > 0 ? mean : 0;  // NaN would have no place in an order
        }
        decide_by_rank(tokens, rank, fates);
    }
};

class RandomRule final : public FilterRule {
  public:
    explicit RandomRule(std::uint64_t seed) : seed_(seed) {}

    void decide(const LeavingTokens& tokens, std::span<Fate> fates) const override {
        std::vector<double> rank(fates.size());
        for (std::size_t i = 0; i < rank.size(); ++i) {
            rank[i] = static_cast<double>(hash(tokens.positions[i]) >> 11u);
        }
        decide_by_rank(tokens, rank, fates);
    }

  private:
    std::uint64_t seed_;

    // SplitMix64's finalizer, twice: once to spread the seed.
    static std::uint64_t mix(std::uint64_t z) {
        z += 0x9e3779b97f4a7c15ULL;
        z = (z ^ (z >> 30u)) * 0xbf58476d1ce4e5b9ULL;
        z = (z ^ (z >> 27u)) * 0x94d049bb133111ebULL;
        return z ^ (z >> 31u);
    }
    std::uint64_t hash(std::uint32_t position) const { return mix(mix(seed_) ^ position); }
};

}  // namespace

std::shared_ptr<const FilterRule> make_rule(Filter filter, std::uint64_t seed) {
    switch (filter) {
        case Filter::none: break;
        case Filter::heavy: return std::make_shared<HeavyRule>();
        case Filter::random: return std::make_shared<RandomRule>(seed);
    }
    return nullptr;
}

}  // namespace lowkv
