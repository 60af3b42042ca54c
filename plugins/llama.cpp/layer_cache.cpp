#include "layer_cache.h"

#include <algorithm>
#include <utility>

#include "ggml.h"
#include "lowkv/error.h"

namespace lowkv::ggml {
namespace {

// Of rows that wait: 4 bits, in blocks as short as unquantized rows have.
constexpr std::string_view young_scheme = "kivi4";

}  // namespace

LayerCache::LayerCache(std::shared_ptr<const Setting> setting, std::shared_ptr<Store> store,
                       std::vector<CellTracker>& trackers, std::uint32_t index)
    : setting_(std::move(setting)), store_(std::move(store)), trackers_(trackers), index_(index) {}

void LayerCache::add_tensor(Part part, const ggml_tensor& tensor) {
    Half& h = half(part);
    h.f16 = tensor.type == GGML_TYPE_F16;
    h.row_bytes = tensor.nb[1];
    h.bytes = ggml_nbytes(&tensor);
    cells_ = static_cast<std::uint32_t>(tensor.ne[1]);
    streams_ = static_cast<std::uint32_t>(tensor.ne[2]);
}

void LayerCache::learn_shape(const Shape& shape) {
    if (mode_ != Mode::undecided) return;
    shape_ = shape;
    reason_.clear();
}

void LayerCache::learn_unsupported(const std::string& reason) {
    if (mode_ == Mode::undecided && !shape_known()) reason_ = reason;
}

void LayerCache::learn_no_flash_attention() {
    if (mode_ == Mode::undecided) shape_ = {};
}

void LayerCache::learn_refusal(const std::string& reason) {
    if (mode_ == Mode::undecided && refusal_.empty()) refusal_ = reason;
}

void LayerCache::learn_rope(const Rope& rope) {
    if (mode_ == Mode::undecided) rope_ = rope;
}

bool LayerCache::wants_rope() const {
    return mode_ == Mode::undecided && setting_->scheme.layer(index_).key.stage == Stage::pre;
}

std::string LayerCache::why_not_packed() {
    const Half& k = half(Part::keys);
    const Half& v = half(Part::values);
    const bool latent = shape_.latent();
    if (k.bytes == 0 || (v.bytes == 0 && !latent)) return "it has no separate keys and values";
    if (!k.f16 || !(v.f16 || latent))
        return "its cache type is not f16 (drop -ctk and -ctv, or a draft's -ctkd and -ctvd)";
    if (!shape_known())
        return reason_.empty()
                   ? "it runs without flash attention (drop -fa off, or say -fa on where "
                     "llama.cpp gave it up)"
                   : reason_;
    if (!refusal_.empty()) return refusal_;
    const std::size_t row = std::size_t{2} * shape_.channels();
    if (k.row_bytes != row || !(v.row_bytes == row || latent))
        return "its keys and values differ in width";
    try {
        LayerInputs inputs;
        inputs.rope = rope_ ? &*rope_ : nullptr;
        if (setting_->calibration)
            inputs.calibration = &layer_calibration(*setting_, index_, shape_);
        std::vector<LayerScheme> schemes = setting_->rungs;
        schemes.push_back(setting_->scheme.layer(index_));
        Blocks::Ladder ladder;
        for (const LayerScheme& scheme : schemes)
            ladder.push_back(
                std::make_shared<const Plan>(scheme, shape_, std::string_view{}, index_, inputs));
        for (const auto& plan : ladder) device().check(*plan);
        ladder_ = std::make_shared<const Blocks::Ladder>(std::move(ladder));
        const bool waits = setting_->scheme.retention.young > 0 && !plan().scheme().exact();
        rows_ladder_ = ladder_;
        if (waits || trackers_.front().groups().row_block() < plan().block_tokens())
            rows_ladder_ = std::make_shared<const Blocks::Ladder>(
                1, std::make_shared<const Plan>(
                       waits ? parse_scheme(young_scheme).base : LayerScheme{}, shape_,
                       std::string_view{}, index_));
    } catch (const Error& error) {
        if (error.code() == ErrorCode::device_failed) throw;
        return error.what();
    }
    return {};
}

void LayerCache::decide() {
    if (mode_ != Mode::undecided) return;
    reason_ = why_not_packed();
    if (reason_.empty()) {
        streams_state_.clear();
        streams_state_.reserve(streams_);
        while (streams_state_.size() < streams_)
            streams_state_.push_back({{},
                                      &trackers_[streams_state_.size()],
                                      Blocks(store_, rows_ladder_),
                                      Blocks(store_, ladder_)});
        decoded_ = DeviceMemory(store_->device(), plan().exact_bytes());
        mode_ = Mode::packed;
        return;
    }
    for (Half& h : halves_) h.plain = Mapping(h.bytes);
    mode_ = Mode::plain;
}

void LayerCache::clear() {
    decoded_from_ = nullptr;
    for (Half& h : halves_) h.plain.zero();
    for (StreamState& s : streams_state_) {
        count_readers(s);
        s.exact.drop_from(0);
        s.packed.drop_from(0);
        static_cast<StreamNotes&>(s) = {.expected_readers = s.expected_readers};
    }
    shift_rope_.reset();
    back_.clear();
}

void LayerCache::copy_stream(std::uint32_t from, std::uint32_t to) {
    decoded_from_ = nullptr;
    const StreamState& source = stream(from);
    state(to) = {source, &trackers_[to], source.exact.fork(), source.packed.fork()};
}

void LayerCache::update_query_stats(std::uint32_t stream_index, const QueryRows& queries) {
    if (std::ranges::none_of(plans(), [](const auto& plan) { return plan->wants_queries(); }))
        return;
    StreamState& s = state(stream_index);
    const CellGroups& groups = s.groups();
    const auto cells = s.tracker->observed();
    if (cells.size() != queries.tokens) return;  // not the tokens of the step
    const auto history_of = [&](std::uint32_t token) {
        const std::uint32_t group = groups.group_of(cells[token]);
        return group == no_cell ? no_cell : groups.group(group).history;
    };
    for (std::uint32_t first = 0, end = 0; first < queries.tokens; first = end) {
        const std::uint32_t history = history_of(first);
        for (end = first + 1; end < queries.tokens && history_of(end) == history;) ++end;
        if (history == no_cell) continue;
        QueryRows its = queries;
        its.data += first * queries.token_stride;
        its.tokens = end - first;
        const auto [found, is_new] = s.queries.try_emplace(history);
        found->second.add(shape_, its);
        if (is_new)
            std::erase_if(s.queries, [&](const auto& q) { return !groups.has_history(q.first); });
    }
}

void LayerCache::attended(std::uint32_t stream_index, Executor& executor) {
    StreamState& s = state(stream_index);
    ++s.readers;
    if (s.readers >= s.expected_readers && s.expected_readers > 0) follow(stream_index, executor);
}

void LayerCache::copied_by_graph(std::uint32_t stream_index) { ++state(stream_index).readers; }

// Exact blocks belong to the unit before them, unless that was moved: their rows are alike in all
// plans, but for those that wait in one of their own.
void LayerCache::see(std::uint32_t stream_index, std::span<const std::uint32_t> units,
                     std::span<const std::uint32_t> exact_blocks, Seen& seen) {
    const StreamState& s = stream(stream_index);
    const std::uint32_t blocks_each = ratio(s.groups());
    const std::uint32_t row_blocks_each = row_ratio(s.groups());
    seen.blocks.clear();
    seen.blocks.reserve(units.size() * blocks_each + exact_blocks.size() * row_blocks_each);
    seen.pieces.clear();
    const auto add = [&](const Blocks& table, std::uint32_t number, const Plan* packed_by,
                         const KeyShift* back) {
        const std::uint32_t blocks = &table == &s.exact ? row_blocks_each : blocks_each;
        AttentionPiece* last = seen.pieces.empty() ? nullptr : &seen.pieces.back();
        const bool alike = packed_by == nullptr || (last != nullptr && last->plan == packed_by);
        if (last == nullptr || last->back != back || !alike) {
            const std::uint32_t first = last == nullptr ? 0 : last->first_cell + last->cells;
            last = &seen.pieces.emplace_back();
            last->plan = packed_by != nullptr ? packed_by : &table.plan();
            last->first_cell = first;
            last->back = back;
            last->blocks = {seen.blocks.data() + seen.blocks.size(), 0};
        }
        last->cells += blocks * table.plan().block_tokens();
        for (std::uint32_t b = number * blocks; b < (number + 1) * blocks; ++b)
            seen.blocks.push_back(table.view(b));
        last->blocks = {last->blocks.data(), last->blocks.size() + blocks};
    };
    for (const std::uint32_t unit : units) {
        const std::int32_t moved = moved_by(s, unit);
        const KeyShift* back =
            moved == 0 ? nullptr
                       : &back_.try_emplace(moved, *shift_rope_, shape_, -moved).first->second;
        std::uint8_t rung = 0;  // of its blocks, those apart that are unquantized again
        for (std::uint32_t b = unit * blocks_each; b < (unit + 1) * blocks_each; ++b)
            rung = std::max(rung, s.packed.rung(b));
        add(s.packed, unit, rung > 0 ? plans()[rung - 1u].get() : nullptr, back);
    }
    const Plan* waits = rows_ladder_ == ladder_ ? nullptr : &row_plan();
    for (const std::uint32_t b : exact_blocks) add(s.exact, b, waits, nullptr);
}

void LayerCache::write_step(Part part, std::uint32_t stream_index,
                            std::span<const std::uint32_t> cells, const float* rows,
                            std::size_t stride, std::span<const std::int32_t> positions) {
    StreamState& s = state(stream_index);
    places_.resize(cells.size());
    std::ranges::transform(cells, places_.begin(),
                           [&](std::uint32_t cell) { return s.groups().exact_row(cell); });
    const lowkv::Rows from{rows, RowType::f32, shape_.head_dim, stride};
    if (part == Part::values) {
        s.exact.write(places_, {}, from);
        return;
    }
    // First, so that the next graph begins a step of its own whatever happens.
    s.written_step = s.tracker->step();
    count_readers(s);
    s.exact.write(places_, from, {}, positions);
}

// A graph does not say how many layers read a cache. The step before does, llama.cpp's warm-up too.
void LayerCache::count_readers(StreamState& s) {
    s.expected_readers = std::max(s.expected_readers, s.readers);
    s.readers = 0;
}

}  // namespace lowkv::ggml
