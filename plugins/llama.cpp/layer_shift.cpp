// Context shifts of a layer's packed rows: where a whole unit moves, it keeps its codes and notes
// how far it went. One of which some rows move is reopened and stays so, as the next shift is
// likely to begin in it again: packed each time, it would lose each time.

#include <algorithm>

#include "layer_cache.h"
#include "lowkv/format.h"

namespace lowkv::ggml {

// A shift by another RoPE than the last one's can't be added to it. An exact scheme's rows are
// rounded as stock llama.cpp rounds them, and keys from before RoPE know their positions.
void LayerCache::move_units(std::uint32_t stream_index, const std::optional<Rope>& rope,
                            const std::int32_t* distances, std::vector<std::uint32_t>& rest) {
    StreamState& s = state(stream_index);
    const CellGroups& groups = s.groups();
    const auto generations = groups.generations();
    std::vector<std::uint8_t> done(cells_, 0);
    const auto move = [&](std::uint32_t unit, bool packed) {
        const auto its = groups.unit_cells(unit);
        const auto first = std::ranges::find_if(its, [](std::uint32_t c) { return c != no_cell; });
        const std::int32_t distance = distances[*first];
        const bool alike = std::ranges::all_of(
            its, [&](std::uint32_t c) { return c == no_cell || distances[c] == distance; });
        if (!alike) keep_open(s, unit);
        if (distance == 0 || !alike || !packed) return;
        s.moved[unit] += distance;
        moved_blocks_ += ratio(groups);
        for (const std::uint32_t cell : its)
            if (cell != no_cell) done[cell] = 1;
    };
    const bool stays = rope && !plan().has_positions() && !plan().scheme().exact() &&
                       (!shift_rope_ || *shift_rope_ == *rope);
    if (stays) {
        shift_rope_ = rope;
        back_.clear();  // the distances are others from now on
        s.moved.resize(generations.size(), 0);
        const std::uint32_t blocks_each = ratio(groups);
        for (std::uint32_t unit = 0; unit < generations.size(); ++unit) {
            if (generations[unit] % 2 == 0 || !has_packed(Part::keys, s, unit)) continue;
            bool packed = true;
            for (std::uint32_t b = unit * blocks_each; b < (unit + 1) * blocks_each; ++b)
                packed = packed && s.packed.packed(b);
            move(unit, packed);
        }
    }
    rest.clear();
    for (std::uint32_t cell = 0; cell < cells_; ++cell)
        if (distances[cell] != 0 && done[cell] == 0 && groups.exact_row(cell) != no_cell)
            rest.push_back(cell);
}

// With a budget it is packed again at once.
void LayerCache::keep_open(StreamState& s, std::uint32_t unit) const {
    std::erase(s.open, unit);
    if (plans().size() == 1) s.open.push_back(unit);
    if (s.open.size() <= most_open_units) return;
    s.open.erase(s.open.begin());
    s.rewritten = true;
}

// Rows [first, first + count) of the packed area: from where they were packed to where they are, or
// back (`direction` -1).
void LayerCache::turn_rows(const StreamState& s, std::uint32_t first, std::uint32_t count,
                           int direction, float* rows) const {
    const std::uint32_t unit_rows = s.groups().block();
    for (std::uint32_t i = 0; i < count;) {
        const std::uint32_t unit = (first + i) / unit_rows;
        const std::uint32_t end = std::min(count, (unit + 1) * unit_rows - first);
        if (const std::int32_t distance = moved_by(s, unit); distance != 0) {
            const KeyShift shift(*shift_rope_, shape_, direction * distance);
            for (std::size_t at = std::size_t{i} * shape_.kv_heads;
                 at < std::size_t{end} * shape_.kv_heads; ++at)
                shift.turn(rows + at * shape_.head_dim);
        }
        i = end;
    }
}

}  // namespace lowkv::ggml
