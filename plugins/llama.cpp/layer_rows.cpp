// A layer's rows by cell: where each lies, and nominal f16 bytes in and out.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "ggml.h"
#include "host.h"
#include "layer_cache.h"
#include "lowkv/executor_openmp.h"
#include "lowkv/format.h"

namespace lowkv::ggml {
namespace {

// Walks over nominal bytes [offset, offset + size) of rows of `bytes` each. Calls whole(first row,
// rows, where in the range) and piece(row, first byte of it, bytes, where in the range).
template <class Whole, class Piece>
void each_row(std::size_t offset, std::size_t size, std::size_t bytes, Whole whole, Piece piece) {
    for (std::size_t at = 0; at < size;) {
        const std::size_t row = (offset + at) / bytes;
        const std::size_t within = (offset + at) % bytes;
        std::size_t step = std::min(size - at, bytes - within);
        if (step == bytes) {
            step = (size - at) / bytes * bytes;
            whole(row, step / bytes, at);
        } else {
            piece(row, within, step, at);
        }
        at += step;
    }
}

}  // namespace

// The rows of a unit that this layer has not packed yet are still exact.
LayerCache::Place LayerCache::place(Part part, std::uint32_t stream_index,
                                    std::uint32_t cell) const {
    const StreamState& s = stream(stream_index);
    const std::uint32_t row = s.groups().packed_row(cell);
    const bool packed = row != no_cell && has_packed(part, s, row / s.groups().block());
    return {packed, packed ? row : s.groups().exact_row(cell), cell};
}

bool LayerCache::writable(std::uint32_t stream_index, std::uint32_t cell) const {
    const CellGroups& groups = stream(stream_index).groups();
    const bool written = groups.exact(cell) || groups.packed_row(cell) != no_cell;
    return written && !place(Part::keys, stream_index, cell).packed;
}

LayerCache::Rows LayerCache::rows(std::uint32_t stream_index) const {
    const CellGroups& groups = stream(stream_index).groups();
    Rows rows;
    for (std::uint32_t cell = 0; cell < cells_; ++cell) {
        if (groups.packed_row(cell) == no_cell && !groups.exact(cell)) continue;
        const bool packed =
            !plan().scheme().exact() && place(Part::values, stream_index, cell).packed;
        ++(packed ? rows.packed : rows.exact);
    }
    return rows;
}

std::vector<LayerCache::Place> LayerCache::by_place(Part part, std::uint32_t stream_index,
                                                    std::span<const std::uint32_t> cells) const {
    std::vector<Place> places;
    places.reserve(cells.size());
    for (const std::uint32_t cell : cells) places.push_back(place(part, stream_index, cell));
    std::ranges::sort(places);
    return places;
}

// In the order in which they lie, so that each block is decoded once.
void LayerCache::read_rows(Part part, std::size_t row, std::size_t rows, std::byte* out) const {
    const std::size_t bytes = row_bytes(part);
    std::vector<std::uint32_t> cells;
    while (rows > 0) {
        const auto [s, first] = cell_of(row);
        cells.resize(std::min<std::size_t>(rows, cells_ - first));
        std::iota(cells.begin(), cells.end(), first);
        const std::vector<Place> places = by_place(part, s, cells);
        for (std::uint32_t i = 0, n = 1; i < places.size(); i += n, n = 1) {
            const Place& at = places[i];
            const std::uint32_t tokens = (at.packed ? plan() : row_plan()).block_tokens();
            while (i + n < places.size() && places[i + n] == at.behind(n) &&
                   at.row % tokens + n < tokens)
                ++n;
            read_run(part, stream(s), at, n, out + (at.cell - first) * bytes);
        }
        out += cells.size() * bytes;
        row += cells.size();
        rows -= cells.size();
    }
}

// Of one block.
void LayerCache::read_run(Part part, const StreamState& s, const Place& at, std::uint32_t run,
                          std::byte* out) const {
    const Blocks& table = at.packed ? s.packed : s.exact;
    const std::size_t bytes = run * row_bytes(part);
    const Plan& its = table.plan();
    const std::uint32_t block = at.row / its.block_tokens();
    const BlockView view = table.view(block);
    if (view.keys == nullptr) {
        std::memset(out, 0, bytes);
        return;
    }
    if (view.packed && decoded_from_ != view.keys) {
        decoded_from_ = nullptr;  // should it throw
        const BlockCopy copy{view.keys, decoded_.data()};
        device().decode(table.plan_of(table.rung(block)), std::span(&copy, 1), serial_executor());
        decoded_from_ = view.keys;
        ++decoded_blocks_;
    }
    // A state's rows may lie at odd addresses.
    rows_.resize(bytes / sizeof rows_[0]);
    const BlockRows<const std::byte> rows{view.packed ? decoded_.data() : view.keys,
                                          at.row % its.block_tokens(), run};
    device().read_rows(its, part, std::span(&rows, 1),
                       {rows_.data(), shape_.head_dim, shape_.channels()}, serial_executor());
    const std::uint32_t unit = at.row / s.groups().block();
    if (part == Part::keys && at.packed && moved_by(s, unit) != 0) {
        std::vector<float> values(rows_.size());
        std::ranges::transform(rows_, values.begin(), lowkv_f16_to_f32);
        turn_rows(s, at.row, run, 1, values.data());
        std::ranges::transform(values, rows_.begin(), lowkv_f32_to_f16);
    }
    std::memcpy(out, rows_.data(), bytes);
}

Blocks& LayerCache::to_write(Part part, std::uint32_t stream_index, const Place& at) {
    StreamState& s = state(stream_index);
    // A block that is reopened must have its values.
    if (at.packed && part == Part::keys && s.keys_wait) {
        OpenMPExecutor executor(host_threads());
        follow(stream_index, executor);
    }
    s.rewritten |= at.packed;
    decoded_from_ = nullptr;
    return at.packed ? s.packed : s.exact;
}

void LayerCache::write_rows(Part part, std::size_t row, std::size_t rows, const std::byte* in) {
    const std::uint32_t channels = shape_.channels();
    constexpr std::size_t batch = 4096;
    OpenMPExecutor executor(host_threads());
    std::vector<float> values;  // of moved rows
    std::vector<std::uint32_t> places;
    while (rows > 0) {
        const auto [stream, cell] = cell_of(row);
        const StreamState& s = state(stream);
        const std::size_t limit = std::min<std::size_t>({rows, batch, cells_ - cell});
        for (std::uint32_t i = 0; i < limit; ++i) s.tracker->place(cell + i);
        const Place at = place(part, stream, cell);
        std::uint32_t run = 1;  // rows that lie side by side
        while (run < limit && place(part, stream, cell + run) == at.behind(run)) ++run;
        lowkv::Rows from{in, RowType::f16, shape_.head_dim, channels};
        const bool turns = part == Part::keys && at.packed && !s.moved.empty();
        const bool is_odd = reinterpret_cast<std::uintptr_t>(in) % sizeof rows_[0] != 0;
        if (is_odd || turns) {
            rows_.resize(std::size_t{run} * channels);
            std::memcpy(rows_.data(), in, run * row_bytes(part));
            from.data = rows_.data();
        }
        if (turns) {
            values.resize(rows_.size());
            std::ranges::transform(rows_, values.begin(), lowkv_f16_to_f32);
            turn_rows(s, at.row, run, -1, values.data());
            from = {values.data(), RowType::f32, shape_.head_dim, channels};
        }
        places.resize(run);
        std::iota(places.begin(), places.end(), at.row);
        to_write(part, stream, at)
            .write(places, part == Part::keys ? from : lowkv::Rows{},
                   part == Part::values ? from : lowkv::Rows{}, {}, executor);
        in += run * row_bytes(part);
        row += run;
        rows -= run;
    }
}

void LayerCache::write_key(std::uint32_t stream_index, std::uint32_t cell, const std::byte* row,
                           std::int32_t position) {
    std::vector<float> values(shape_.channels());
    ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(row), values.data(),
                          static_cast<std::int64_t>(values.size()));
    const Place at = place(Part::keys, stream_index, cell);
    if (at.packed) turn_rows(stream(stream_index), at.row, 1, -1, values.data());
    const lowkv::Rows from{values.data(), RowType::f32, shape_.head_dim, values.size()};
    to_write(Part::keys, stream_index, at).write({&at.row, 1}, from, {}, {&position, 1});
}

