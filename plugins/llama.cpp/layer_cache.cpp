#include "layer_cache.h"

#include <algorithm>
#include <cstring>

#include "calibration/file/calibration_file.h"
#include "ggml.h"
#include "lowkv/error.h"

namespace lowkv::ggml {

LayerCache::LayerCache(std::shared_ptr<const Setting> setting, std::shared_ptr<Store> store,
                       std::uint32_t index)
    : setting_(std::move(setting)), store_(std::move(store)), index_(index) {}

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
        return reason_.empty() ? "it runs without flash attention (drop -fa off)" : reason_;
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
        for (std::uint32_t s = 0; s < streams_; ++s)
            streams_state_.emplace_back(Sequence(store_, plan_, setting_->scheme.retention));
        decoded_.resize(plan_->exact_bytes());
        mode_ = Mode::packed;
        return;
    }
    for (Half& h : halves_)
        if (h.present) h.plain = Mapping(h.bytes);
    mode_ = Mode::plain;
}

void LayerCache::clear() {
    for (Half& h : halves_) h.plain.zero();
    for (StreamState& s : streams_state_) {
        s.sequence.truncate(0);
        s.written_step = s.packed_step = 0;
    }
}

void LayerCache::copy_stream(std::uint32_t from, std::uint32_t to) {
    const StreamState& source = stream(from);
    StreamState copy(source.sequence.fork());
    copy.written_step = source.written_step;
    copy.packed_step = source.packed_step;
    stream(to) = std::move(copy);
}

void LayerCache::pack(std::uint32_t stream_index, const CellTracker& tracker, Executor& executor) {
    StreamState& state = stream(stream_index);
    if (state.packed_step == tracker.step()) return;
    // A layer that missed a step (its graph was aborted) catches up with everything.
    const bool in_turn = state.packed_step + 1 == tracker.step();
    state.packed_step = tracker.step();

    std::vector<std::uint32_t> all;
    std::span<const std::uint32_t> ready = tracker.newly_ready();
    if (!in_turn) {
        all = tracker.all_ready();
        ready = all;
    }
    pack_units(stream_index, ready, tracker, executor);
}

void LayerCache::pack_restored(std::uint32_t stream_index, std::uint32_t first, std::uint32_t last,
                               const CellTracker& tracker) {
    std::vector<std::uint32_t> ready;
    for (std::uint32_t unit = first / tracker.block(); unit * tracker.block() < last; ++unit)
        if (tracker.ready(unit)) ready.push_back(unit);
    pack_units(stream_index, ready, tracker, serial_executor());
}

// The tracker's units are as long as the longest block of any layer.
void LayerCache::pack_units(std::uint32_t stream_index, std::span<const std::uint32_t> units,
                            const CellTracker& tracker, Executor& executor) {
    if (units.empty()) return;
    Sequence& target = stream(stream_index).sequence;
    const std::uint32_t ratio = tracker.block() / plan_->block_tokens();
    std::vector<std::uint32_t> blocks;
    blocks.reserve(units.size() * ratio);
    for (const std::uint32_t unit : units)
        for (std::uint32_t i = 0; i < ratio; ++i)
            if (unit * ratio + i < target.blocks()) blocks.push_back(unit * ratio + i);
    target.pack(blocks, executor);
}

// Rows count over all streams: row = stream * cells + cell. Exact blocks hold keys by channel and
// values by token (codec.h), in f16 already.
void LayerCache::read_rows(Part part, std::size_t row, std::size_t rows, std::byte* out) const {
    const std::uint32_t tokens = plan_->block_tokens();
    const std::uint32_t channels = shape_.channels();
    const std::size_t bytes = row_bytes(part);
    while (rows > 0) {
        const Sequence& sequence = stream(static_cast<std::uint32_t>(row / cells_)).sequence;
        const auto cell = static_cast<std::uint32_t>(row % cells_);
        const std::uint32_t block = cell / tokens;
        const std::uint32_t first = cell % tokens;
        const auto count = static_cast<std::uint32_t>(
            std::min<std::size_t>({rows, tokens - first, cells_ - cell}));

        BlockView view = block < sequence.blocks() ? sequence.view(block) : BlockView{};
        if (view.keys != nullptr && view.packed) {
            decode_block(*plan_, view.keys, decoded_.data(), view.key_mean);
            view = {decoded_.data(), decoded_.data() + plan_->exact_part_bytes(), false};
        }
        if (view.keys == nullptr) {
            std::memset(out, 0, count * bytes);
        } else if (part == Part::values) {
            std::memcpy(out, view.values + first * bytes, count * bytes);
        } else {
            const auto* keys = reinterpret_cast<const ggml_fp16_t*>(view.keys);
            auto* target = reinterpret_cast<ggml_fp16_t*>(out);
            for (std::uint32_t c = 0; c < channels; ++c)
                for (std::uint32_t t = 0; t < count; ++t)
                    target[std::size_t{t} * channels + c] =
                        keys[std::size_t{c} * tokens + first + t];
        }
        out += count * bytes;
        row += count;
        rows -= count;
    }
}

void LayerCache::write_rows(Part part, std::size_t row, std::size_t rows, const std::byte* in) {
    const std::uint32_t channels = shape_.channels();
    constexpr std::size_t batch = 128;
    std::vector<float> values(batch * channels);
    std::vector<std::uint32_t> cells;
    while (rows > 0) {
        const auto cell = static_cast<std::uint32_t>(row % cells_);
        const std::size_t count = std::min<std::size_t>({rows, batch, cells_ - cell});
        ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(in), values.data(),
                              static_cast<std::int64_t>(count * channels));
        cells.clear();
        for (std::size_t i = 0; i < count; ++i)
            cells.push_back(cell + static_cast<std::uint32_t>(i));
        Sequence& target = sequence(static_cast<std::uint32_t>(row / cells_));
        if (part == Part::keys)
            target.write_keys(cells, values.data(), channels);
        else
            target.write_values(cells, values.data(), channels);
        in += count * row_bytes(part);
        row += count;
        rows -= count;
    }
}

void LayerCache::write_key(std::uint32_t stream, std::uint32_t cell, const std::byte* row,
                           std::int32_t position) {
    std::vector<float> values(shape_.channels());
    ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(row), values.data(),
                          static_cast<std::int64_t>(values.size()));
    sequence(stream).write_keys({&cell, 1}, values.data(), values.size(), {&position, 1});
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
