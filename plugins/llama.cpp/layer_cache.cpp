#include "layer_cache.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "calibration/file/calibration_file.h"
#include "ggml.h"
#include "lowkv/error.h"

namespace lowkv::ggml {

LayerCache::LayerCache(std::shared_ptr<const Setting> setting, std::shared_ptr<Store> store,
                       std::vector<CellTracker>& trackers, std::uint32_t index)
    : setting_(std::move(setting)), store_(std::move(store)), trackers_(trackers), index_(index) {}

void LayerCache::add_tensor(Part part, const ggml_tensor& tensor) {
    Half& h = half(part);
    h.present = true;
    h.f16 = tensor.type == GGML_TYPE_F16;
    h.row_bytes = tensor.nb[1];
    h.bytes = ggml_nbytes(&tensor);
    cells_ = static_cast<std::uint32_t>(tensor.ne[1]);
    streams_ = static_cast<std::uint32_t>(tensor.ne[2]);
}

void LayerCache::learn_shape(std::uint32_t kv_heads, std::uint32_t head_dim) {
    if (mode_ != Mode::undecided) return;
    shape_ = {.kv_heads = kv_heads, .head_dim = head_dim};
    reason_.clear();
}

void LayerCache::learn_unsupported(const std::string& reason) {
    if (mode_ == Mode::undecided && !shape_known()) reason_ = reason;
}

void LayerCache::learn_no_flash_attention() {
    if (mode_ == Mode::undecided) shape_ = {};
}

void LayerCache::learn_rope(const Rope& rope) {
    if (mode_ == Mode::undecided) rope_ = rope;
}

bool LayerCache::wants_rope() const {
    return mode_ == Mode::undecided && !setting_->delegate &&
           setting_->scheme.layer(index_).key.stage == Stage::pre;
}

std::string LayerCache::why_not_packed() {
    const Half& k = half(Part::keys);
    const Half& v = half(Part::values);
    if (!k.present || !v.present) return "it has no separate keys and values";
    if (!k.f16 || !v.f16) return "its cache type is not f16 (drop -ctk and -ctv)";
    if (!shape_known())
        return reason_.empty()
                   ? "it runs without flash attention (drop -fa off, or say -fa on where "
                     "llama.cpp gave it up)"
                   : reason_;
    if (!rope_reason_.empty()) return rope_reason_;
    const std::size_t row = std::size_t{2} * shape_.channels();
    if (k.row_bytes != row || v.row_bytes != row) return "its keys and values differ in width";
    try {
        LayerInputs inputs;
        inputs.rope = rope_ ? &*rope_ : nullptr;
        if (setting_->calibration) {
            calibration::require_layer(*setting_->calibration, index_, shape_, "the calibration");
            inputs.calibration = &setting_->calibration->layers[index_];
        }
        plan_ = std::make_shared<const Plan>(setting_->scheme.layer(index_), shape_,
                                             std::string_view{}, index_, inputs);
    } catch (const Error& error) {
        return error.what();
    }
    return {};
}

void LayerCache::decide() {
    if (mode_ != Mode::undecided) return;
    reason_ = why_not_packed();
    if (reason_.empty()) {
        Retention packed = setting_->scheme.retention;
        packed.sinks = 0;  // they are exact; a mean of keys leaves out no packed row
        std::vector<StreamState> states;
        for (std::uint32_t s = 0; s < streams_; ++s)
            states.push_back({.exact = Sequence(store_, plan_, setting_->scheme.retention),
                              .packed = Sequence(store_, plan_, packed),
                              .done = {}});
        streams_state_ = std::move(states);
        decoded_.resize(plan_->exact_bytes());
        mode_ = Mode::packed;
        return;
    }
    for (Half& h : halves_)
        if (h.present) h.plain = Mapping(h.bytes);
    mode_ = Mode::plain;
}

void LayerCache::clear() {
    decoded_from_ = nullptr;
    for (Half& h : halves_) h.plain.zero();
    for (StreamState& s : streams_state_) {
        s.exact.truncate(0);
        s.packed.truncate(0);
        s.written_step = s.version = 0;
        s.done.clear();
        s.rewritten = false;
        count_readers(s);
    }
}

void LayerCache::copy_stream(std::uint32_t from, std::uint32_t to) {
    decoded_from_ = nullptr;
    const StreamState& source = stream(from);
    StreamState copy{.exact = source.exact.fork(),
                     .packed = source.packed.fork(),
                     .written_step = source.written_step,
                     .version = source.version,
                     .done = source.done,
                     .rewritten = source.rewritten,
                     .readers = source.readers,
                     .expected_readers = source.expected_readers};
    state(to) = std::move(copy);
}

// Units and blocks of cells are as long as the longest block of any layer.
std::uint32_t LayerCache::ratio(const CellGroups& groups) const noexcept {
    return groups.block() / plan_->block_tokens();
}

void LayerCache::follow(std::uint32_t stream_index, Executor& executor) {
    decoded_from_ = nullptr;
    const CellGroups& groups = trackers_[stream_index].groups();
    StreamState& s = state(stream_index);
    if (s.version != groups.version()) {
        const std::uint32_t blocks_each = ratio(groups);
        const auto generations = groups.generations();
        s.done.resize(generations.size(), 0);
        // Exact and packed at once: few units at a time.
        constexpr std::size_t units_at_once = 8;
        std::vector<std::uint32_t> blocks, cells, units;
        const auto flush = [&] {
            s.packed.adopt(s.exact, blocks, cells, executor);
            for (const std::uint32_t unit : units) s.done[unit] = generations[unit];
            blocks.clear();
            cells.clear();
            units.clear();
        };
        for (std::uint32_t unit = 0; unit < generations.size(); ++unit) {
            if (s.done[unit] == generations[unit]) continue;
            std::vector<std::uint32_t> its(blocks_each);
            std::iota(its.begin(), its.end(), unit * blocks_each);
            s.packed.drop(its);
            if (generations[unit] % 2 == 0) {
                s.done[unit] = generations[unit];
                continue;
            }
            units.push_back(unit);
            blocks.insert(blocks.end(), its.begin(), its.end());
            for (const std::uint32_t cell : groups.unit_cells(unit))
                cells.push_back(holds_exact(s, cell) ? cell : no_cell);
            if (units.size() == units_at_once) flush();
        }
        flush();
        std::vector<std::uint32_t> empty;
        for (std::uint32_t b = 0; b < groups.exact_rows().size(); ++b) {
            if (groups.exact_rows()[b] > 0) continue;
            for (std::uint32_t i = 0; i < blocks_each; ++i) empty.push_back(b * blocks_each + i);
        }
        s.exact.drop(empty);
        s.version = groups.version();
    }
    repack(stream_index, executor);
}

// A graph that was aborted may have written a cell in some layers only.
bool LayerCache::holds_exact(const StreamState& s, std::uint32_t cell) const {
    if (cell == no_cell) return false;
    const std::uint32_t block = cell / plan_->block_tokens();
    return block < s.exact.blocks() && s.exact.view(block).keys != nullptr;
}

void LayerCache::repack(std::uint32_t stream_index, Executor& executor) {
    if (mode_ != Mode::packed) return;
    StreamState& s = state(stream_index);
    if (!s.rewritten) return;
    decoded_from_ = nullptr;
    std::vector<std::uint32_t> blocks(s.packed.blocks());
    std::iota(blocks.begin(), blocks.end(), 0);
    s.packed.pack(blocks, executor);
    s.rewritten = false;
}

void LayerCache::attended(std::uint32_t stream_index, Executor& executor) {
    StreamState& s = state(stream_index);
    ++s.readers;
    if (s.readers >= s.expected_readers && s.expected_readers > 0) follow(stream_index, executor);
}

void LayerCache::copied_by_graph(std::uint32_t stream_index) { ++state(stream_index).readers; }

void LayerCache::views(std::uint32_t stream_index, std::span<const std::uint32_t> units,
                       std::span<const std::uint32_t> exact_blocks,
                       std::vector<BlockView>& out) const {
    const StreamState& s = stream(stream_index);
    const std::uint32_t blocks_each = ratio(trackers_[stream_index].groups());
    out.clear();
    const auto add = [&](const Sequence& sequence, std::uint32_t number) {
        for (std::uint32_t b = number * blocks_each; b < (number + 1) * blocks_each; ++b)
            out.push_back(b < sequence.blocks() ? sequence.view(b) : BlockView{});
    };
    for (const std::uint32_t unit : units) add(s.packed, unit);
    for (const std::uint32_t b : exact_blocks) add(s.exact, b);
}

// A unit that this layer has not packed yet is still at its cells.
LayerCache::Place LayerCache::place(std::uint32_t stream_index, std::uint32_t cell,
                                    std::uint32_t limit) const {
    const CellGroups& groups = trackers_[stream_index].groups();
    const StreamState& s = stream(stream_index);
    const auto packed_row = [&](std::uint32_t c) {
        const std::uint32_t row = groups.packed_row(c);
        const std::uint32_t unit = row / groups.block();
        const bool done =
            row != no_cell && unit < s.done.size() && s.done[unit] == groups.generations()[unit];
        return done ? row : no_cell;
    };
    limit = std::min(limit, cells_ - cell);
    const std::uint32_t row = packed_row(cell);
    Place found{.packed = row != no_cell, .row = row != no_cell ? row : cell, .run = 1};
    while (found.run < limit &&
           packed_row(cell + found.run) == (found.packed ? row + found.run : no_cell))
        ++found.run;
    return found;
}

LayerCache::Rows LayerCache::rows(std::uint32_t stream_index) const {
    const CellGroups& groups = trackers_[stream_index].groups();
    Rows rows;
    for (std::uint32_t cell = 0; cell < cells_; ++cell) {
        if (groups.packed_row(cell) == no_cell && !groups.exact(cell)) continue;
        const bool packed = !plan_->scheme().exact() && place(stream_index, cell, 1).packed;
        ++(packed ? rows.packed : rows.exact);
    }
    return rows;
}

// Rows count over all streams: row = stream * cells + cell. Exact blocks hold keys by channel and
// values by token (codec.h), in f16 already.
void LayerCache::read_rows(Part part, std::size_t row, std::size_t rows, std::byte* out) const {
    const std::uint32_t tokens = plan_->block_tokens();
    const std::uint32_t channels = shape_.channels();
    const std::size_t bytes = row_bytes(part);
    while (rows > 0) {
        const auto s = static_cast<std::uint32_t>(row / cells_);
        const Place at = place(s, static_cast<std::uint32_t>(row % cells_),
                               static_cast<std::uint32_t>(std::min<std::size_t>(rows, tokens)));
        const Sequence& sequence = at.packed ? stream(s).packed : stream(s).exact;
        const std::uint32_t block = at.row / tokens;
        const std::uint32_t first = at.row % tokens;
        const std::uint32_t count = std::min(at.run, tokens - first);

        BlockView view = block < sequence.blocks() ? sequence.view(block) : BlockView{};
        if (view.keys != nullptr && view.packed) {
            if (decoded_from_ != view.keys) {
                decode_block(*plan_, view.keys, decoded_.data());
                decoded_from_ = view.keys;
            }
            view = {decoded_.data(), decoded_.data() + plan_->exact_part_bytes(), false};
        }
        if (view.keys == nullptr) {
            std::memset(out, 0, count * bytes);
        } else if (part == Part::values) {
            std::memcpy(out, view.values + first * bytes, count * bytes);
        } else {
            // A state's rows may lie at odd addresses.
            const auto* keys = reinterpret_cast<const ggml_fp16_t*>(view.keys);
            rows_.resize(std::size_t{count} * channels);
            for (std::uint32_t c = 0; c < channels; ++c)
                for (std::uint32_t t = 0; t < count; ++t)
                    rows_[std::size_t{t} * channels + c] =
                        keys[std::size_t{c} * tokens + first + t];
            std::memcpy(out, rows_.data(), count * bytes);
        }
        out += count * bytes;
        row += count;
        rows -= count;
    }
}

void LayerCache::write_rows(Part part, std::size_t row, std::size_t rows, const std::byte* in) {
    const std::uint32_t channels = shape_.channels();
    constexpr std::size_t batch = 128;
    std::vector<float> values(std::min(rows, batch) * channels);
    std::vector<std::uint32_t> places;
    while (rows > 0) {
        const auto s = static_cast<std::uint32_t>(row / cells_);
        const Place at = place(s, static_cast<std::uint32_t>(row % cells_),
                               static_cast<std::uint32_t>(std::min(rows, batch)));
        rows_.resize(std::size_t{at.run} * channels);
        std::memcpy(rows_.data(), in, at.run * row_bytes(part));
        ggml_fp16_to_fp32_row(rows_.data(), values.data(), std::int64_t{at.run} * channels);
        places.resize(at.run);
        std::iota(places.begin(), places.end(), at.row);
        StreamState& target = state(s);
        target.rewritten |= at.packed;
        decoded_from_ = nullptr;
        Sequence& sequence = at.packed ? target.packed : target.exact;
        if (part == Part::keys)
            sequence.write_keys(places, values.data(), channels);
        else
            sequence.write_values(places, values.data(), channels);
        in += at.run * row_bytes(part);
        row += at.run;
        rows -= at.run;
    }
}

void LayerCache::write_step(Part part, std::uint32_t stream_index,
                            std::span<const std::uint32_t> cells, const float* rows,
                            std::size_t stride, std::span<const std::int32_t> positions) {
    StreamState& s = state(stream_index);
    if (part == Part::values) {
        s.exact.write_values(cells, rows, stride);
        return;
    }
    // First, so that the next graph begins a step of its own whatever happens.
    s.written_step = trackers_[stream_index].step();
    count_readers(s);
    s.exact.write_keys(cells, rows, stride, positions);
}

// A graph does not say how many layers read a cache. The step before does, llama.cpp's warm-up too.
void LayerCache::count_readers(StreamState& s) {
    s.expected_readers = std::max(s.expected_readers, s.readers);
    s.readers = 0;
}

void LayerCache::write_key(std::uint32_t stream_index, std::uint32_t cell, const std::byte* row,
                           std::int32_t position) {
    std::vector<float> values(shape_.channels());
    ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(row), values.data(),
                          static_cast<std::int64_t>(values.size()));
    const Place at = place(stream_index, cell, 1);
    StreamState& s = state(stream_index);
    s.rewritten |= at.packed;
    decoded_from_ = nullptr;
    (at.packed ? s.packed : s.exact)
        .write_keys({&at.row, 1}, values.data(), values.size(), {&position, 1});
}

