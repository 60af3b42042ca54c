// What a layer packs, and packs again: its units follow the stream's groups.

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "layer_cache.h"

namespace lowkv::ggml {
namespace {

constexpr std::size_t units_at_once = 8;

}  // namespace

// So many of the layer's blocks are a unit, which is as long as the longest block of any layer.
std::uint32_t LayerCache::ratio(const CellGroups& groups) const noexcept {
    return groups.block() / plan().block_tokens();
}

// The same of blocks of unquantized rows.
std::uint32_t LayerCache::row_ratio(const CellGroups& groups) const noexcept {
    return groups.row_block() / row_plan().block_tokens();
}

std::vector<std::uint32_t> LayerCache::blocks_of(const CellGroups& groups,
                                                 std::uint32_t unit) const {
    std::vector<std::uint32_t> blocks(ratio(groups));
    std::iota(blocks.begin(), blocks.end(), unit * ratio(groups));
    return blocks;
}

std::uint8_t LayerCache::wanted_rung(const CellGroups& groups, std::uint32_t unit) const noexcept {
    return plan().scheme().exact() ? 0 : groups.rung(unit);
}

// The block whose statistics a unit takes over: that of the nearest packed group before it in its
// sequence, or of one among `others`, which are packed with it: on its own rung. no_cell: its own.
// So what another sequence has in the stream does not matter. Layers with statistics have blocks as
// long as a unit.
std::uint32_t LayerCache::stats_from(const StreamState& s, std::uint32_t unit, std::uint8_t rung,
                                     std::span<const std::uint32_t> others) const {
    if (rung == 0 || !plans()[rung - 1u]->has_statistics()) return no_cell;
    const CellGroups& groups = s.groups();
    for (std::uint32_t g = groups.before(groups.unit_group(unit)); g != no_cell;
         g = groups.before(g)) {
        const std::uint32_t u = groups.group(g).unit;
        if (u == no_cell) continue;
        const bool packed = has_packed(Part::keys, s, u) && s.packed.rung(u) == rung;
        if (packed || std::ranges::find(others, u) != others.end()) return u;
    }
    return no_cell;
}

// A packed block without values waits for them.
bool LayerCache::has_packed(Part part, const StreamState& s, std::uint32_t unit) const noexcept {
    if (unit >= s.done.size() || s.done[unit] != s.groups().generations()[unit]) return false;
    const std::uint32_t block = unit * ratio(s.groups());
    return part == Part::keys || !s.packed.packed(block) || s.packed.has_values(block);
}

// The blocks of units of one history that go to one rung. `weighed`: by the history's queries.
std::vector<Blocks::Packing> LayerCache::packings(StreamState& s,
                                                  std::span<const std::uint32_t> units,
                                                  bool weighed) {
    const CellGroups& groups = s.groups();
    const std::uint8_t rung = wanted_rung(groups, units[0]);
    QueryEnergy* queries = nullptr;
    if (weighed && rung > 0 && plans()[rung - 1u]->wants_queries())
        queries = &s.queries[groups.group(groups.unit_group(units[0])).history];
    std::vector<Blocks::Packing> packings;
    for (std::size_t i = 0; i < units.size(); ++i) {
        const std::uint32_t from = stats_from(s, units[i], rung, units.first(i));
        for (const std::uint32_t b : blocks_of(groups, units[i]))
            packings.push_back({&s.packed, b, from, queries});
    }
    return packings;
}

// Packs units of one history and rung, few enough to be exact and packed at once.
void LayerCache::pack_rows(StreamState& s, std::span<const std::uint32_t> units,
                           std::optional<Part> only, Executor& executor) {
    const CellGroups& groups = s.groups();
    std::vector<std::uint32_t> rows;
    for (const std::uint32_t unit : units)
        for (const std::uint32_t cell : groups.unit_cells(unit)) {
            const std::uint32_t row = cell == no_cell ? no_cell : groups.exact_row(cell);
            rows.push_back(holds_exact(s, row) ? row : no_cell);
        }
    std::vector<Blocks::Run> waiting;
    for (const std::uint32_t row : rows)
        if (row != no_cell && s.exact.packed(row / row_plan().block_tokens()))
            waiting.push_back({&s.exact, row, 1, 0, 0});
    Blocks::open(waiting);
    std::vector<Blocks::Packing> blocks = packings(s, units, true);
    const std::size_t tokens = plan().block_tokens();
    for (std::size_t i = 0; i < blocks.size(); ++i)
        blocks[i].cells = std::span(rows).subspan(i * tokens, tokens);
    Blocks::pack(std::move(blocks),
                 {.rung = wanted_rung(groups, units[0]), .only = only, .rows = &s.exact}, executor);
    s.keys_wait |= only == Part::keys;
    for (const std::uint32_t unit : units) s.done[unit] = groups.generations()[unit];
}

// Nothing is left of what it was before.
void LayerCache::begin_unit(StreamState& s, std::uint32_t unit) {
    s.packed.drop(blocks_of(s.groups(), unit));
    if (unit < s.moved.size()) s.moved[unit] = 0;
    std::erase(s.open, unit);
}

// Calls f(those of `units` that are alike, in the order of their tokens), for all of them, some of
// a history at once.
template <class Kind, class F>
void LayerCache::each_alike(const CellGroups& groups, std::vector<std::uint32_t> units, Kind kind,
                            F f) {
    const auto its = [&](std::uint32_t unit) {
        return std::pair(groups.group(groups.unit_group(unit)).history, kind(unit));
    };
    std::ranges::sort(units, {}, [&](std::uint32_t unit) {
        return std::tuple(its(unit), groups.group(groups.unit_group(unit)).first_rank, unit);
    });
    for (std::size_t first = 0, end = 0; first < units.size(); first = end) {
        while (end < units.size() && end - first < units_at_once &&
               its(units[end]) == its(units[first]))
            ++end;
        f(std::span<const std::uint32_t>(units).subspan(first, end - first));
    }
}

// Drops the units that are free, and packs those that are not packed yet, or their keys alone.
void LayerCache::take_units(StreamState& s, bool keys_alone, Executor& executor) {
    const CellGroups& groups = s.groups();
    const auto generations = groups.generations();
    s.done.resize(generations.size(), 0);
    std::vector<std::uint32_t> taken;
    for (std::uint32_t unit = 0; unit < generations.size(); ++unit) {
        if (has_packed(keys_alone ? Part::keys : Part::values, s, unit)) continue;
        if (!has_packed(Part::keys, s, unit)) begin_unit(s, unit);
        if (generations[unit] % 2 == 0)
            s.done[unit] = generations[unit];
        else
            taken.push_back(unit);
    }
    const auto kind = [&](std::uint32_t unit) {
        return std::pair(wanted_rung(groups, unit), has_packed(Part::keys, s, unit));
    };
    each_alike(groups, std::move(taken), kind, [&](std::span<const std::uint32_t> units) {
        std::optional<Part> only;
        if (keys_alone) only = Part::keys;
        if (has_packed(Part::keys, s, units[0])) only = Part::values;
        pack_rows(s, units, only, executor);
    });
}

// Packs in place: units that were rewritten, and those that are to be on a lower rung.
void LayerCache::lower(StreamState& s, Executor& executor) {
    const CellGroups& groups = s.groups();
    const auto rung = [&](std::uint32_t unit) {
        const std::uint32_t first = unit * ratio(groups);
        std::uint8_t lowest = s.packed.rung(first);
        for (std::uint32_t b = first; b < first + ratio(groups); ++b)
            lowest = std::min(lowest, s.packed.rung(b));
        return lowest;
    };
    std::vector<std::uint32_t> units;
    for (std::uint32_t unit = 0; unit < s.done.size(); ++unit)
        if (groups.generations()[unit] % 2 == 1 && has_packed(Part::values, s, unit) &&
            rung(unit) < wanted_rung(groups, unit) && std::ranges::count(s.open, unit) == 0)
            units.push_back(unit);
    const auto kind = [&](std::uint32_t unit) {
        return std::pair(rung(unit), wanted_rung(groups, unit));
    };
    each_alike(groups, std::move(units), kind, [&](std::span<const std::uint32_t> alike) {
        const bool is_packed = rung(alike[0]) > 0;
        std::vector<Blocks::Packing> blocks = packings(s, alike, is_packed);
        coarsened_blocks_ += is_packed ? blocks.size() : 0;
        Blocks::pack(std::move(blocks), {.rung = wanted_rung(groups, alike[0]), .apart = true},
                     executor);
    });
}

// Blocks of the exact area without rows. One whose values belong to keys that wait stays.
void LayerCache::drop_unused(StreamState& s) {
    const CellGroups& groups = s.groups();
    const std::uint32_t blocks_each = row_ratio(groups);
    std::vector<std::uint32_t> unused;
    for (std::uint32_t b = 0; b < groups.exact_rows().size(); ++b) {
        if (groups.exact_rows()[b] > 0) continue;
        for (std::uint32_t i = b * blocks_each; i < (b + 1) * blocks_each; ++i)
            if (!s.keys_wait || !s.exact.has_values(i)) unused.push_back(i);
    }
    s.exact.drop(unused);
}

// What has left the newest tokens, where these alone stay exact.
void LayerCache::pack_waiting(StreamState& s, Executor& executor) {
    if (rows_ladder_ == ladder_) return;
    std::vector<Blocks::Packing> blocks;
    for (std::uint32_t b = 0; b < s.groups().exact_rows().size(); ++b)
        if (s.groups().exact_rows()[b] > 0 && s.tracker->waits(b) && s.exact.full(b) &&
            !s.exact.packed(b))
            blocks.push_back({&s.exact, b});
    Blocks::pack(std::move(blocks), {.rung = 1, .apart = true}, executor);
}

void LayerCache::follow_keys(std::uint32_t stream_index, Executor& executor) {
    StreamState& s = state(stream_index);
    if (plan().scheme().exact() || s.version == s.groups().version()) return;
    if (plan().shape().latent()) return follow(stream_index, executor);  // no values come
    decoded_from_ = nullptr;
    take_units(s, true, executor);
    drop_unused(s);
}

void LayerCache::follow(std::uint32_t stream_index, Executor& executor) {
    decoded_from_ = nullptr;
    StreamState& s = state(stream_index);
    if (s.version != s.groups().version()) {
        take_units(s, false, executor);
        s.rewritten |= plans().size() > 1;  // some may be for a lower rung
        s.keys_wait = false;
        drop_unused(s);
        s.version = s.groups().version();
    }
    pack_waiting(s, executor);
    repack(stream_index, executor);
}

// A graph that was aborted may have written a cell in some layers only.
bool LayerCache::holds_exact(const StreamState& s, std::uint32_t row) const {
    if (row == no_cell) return false;
    return s.exact.view(row / row_plan().block_tokens()).keys != nullptr;
}

void LayerCache::repack(std::uint32_t stream_index, Executor& executor) {
    if (mode_ != Mode::packed) return;
    StreamState& s = state(stream_index);
    if (!s.rewritten) return;
    decoded_from_ = nullptr;
    lower(s, executor);
    s.rewritten = false;
}

}  // namespace lowkv::ggml
