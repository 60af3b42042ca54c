// States that are saved, restored and copied: rows with marks out of a buffer, and back into its
// groups; one stream over another.

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"
#include "host.h"
#include "lowkv/error.h"
#include "lowkv/executor_openmp.h"
#include "platform/memory.h"
#include "report.h"
#include "row_mark.h"
#include "unit_codes.h"

namespace lowkv::ggml {
namespace {

constexpr const char* not_taken_over = "a restored state was not taken over: ";

}  // namespace

// The keys that carry the marks: those that llama.cpp saves and restores first.
const LayerCache* CacheBuffer::marked_layer() const noexcept {
    for (const auto& [key, layer] : layers_)
        if (layer->mode() == LayerCache::Mode::packed) return layer.get();
    return nullptr;
}

bool CacheBuffer::carries_marks(const CacheTensor& tensor) const noexcept {
    // A scheme that packs nothing has no use for marks, and its rows stay as they are.
    return tensor.part == Part::keys && tensor.layer == marked_layer() &&
           trackers_.front().packs() &&
           tensor.layer->row_bytes(Part::keys) >= mark_halves * sizeof(std::uint16_t);
}

void CacheBuffer::save(const CacheTensor& tensor, std::size_t offset, std::size_t size,
                       std::byte* out) {
    end_restore();
    LayerCache& layer = *tensor.layer;
    const std::size_t bytes = layer.row_bytes(tensor.part);
    const bool whole = offset % bytes == 0 && size % bytes == 0;
    const bool marked = carries_marks(tensor);
    // Rows of the keys with the marks that come again begin another state.
    const std::size_t first = offset / bytes;
    const bool again = marked && first < saving_.ties.size() && saving_.ties[first] != 0;
    if (saving_.last != &tensor || again) {
        if (marked) saving_.ties.clear();
        saving_.codes.clear();
        saving_.last = &tensor;
    }
    if (!marked && whole && !saving_.ties.empty() && layer.mode() == LayerCache::Mode::packed) {
        save_rows(tensor, offset / bytes, size / bytes, out);
        return;
    }
    layer.read(tensor.part, offset, size, out);
    if (!marked || !whole) return;
    saving_.ties.resize(trackers_.size() * layer.cells());
    const std::uint32_t scheme = scheme_number(setting_->text);
    std::vector<std::uint16_t> row(bytes / sizeof(std::uint16_t));
    for (std::size_t number = first; number < (offset + size) / bytes; ++number, out += bytes) {
        const auto [stream, cell] = layer.cell_of(number);
        const CellTracker& tracker = trackers_[stream];
        RowMark mark = tracker.mark(cell);
        mark.coded &= setting_->packed_states;
        std::memcpy(row.data(), out, bytes);
        saving_.ties[number] = stamp(row, mark, scheme);
        std::memcpy(out, row.data(), bytes);
        if (tracker.poisoned(cell)) write_bad_row({out, bytes});
    }
}

void CacheBuffer::read(const CacheTensor& tensor, std::size_t offset, std::size_t size,
                       std::byte* out) {
    end_restore();
    saving_ = {};
    tensor.layer->read(tensor.part, offset, size, out);
}

// Rows of units that are saved whole are codes, others are numbers with seals.
void CacheBuffer::save_rows(const CacheTensor& tensor, std::size_t row, std::size_t rows,
                            std::byte* out) {
    const LayerCache& layer = *tensor.layer;
    const std::size_t bytes = layer.row_bytes(tensor.part);
    std::size_t numbers = 0;  // of the rows before this one, those that are yet to be read
    const auto read_numbers = [&](std::size_t i) {
        if (numbers > 0)
            layer.read(tensor.part, (row + i - numbers) * bytes, numbers * bytes,
                       out + (i - numbers) * bytes);
        for (; numbers > 0; --numbers)
            seal({out + (i - numbers) * bytes, bytes}, saving_.ties[row + i - numbers],
                 layer.tensor_number(tensor.part));
    };
    for (std::size_t i = 0; i < rows; ++i) {
        const auto [stream, cell] = layer.cell_of(row + i);
        const CellGroups& groups = trackers_[stream].groups();
        const std::uint32_t place = groups.packed_row(cell);
        const std::vector<std::byte>* codes =
            place != no_cell ? &codes_of(tensor, stream, place / groups.block()) : nullptr;
        if (codes == nullptr || codes->empty()) {
            ++numbers;
            continue;
        }
        read_numbers(i);
        const auto own = groups.unit_cells(place / groups.block()).first(place % groups.block());
        const std::size_t before = own.size() - std::ranges::count(own, no_cell);
        const std::size_t first = std::min(codes->size(), before * bytes);
        const std::size_t count = std::min(codes->size() - first, bytes);
        std::memcpy(out + i * bytes, codes->data() + first, count);
        std::memset(out + i * bytes + count, 0, bytes - count);
    }
    read_numbers(rows);
    // A host that keeps states in memory keeps their codes alone resident.
    platform::release_zeros(out, rows * bytes);
}

// The keys with the marks were saved before it was known which cells are: their codes are with the
// layer's values.
const std::vector<std::byte>& CacheBuffer::codes_of(const CacheTensor& tensor, std::uint32_t stream,
                                                    std::uint32_t unit) {
    const auto [found, is_new] = saving_.codes.try_emplace({stream, unit});
    if (!is_new || !setting_->packed_states) return found->second;
    const auto cells = trackers_[stream].groups().unit_cells(unit);
    const bool whole = std::ranges::all_of(cells, [&](std::uint32_t cell) {
        return cell == no_cell ||
               (saving_.ties[std::size_t{stream} * tensor.layer->cells() + cell] != 0 &&
                trackers_[stream].mark(cell).coded && !trackers_[stream].poisoned(cell));
    });
    if (!whole) return found->second;
    if (tensor.layer == marked_layer())
        found->second = tensor.layer->saved_codes(tensor.part, stream, unit, true);
    if (found->second.empty())  // or there is no room for both
        found->second = tensor.layer->saved_codes(tensor.part, stream, unit, false);
    return found->second;
}

void CacheBuffer::copied_by_graph(const CacheTensor& keys, std::size_t offset, std::size_t size) {
    LayerCache& layer = *keys.layer;
    if (layer.mode() != LayerCache::Mode::packed || size == 0) return;
    const std::size_t stream_bytes = layer.row_bytes(Part::keys) * layer.cells();
    for (std::size_t s = offset / stream_bytes; s <= (offset + size - 1) / stream_bytes; ++s)
        layer.copied_by_graph(static_cast<std::uint32_t>(s));
}

void CacheBuffer::begin_restore(LayerCache& layer) {
    end_restore();
    follow_all();
    restoring_.layer = &layer;
    restoring_.ties.assign(std::size_t{layer.cells()} * layer.streams(), 0);
}

void CacheBuffer::end_restore() {
    if (restoring_.layer == nullptr) return;
    end_marks();
    take_arrived();
    restoring_ = {};
    follow_all();
}

// All marks are there: where some have a check, rows without one are damaged.
void CacheBuffer::end_marks() {
    if (restoring_.last != nullptr && carries_marks(*restoring_.last) &&
        std::ranges::any_of(restoring_.ties, [](std::uint32_t tie) { return tie > no_tie; })) {
        bool damaged = false;
        for (std::size_t row = 0; row < restoring_.ties.size(); ++row) {
            if (restoring_.ties[row] != no_tie) continue;
            const auto [stream, cell] = restoring_.layer->cell_of(row);
            trackers_[stream].poison(cell);
            damaged = true;
        }
        if (damaged) poison(not_taken_over, "its rows are damaged");
    }
    for (CellTracker& tracker : trackers_) tracker.pack_restored();
}

// Takes over the rows that arrived of the last tensor.
void CacheBuffer::take_arrived() {
    if (restoring_.last == nullptr) return;
    LayerCache& layer = *restoring_.last->layer;
    std::vector<std::size_t>& at = restoring_.arrived.at;
    for (std::size_t row = 0; row < at.size(); ++row)
        if (const auto [stream, cell] = layer.cell_of(row); trackers_[stream].poisoned(cell))
            at[row] = ArrivedRows::none;
    try {
        layer.take(restoring_.last->part, restoring_.arrived, restoring_.ties);
    } catch (const std::exception& error) {
        for (std::size_t row = 0; row < at.size(); ++row)
            if (const auto [stream, cell] = layer.cell_of(row); at[row] != ArrivedRows::none)
                trackers_[stream].poison(cell);
        poison(not_taken_over, error.what());
    }
    restoring_.arrived.clear();
}

void CacheBuffer::restore(const CacheTensor& tensor, std::size_t offset, std::size_t size,
                          const std::byte* in) {
    LayerCache& layer = *tensor.layer;
    try {
        start();
        copied_ = {};
        saving_ = {};
        if (layer.mode() == LayerCache::Mode::packed && size > 0)
            take_over(tensor, offset, size, in);
        else
            layer.write(tensor.part, offset, size, in);
    } catch (const std::exception& error) {
        const std::size_t bytes = layer.row_bytes(tensor.part);
        for (std::size_t r = offset / bytes; r * bytes < offset + size; ++r) {
            const auto [stream, cell] = layer.cell_of(r);
            trackers_[stream].poison(cell);
        }
        poison(not_taken_over, error.what());
    }
}

// llama.cpp restores a state part by part: the keys of all layers, then the values of all layers.
// What had been packed is packed again as soon as a layer's keys, and later its values, are
// complete. So one layer's rows at most are held unquantized beside what stays so.
void CacheBuffer::take_over(const CacheTensor& tensor, std::size_t offset, std::size_t size,
                            const std::byte* in) {
    LayerCache& layer = *tensor.layer;
    const bool again = restoring_.last != &tensor;
    if (tensor.part == Part::keys && &layer == marked_layer() &&
        (restoring_.layer == nullptr || again))
        begin_restore(layer);
    else if (restoring_.layer != nullptr && again)
        follow_restored();
    if (tensor.part == Part::keys && restoring_.layer == &layer)
        restore_cells(layer, offset, size, in);
    restoring_.last = &tensor;
    const std::size_t bytes = layer.row_bytes(tensor.part);
    const bool whole = offset % bytes == 0 && size % bytes == 0;
    if (restoring_.marks && !carries_marks(tensor)) {
        if (!whole) throw Error(ErrorCode::invalid_image, "its rows are damaged");
        restoring_.arrived.add(offset / bytes, {in, size}, bytes,
                               std::size_t{layer.cells()} * layer.streams());
        return;
    }
    std::vector<std::byte> clean;
    for (std::size_t at = 0; whole && at < size; at += bytes) {
        if (!begins_codes({in + at, bytes})) continue;
        if (carries_marks(tensor)) {  // poisoned, as restore_cells() has seen
            if (clean.empty()) clean.assign(in, in + size);
            std::fill_n(clean.begin() + static_cast<std::ptrdiff_t>(at), bytes, std::byte{0});
            continue;
        }
        restoring_.too_early = true;
        throw Error(ErrorCode::unsupported,
                    "it has packed rows, which come after the keys of its first layer");
    }
    layer.write(tensor.part, offset, size, clean.empty() ? in : clean.data());
}

// The tensor that came last is complete, and so are the marks.
void CacheBuffer::follow_restored() {
    end_marks();
    if (restoring_.last == nullptr) return;
    take_arrived();
    LayerCache& layer = *restoring_.last->layer;
    OpenMPExecutor executor(host_threads());
    for (std::uint32_t s = 0; s < trackers_.size(); ++s) {
        if (restoring_.last->part == Part::keys)
            layer.follow_keys(s, executor);
        else if (layer.stream(s).keys_wait)
            layer.follow(s, executor);
    }
}

void CacheBuffer::copy_stream(const CacheTensor& tensor, std::uint32_t from, std::uint32_t to) {
    end_restore();
    saving_ = {};
    const Copied before = std::exchange(copied_, {});
    const bool goes_on = before.layer != nullptr && before.from == from && before.to == to;
    try {
        if (!goes_on || before.layer != tensor.layer) {
            OpenMPExecutor executor(host_threads());
            tensor.layer->follow(from, executor);
            tensor.layer->copy_stream(from, to);
        }
        if (!goes_on) trackers_[to].copy(trackers_[from]);
        copied_ = {from, to, tensor.layer};
    } catch (const std::exception&) {
        for (std::uint32_t cell = 0; cell < tensor.layer->cells(); ++cell)
            trackers_[to].poison(cell);
        poison_ = {};
        throw;
    }
}

void CacheBuffer::poison(const char* what, const char* why) noexcept {
    try {
        const std::string before = std::exchange(poison_, concat(what, why));
        if (poison_ != before) report(GGML_LOG_LEVEL_ERROR, poison_);
    } catch (const std::exception&) {
        poison_.clear();  // no memory for a reason
    }
}

// The first layer's keys tell which cells a state has, and their marks what these are.
void CacheBuffer::restore_cells(const LayerCache& layer, std::size_t offset, std::size_t size,
                                const std::byte* in) {
    const std::size_t bytes = layer.row_bytes(Part::keys);
    const bool whole = offset % bytes == 0 && size % bytes == 0;
    std::vector<std::uint16_t> row(bytes / sizeof(std::uint16_t));
    const std::uint32_t scheme = scheme_number(setting_->text);
    bool foreign = false, bad = false;
    const std::size_t first = offset / bytes;
    const std::size_t end = (offset + size - 1) / bytes + 1;
    for (std::size_t r = first; r < end; ++r) {
        std::optional<StampedMark> stamped;
        if (whole) {
            std::memcpy(row.data(), in + (r - first) * bytes, bytes);
            stamped = read_stamp(row);
            restoring_.marks |= stamped.has_value();
        }
        const auto [stream, cell] = layer.cell_of(r);
        CellTracker& tracker = trackers_[stream];
        const bool marked = stamped && stamped->mark.rank != 0;
        const bool is_foreign = marked && stamped->scheme != scheme;
        tracker.restore(cell, marked && !is_foreign ? std::optional(stamped->mark) : std::nullopt);
        const bool was_bad = whole && begins_codes({in + (r - first) * bytes, bytes});
        restoring_.ties[r] = stamped ? stamped->tie : was_bad ? 0 : no_tie;
        if (restoring_.too_early || was_bad || is_foreign) tracker.poison(cell);
        foreign |= is_foreign;
        bad |= was_bad;
    }
    if (bad)
        poison("a state was restored that ", "had not been taken over itself when it was saved");
    if (!foreign) return;
    const std::string why = "another scheme than " + setting_->text +
                            " had saved; restore it with the scheme that it was saved with";
    poison("a state was restored that ", why.c_str());
}

}  // namespace lowkv::ggml