std::int32_t LayerCache::position(std::uint32_t stream_index, std::uint32_t cell) const {
    const Place at = place(Part::keys, stream_index, cell);
    const StreamState& s = stream(stream_index);
    return (at.packed ? s.packed : s.exact).position(at.row);
}

void LayerCache::read(Part part, std::size_t offset, std::size_t size, std::byte* out) const {
    if (mode_ == Mode::undecided) {  // nothing was ever written
        std::memset(out, 0, size);
        return;
    }
    if (mode_ == Mode::plain) {
        std::memcpy(out, half(part).plain.data() + offset, size);
        return;
    }
    std::vector<std::byte> one(row_bytes(part));
    each_row(
        offset, size, one.size(),
        [&](std::size_t row, std::size_t rows, std::size_t at) {
            read_rows(part, row, rows, out + at);
        },
        [&](std::size_t row, std::size_t within, std::size_t count, std::size_t at) {
            read_rows(part, row, 1, one.data());
            std::memcpy(out + at, one.data() + within, count);
        });
    device().finish();  // throws where zeros stand for rows that were lost
}

void LayerCache::write(Part part, std::size_t offset, std::size_t size, const std::byte* in) {
    decide();
    if (mode_ == Mode::plain) {
        std::memcpy(half(part).plain.data() + offset, in, size);
        return;
    }
    std::vector<std::byte> one(row_bytes(part));
    each_row(
        offset, size, one.size(),
        [&](std::size_t row, std::size_t rows, std::size_t at) {
            write_rows(part, row, rows, in + at);
        },
        [&](std::size_t row, std::size_t within, std::size_t count, std::size_t at) {
            read_rows(part, row, 1, one.data());
            std::memcpy(one.data() + within, in + at, count);
            write_rows(part, row, 1, one.data());
        });
}

}  // namespace lowkv::ggml