std::int32_t LayerCache::position(std::uint32_t stream_index, std::uint32_t cell) const {
    const Place at = place(stream_index, cell, 1);
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
    const std::size_t bytes = row_bytes(part);
    std::vector<std::byte> one;
    while (size > 0) {
        const std::size_t row = offset / bytes;
        const std::size_t within = offset % bytes;
        std::size_t step = 0;
        if (within == 0 && size >= bytes) {
            step = size / bytes * bytes;
            read_rows(part, row, size / bytes, out);
        } else {
            step = std::min(size, bytes - within);
            one.resize(bytes);
            read_rows(part, row, 1, one.data());
            std::memcpy(out, one.data() + within, step);
        }
        out += step;
        offset += step;
        size -= step;
    }
}

void LayerCache::write(Part part, std::size_t offset, std::size_t size, const std::byte* in) {
    decide();
    if (mode_ == Mode::plain) {
        std::memcpy(half(part).plain.data() + offset, in, size);
        return;
    }
    const std::size_t bytes = row_bytes(part);
    std::vector<std::byte> one;
    while (size > 0) {
        const std::size_t row = offset / bytes;
        const std::size_t within = offset % bytes;
        std::size_t step = 0;
        if (within == 0 && size >= bytes) {
            step = size / bytes * bytes;
            write_rows(part, row, size / bytes, in);
        } else {
            step = std::min(size, bytes - within);
            one.resize(bytes);
            read_rows(part, row, 1, one.data());
            std::memcpy(one.data() + within, in, step);
            write_rows(part, row, 1, one.data());
        }
        in += step;
        offset += step;
        size -= step;
    }
}

}  // namespace lowkv::ggml
