// What a layer packs, and packs again: its units follow the stream's groups.

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "layer_cache.h"

namespace lowkv::ggml {
namespace {

constexpr std::size_t units_at_once = 8;

// A history's queries in the sequence that packs its rows, as long as it does.
class LentQueries {
  public:
    // Where the plan wants none, none are kept for the history.
    LentQueries(Sequence& sequence, std::map<std::uint32_t, QueryEnergy>& queries,
                std::uint32_t history)
        : sequence_(sequence),
          queries_(sequence.plan().wants_queries() ? &queries[history] : nullptr) {
        swap();
    }
    ~LentQueries() { swap(); }
    LentQueries(const LentQueries&) = delete;
    LentQueries& operator=(const LentQueries&) = delete;

  private:
    Sequence& sequence_;
    QueryEnergy* queries_;

    void swap() noexcept {
        if (queries_ != nullptr) sequence_.swap_queries(*queries_);
    }
};

}  // namespace

// Units and blocks of the exact area are as long as the longest block of any layer.
std::uint32_t LayerCache::ratio(const CellGroups& groups) const noexcept {
    return groups.block() / plan().block_tokens();
}

std::vector<std::uint32_t> LayerCache::blocks_of(const CellGroups& groups,
                                                 std::span<const std::uint32_t> units) const {
    const std::uint32_t blocks_each = ratio(groups);
    std::vector<std::uint32_t> blocks;
    for (const std::uint32_t unit : units)
        for (std::uint32_t b = unit * blocks_each; b < (unit + 1) * blocks_each; ++b)
            blocks.push_back(b);
    return blocks;
}

// The block whose statistics a unit takes over: that of the nearest packed group before it in its
// sequence, or of one among `others`, which are packed with it: in its own tier. no_cell: its own.
// So what another sequence has in the stream does not matter. Layers with statistics have blocks as
// long as a unit.
std::uint32_t LayerCache::stats_from(std::uint32_t stream_index, std::uint32_t unit,
                                     std::uint8_t tier,
                                     std::span<const std::uint32_t> others) const {
    if (!plans_[tier]->has_statistics()) return no_cell;
    const CellGroups& groups = trackers_[stream_index].groups();
    const StreamState& s = stream(stream_index);
    for (std::uint32_t g = groups.before(groups.unit_group(unit)); g != no_cell;
         g = groups.before(g)) {
        const std::uint32_t u = groups.group(g).unit;
        if (u == no_cell) continue;
        const bool done = has_packed(Part::keys, s, groups, u) && s.tiers[u] == tier;
        if ((done && s.packed[tier].packed(u)) || std::ranges::find(others, u) != others.end())
            return u;
    }
    return no_cell;
}

bool LayerCache::has_packed(Part part, const StreamState& s, const CellGroups& groups,
                            std::uint32_t unit) noexcept {
    if (unit >= s.done.size()) return false;
    const std::uint32_t generation = groups.generations()[unit];
    return s.done[unit] == generation || (part == Part::keys && s.keys[unit] == generation);
}

// Packs units of one history and tier, few enough to be exact and packed at once.
void LayerCache::pack_from(std::uint32_t stream_index, std::span<const std::uint32_t> units,
                           Portion portion, Executor& executor) {
    const CellGroups& groups = trackers_[stream_index].groups();
    StreamState& s = state(stream_index);
    const std::uint32_t blocks_each = ratio(groups);
    const std::uint8_t tier = s.tiers[units[0]];
    Sequence& packed = s.packed[tier];
    const std::vector<std::uint32_t> blocks = blocks_of(groups, units);
    std::vector<std::uint32_t> rows, sources;
    for (std::size_t i = 0; i < units.size(); ++i) {
        sources.insert(sources.end(), blocks_each,
                       stats_from(stream_index, units[i], tier, units.first(i)));
        for (const std::uint32_t cell : groups.unit_cells(units[i])) {
            const std::uint32_t row = cell == no_cell ? no_cell : groups.exact_row(cell);
            rows.push_back(holds_exact(s, row) ? row : no_cell);
        }
    }
    if (portion == Portion::values) {
        packed.pack_values_from(s.exact, blocks, rows, executor);
    } else {
        const LentQueries queries(packed, s.queries,
                                  groups.group(groups.unit_group(units[0])).history);
        if (portion == Portion::keys)
            packed.pack_keys_from(s.exact, blocks, rows, executor, sources);
        else
            packed.pack_from(s.exact, blocks, rows, executor, sources);
    }
    s.keys_wait |= portion == Portion::keys;
    for (const std::uint32_t unit : units)
        (portion == Portion::keys ? s.keys : s.done)[unit] = groups.generations()[unit];
}

// An entry for each unit that there is.
void LayerCache::make_unit_lists(std::uint32_t stream_index) {
    StreamState& s = state(stream_index);
    const std::size_t units = trackers_[stream_index].groups().generations().size();
    s.tiers.resize(units, 0);
    s.done.resize(units, 0);
    s.keys.resize(units, 0);
}

// Nothing is left of what it was before, and it is in the tier where it belongs.
void LayerCache::begin_unit(std::uint32_t stream_index, std::uint32_t unit) {
    const CellGroups& groups = trackers_[stream_index].groups();
    StreamState& s = state(stream_index);
    const std::vector<std::uint32_t> its = blocks_of(groups, {&unit, 1});
    for (Sequence& tier : s.packed) tier.drop(its);
    s.tiers[unit] = groups.tier(unit);
    if (unit < s.moved.size()) s.moved[unit] = 0;
    std::erase(s.open, unit);
}

// Drops the units that are free, and packs those that are not packed up to that portion.
void LayerCache::take_units(std::uint32_t stream_index, Portion last, Executor& executor) {
    const CellGroups& groups = trackers_[stream_index].groups();
    StreamState& s = state(stream_index);
    const auto generations = groups.generations();
    make_unit_lists(stream_index);
    std::vector<std::uint32_t> taken;
    for (std::uint32_t unit = 0; unit < generations.size(); ++unit) {
        if (has_packed(last == Portion::keys ? Part::keys : Part::values, s, groups, unit))
            continue;
        if (!has_packed(Part::keys, s, groups, unit)) begin_unit(stream_index, unit);
        if (generations[unit] % 2 == 0)
            s.done[unit] = generations[unit];
        else
            taken.push_back(unit);
    }
    const auto portion_of = [&](std::uint32_t unit) {
        return has_packed(Part::keys, s, groups, unit) ? Portion::values : last;
    };
    // One history after the other, a tier after the other, each in the order of its tokens.
    const auto history = [&](std::uint32_t unit) {
        return groups.group(groups.unit_group(unit)).history;
    };
    std::ranges::sort(taken, {}, [&](std::uint32_t unit) {
        const std::uint32_t rank = groups.group(groups.unit_group(unit)).first_rank;
        return std::tuple(history(unit), s.tiers[unit], rank, unit);
    });
    for (std::size_t first = 0, end = 0; first < taken.size(); first = end) {
        const Portion portion = portion_of(taken[first]);
        while (end < taken.size() && end - first < units_at_once &&
               history(taken[end]) == history(taken[first]) && portion_of(taken[end]) == portion &&
               s.tiers[taken[end]] == s.tiers[taken[first]])
            ++end;
        pack_from(stream_index, std::span(taken).subspan(first, end - first), portion, executor);
    }
    coarsen(stream_index, executor);
}

// Units that should be in a coarser tier go there, some of a history at once.
void LayerCache::coarsen(std::uint32_t stream_index, Executor& executor) {
    const CellGroups& groups = trackers_[stream_index].groups();
    StreamState& s = state(stream_index);
    std::vector<std::uint32_t> units;
    for (std::uint32_t unit = 0; unit < s.tiers.size(); ++unit)
        if (groups.generations()[unit] % 2 == 1 && has_packed(Part::values, s, groups, unit) &&
            s.tiers[unit] != groups.tier(unit))
            units.push_back(unit);
    if (units.empty()) return;
    repack(stream_index, executor);
    const auto kind = [&](std::uint32_t unit) {
        return std::tuple(groups.group(groups.unit_group(unit)).history, s.tiers[unit],
                          groups.tier(unit));
    };
    std::ranges::sort(units, {}, [&](std::uint32_t unit) {
        return std::pair(kind(unit), groups.group(groups.unit_group(unit)).first_rank);
    });
    for (std::size_t first = 0, end = 0; first < units.size(); first = end) {
        while (end < units.size() && end - first < units_at_once &&
               kind(units[end]) == kind(units[first]))
            ++end;
        const auto its = std::span(units).subspan(first, end - first);
        const std::uint8_t tier = groups.tier(its[0]);
        const std::vector<std::uint32_t> blocks = blocks_of(groups, its);
        std::vector<std::uint32_t> sources;
        for (std::size_t i = 0; i < its.size(); ++i)
            sources.insert(sources.end(), ratio(groups),
                           stats_from(stream_index, its[i], tier, its.first(i)));
        Sequence& from = s.packed[s.tiers[its[0]]];
        Sequence& to = s.packed[tier];
        const LentQueries queries(to, s.queries, std::get<0>(kind(its[0])));
        to.pack_again_from(from, blocks, executor, sources);
        from.drop(blocks);
        for (const std::uint32_t unit : its) s.tiers[unit] = tier;
        coarsened_blocks_ += blocks.size();
    }
}

// Blocks of the exact area without rows. One whose values belong to keys that wait stays.
void LayerCache::drop_unused(std::uint32_t stream_index) {
    const CellGroups& groups = trackers_[stream_index].groups();
    StreamState& s = state(stream_index);
    const std::uint32_t blocks_each = ratio(groups);
    std::vector<std::uint32_t> unused;
    for (std::uint32_t b = 0; b < groups.exact_rows().size(); ++b) {
        if (groups.exact_rows()[b] > 0) continue;
        for (std::uint32_t i = b * blocks_each; i < (b + 1) * blocks_each; ++i)
            if (!s.keys_wait || !s.exact.has_values(i)) unused.push_back(i);
    }
    s.exact.drop(unused);
}

void LayerCache::follow_keys(std::uint32_t stream_index, Executor& executor) {
    if (plan().scheme().exact() ||
        state(stream_index).version == trackers_[stream_index].groups().version())
        return;
    if (plan().shape().latent()) return follow(stream_index, executor);  // no values come
    decoded_from_ = nullptr;
    take_units(stream_index, Portion::keys, executor);
    drop_unused(stream_index);
}

void LayerCache::follow(std::uint32_t stream_index, Executor& executor) {
    decoded_from_ = nullptr;
    const CellGroups& groups = trackers_[stream_index].groups();
    StreamState& s = state(stream_index);
    if (s.version != groups.version()) {
        take_units(stream_index, Portion::whole, executor);
        s.keys_wait = false;
        drop_unused(stream_index);
        s.version = groups.version();
    }
    repack(stream_index, executor);
}

// A graph that was aborted may have written a cell in some layers only.
bool LayerCache::holds_exact(const StreamState& s, std::uint32_t row) const {
    if (row == no_cell) return false;
    const std::uint32_t block = row / plan().block_tokens();
    return block < s.exact.blocks() && s.exact.view(block).keys != nullptr;
}

void LayerCache::repack(std::uint32_t stream_index, Executor& executor) {
    if (mode_ != Mode::packed) return;
    StreamState& s = state(stream_index);
    if (!s.rewritten) return;
    decoded_from_ = nullptr;
    const CellGroups& groups = trackers_[stream_index].groups();
    const auto generations = groups.generations();
    std::uint8_t tier = 0;
    for (Sequence& packed : s.packed) {
        std::vector<std::uint32_t> blocks, units, sources;
        for (std::uint32_t b = 0; b < packed.blocks(); ++b) {
            if (packed.packed(b)) continue;
            const std::uint32_t unit = b / ratio(groups);
            const bool in_use = unit < generations.size() && generations[unit] % 2 == 1;
            if (in_use && s.tiers[unit] != tier) continue;
            if (std::ranges::find(s.open, unit) != s.open.end()) continue;
            sources.push_back(in_use ? stats_from(stream_index, unit, tier, units) : no_cell);
            blocks.push_back(b);
            if (in_use) units.push_back(unit);
        }
        packed.pack(blocks, executor, sources);
        ++tier;
    }
    s.rewritten = false;
}

}  // namespace lowkv::ggml
