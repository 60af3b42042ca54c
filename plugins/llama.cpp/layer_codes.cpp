// A layer's packed units in saved states (unit_codes.h): their codes out, and back in.

#include <algorithm>
#include <optional>
#include <vector>

#include "layer_cache.h"
#include "lowkv/device.h"
#include "lowkv/error.h"
#include "row_mark.h"
#include "unit_codes.h"

namespace lowkv::ggml {

std::vector<std::byte> LayerCache::saved_codes(Part part, std::uint32_t stream_index,
                                               std::uint32_t unit, bool both) const {
    const StreamState& s = stream(stream_index);
    const CellGroups& groups = s.groups();
    const Plan& its = plan();
    if (its.scheme().exact() || !has_packed(Part::values, s, unit) || moved_by(s, unit) != 0)
        return {};
    both = both || shape_.latent();
    const bool keys = both || part == Part::keys, values = both || part == Part::values;
    UnitCodes codes{.layer = index_,
                    .keys = keys,
                    .values = values,
                    .rows = groups.group(groups.unit_group(unit)).live,
                    .inputs = its.inputs_hash(),
                    .codes = {}};
    for (const std::uint32_t b : blocks_of(groups, unit)) {
        if (s.packed.rung(b) != plans().size())
            return {};  // it was written since, or is on another rung
        const BlockView view = s.packed.view(b);
        const auto add = [&](const std::byte* from, std::size_t bytes) {
            const std::size_t at = codes.codes.size();
            codes.codes.resize(at + bytes);
            device().copy_out(codes.codes.data() + at, from, bytes);
        };
        if (keys) add(view.keys, its.keys().bytes());
        if (values) add(view.values, its.values().bytes());
    }
    device().finish();
    std::vector<std::byte> bytes = write_codes(codes);
    if (bytes.size() > codes.rows * row_bytes(part)) bytes.clear();
    return bytes;
}

// The first bytes of a unit's rows, as far as they are codes; empty: they are none. Throws where
// some of its rows are missing: those that came may be codes or numbers.
std::vector<std::byte> LayerCache::codes_in(Part part, std::span<const std::size_t> rows,
                                            const ArrivedRows& arrived,
                                            std::span<const std::uint32_t> ties) const {
    const std::size_t bytes = row_bytes(part);
    const auto came = static_cast<std::size_t>(std::ranges::count_if(
        rows, [&](std::size_t row) { return arrived.at[row] != ArrivedRows::none; }));
    if (came == 0) return {};
    if (came < rows.size()) throw Error(ErrorCode::invalid_image, "some of its rows are missing");
    const std::span first(arrived.bytes.data() + arrived.at[rows.front()], bytes);
    if (!begins_codes(first)) {
        // Behind codes there are zeros, and a key or a value without a seal is not all zeros.
        const std::byte* last = arrived.bytes.data() + arrived.at[rows.back()];
        if (ties[rows.back()] <= no_tie &&
            std::all_of(last, last + bytes, [](std::byte b) { return b == std::byte{0}; }))
            throw Error(ErrorCode::invalid_image, "its codes are damaged");
        return {};
    }
    const std::size_t length = std::min(codes_length(first), rows.size() * bytes);
    std::vector<std::byte> codes;
    codes.reserve(length);
    for (const std::size_t row : rows) {
        const auto from = arrived.bytes.begin() + static_cast<std::ptrdiff_t>(arrived.at[row]);
        const std::size_t count = std::min(bytes, length - codes.size());
        codes.insert(codes.end(), from, from + static_cast<std::ptrdiff_t>(count));
    }
    return codes;
}

void LayerCache::put_codes(Part part, StreamState& s, std::uint32_t unit,
                           std::span<const std::byte> bytes) {
    const CellGroups& groups = s.groups();
    const Plan& its = plan();
    const UnitCodes found = read_codes(bytes);
    const std::vector<std::uint32_t> blocks = blocks_of(groups, unit);
    const std::size_t each =
        (found.keys ? its.keys().bytes() : 0) + (found.values ? its.values().bytes() : 0);
    const bool has_keys = has_packed(Part::keys, s, unit);
    if (found.layer != index_ || found.rows != groups.group(groups.unit_group(unit)).live ||
        found.codes.size() != each * blocks.size() || !(found.keys || has_keys) ||
        !(part == Part::keys ? found.keys : found.values))
        throw Error(ErrorCode::invalid_image, "its codes are another layer's");
    if (found.inputs != its.inputs_hash())
        throw Error(ErrorCode::invalid_image,
                    "it was packed with another calibration or another rope");
    if (!has_keys) begin_unit(s, unit);
    std::vector<const std::byte*> codes;
    for (std::size_t i = 0; i < blocks.size(); ++i) codes.push_back(found.codes.data() + i * each);
    std::optional<Part> only;
    if (!found.values) only = Part::keys;
    if (!found.keys) only = Part::values;
    s.packed.put(blocks, codes, static_cast<std::uint8_t>(plans().size()), only);
    if (found.keys && found.values && !shape_.latent()) s.tracker->came_as_codes(found.rows);
    s.done[unit] = groups.generations()[unit];
    s.keys_wait |= !found.values;
}

void LayerCache::take(Part part, const ArrivedRows& arrived, std::span<const std::uint32_t> ties) {
    if (arrived.at.empty()) return;
    decoded_from_ = nullptr;
    std::vector<std::size_t> at = arrived.at;  // of the rows that are yet to be written
    for (std::uint32_t stream = 0; stream < streams_; ++stream) {
        StreamState& s = state(stream);
        const CellGroups& groups = s.groups();
        s.done.resize(groups.generations().size(), 0);
        for (std::uint32_t unit = 0; unit < groups.generations().size(); ++unit) {
            if (groups.generations()[unit] % 2 == 0 || has_packed(part, s, unit)) continue;
            std::vector<std::size_t> rows;
            for (const std::uint32_t cell : groups.unit_cells(unit))
                if (cell != no_cell) rows.push_back(std::size_t{stream} * cells_ + cell);
            const std::vector<std::byte> codes = codes_in(part, rows, arrived, ties);
            if (codes.empty()) continue;
            put_codes(part, s, unit, codes);
            for (const std::size_t row : rows) at[row] = ArrivedRows::none;
        }
    }
    const std::size_t bytes = row_bytes(part);
    for (std::size_t row = 0; row < at.size(); ++row) {
        if (at[row] == ArrivedRows::none) continue;
        const std::span its(arrived.bytes.data() + at[row], bytes);
        if (begins_codes(its))
            throw Error(ErrorCode::invalid_image, "its codes are of another group of tokens");
        if (!is_sealed(its, ties[row], tensor_number(part)))
            throw Error(ErrorCode::invalid_image, "its rows are damaged");
    }
    for (std::size_t row = 0, run = 1; row < at.size(); row += run, run = 1) {
        if (at[row] == ArrivedRows::none) continue;
        while (row + run < at.size() && at[row + run] == at[row] + run * bytes) ++run;
        write_rows(part, row, run, arrived.bytes.data() + at[row]);
    }
}

}  // namespace lowkv::ggml
