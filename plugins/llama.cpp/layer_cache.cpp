#include "layer_cache.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "ggml.h"
#include "lowkv/calibration_file.h"
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

void LayerCache::learn_refusal(const std::string& reason) {
    if (mode_ == Mode::undecided && refusal_.empty()) refusal_ = reason;
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
    if (!k.f16 || !v.f16)
        return "its cache type is not f16 (drop -ctk and -ctv, or a draft's -ctkd and -ctvd)";
    if (!shape_known())
        return reason_.empty()
                   ? "it runs without flash attention (drop -fa off, or say -fa on where "
                     "llama.cpp gave it up)"
                   : reason_;
    if (!refusal_.empty()) return refusal_;
    const std::size_t row = std::size_t{2} * shape_.channels();
    if (k.row_bytes != row || v.row_bytes != row) return "its keys and values differ in width";
    try {
        LayerInputs inputs;
        inputs.rope = rope_ ? &*rope_ : nullptr;
        inputs.byte_rows = setting_->scheme.byte_rows(index_);
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
                              .done = {},
                              .keys = {},
                              .queries = {},
                              .moved = {}});
        streams_state_ = std::move(states);
        decoded_ = DeviceMemory(store_->device(), plan_->host().exact_bytes());
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
        s.queries.clear();
        s.written_step = s.version = 0;
        s.done.clear();
        s.keys.clear();
        s.keys_wait = false;
        s.rewritten = false;
        s.moved.clear();
        count_readers(s);
    }
    shift_rope_.reset();
}

void LayerCache::copy_stream(std::uint32_t from, std::uint32_t to) {
    decoded_from_ = nullptr;
    const StreamState& source = stream(from);
    StreamState copy{.exact = source.exact.fork(),
                     .packed = source.packed.fork(),
                     .written_step = source.written_step,
                     .version = source.version,
                     .done = source.done,
                     .keys = source.keys,
                     .keys_wait = source.keys_wait,
                     .rewritten = source.rewritten,
                     .readers = source.readers,
                     .expected_readers = source.expected_readers,
                     .queries = source.queries,
                     .moved = source.moved};
    state(to) = std::move(copy);
}

// Units and blocks of cells are as long as the longest block of any layer.
std::uint32_t LayerCache::ratio(const CellGroups& groups) const noexcept {
    return groups.block() / plan_->block_tokens();
}

// The block whose statistics a unit takes over: that of the nearest packed group before it in its
// sequence, or of one among `others`, which are packed with it. no_cell: its own. So what another
// sequence has in the stream does not matter. Layers with statistics have blocks as long as a unit.
std::uint32_t LayerCache::stats_from(std::uint32_t stream_index, std::uint32_t unit,
                                     std::span<const std::uint32_t> others) const {
    if (!plan_->has_statistics()) return no_cell;
    const CellGroups& groups = trackers_[stream_index].groups();
    const StreamState& s = stream(stream_index);
    for (std::uint32_t g = groups.before(groups.unit_group(unit)); g != no_cell;
         g = groups.before(g)) {
        const std::uint32_t u = groups.group(g).unit;
        if (u == no_cell) continue;
        const bool done = has_packed(Part::keys, s, groups, u);
        if ((done && s.packed.packed(u)) || std::ranges::find(others, u) != others.end()) return u;
    }
    return no_cell;
}

void LayerCache::update_query_stats(std::uint32_t stream_index, const QueryRows& queries) {
    if (!plan_->wants_queries()) return;
    const CellTracker& tracker = trackers_[stream_index];
    const CellGroups& groups = tracker.groups();
    const auto cells = tracker.observed();
    if (cells.size() != queries.tokens) return;  // not the tokens of the step
    StreamState& s = state(stream_index);
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
        found->second.add(plan_->shape(), its);
        if (is_new)
            std::erase_if(s.queries, [&](const auto& q) { return !groups.has_history(q.first); });
    }
}

bool LayerCache::has_packed(Part part, const StreamState& s, const CellGroups& groups,
                            std::uint32_t unit) noexcept {
    if (unit >= s.done.size()) return false;
    const std::uint32_t generation = groups.generations()[unit];
    return s.done[unit] == generation || (part == Part::keys && s.keys[unit] == generation);
}

// Packs units of one history, few enough to be exact and packed at once.
void LayerCache::pack_from(std::uint32_t stream_index, std::span<const std::uint32_t> units,
                           Portion portion, Executor& executor) {
    const CellGroups& groups = trackers_[stream_index].groups();
    StreamState& s = state(stream_index);
    const std::uint32_t blocks_each = ratio(groups);
    std::vector<std::uint32_t> blocks, cells, sources;
    for (std::size_t i = 0; i < units.size(); ++i) {
        sources.insert(sources.end(), blocks_each,
                       stats_from(stream_index, units[i], units.first(i)));
        for (std::uint32_t b = 0; b < blocks_each; ++b)
            blocks.push_back(units[i] * blocks_each + b);
        for (const std::uint32_t cell : groups.unit_cells(units[i]))
            cells.push_back(holds_exact(s, cell) ? cell : no_cell);
    }
    if (portion == Portion::values) {
        s.packed.pack_values_from(s.exact, blocks, cells, executor);
    } else {
        QueryEnergy& queries = s.queries[groups.group(groups.unit_group(units[0])).history];
        s.packed.swap_queries(queries);
        try {
            if (portion == Portion::keys)
                s.packed.pack_keys_from(s.exact, blocks, cells, executor, sources);
            else
                s.packed.pack_from(s.exact, blocks, cells, executor, sources);
        } catch (...) {
            s.packed.swap_queries(queries);
            throw;
        }
        s.packed.swap_queries(queries);
    }
    s.keys_wait |= portion == Portion::keys;
    for (const std::uint32_t unit : units)
        (portion == Portion::keys ? s.keys : s.done)[unit] = groups.generations()[unit];
}

// Drops the units that are free, and packs those that are not packed up to that portion.
void LayerCache::take_units(std::uint32_t stream_index, Portion last, Executor& executor) {
    const CellGroups& groups = trackers_[stream_index].groups();
    StreamState& s = state(stream_index);
    const std::uint32_t blocks_each = ratio(groups);
    const auto generations = groups.generations();
    s.done.resize(generations.size(), 0);
    s.keys.resize(generations.size(), 0);
    std::vector<std::uint32_t> taken;
    for (std::uint32_t unit = 0; unit < generations.size(); ++unit) {
        if (has_packed(last == Portion::keys ? Part::keys : Part::values, s, groups, unit))
            continue;
        if (!has_packed(Part::keys, s, groups, unit)) {
            std::vector<std::uint32_t> its(blocks_each);
            std::iota(its.begin(), its.end(), unit * blocks_each);
            s.packed.drop(its);
            if (unit < s.moved.size()) s.moved[unit] = 0;
        }
        if (generations[unit] % 2 == 0)
            s.done[unit] = generations[unit];
        else
            taken.push_back(unit);
    }
    const auto portion_of = [&](std::uint32_t unit) {
        return has_packed(Part::keys, s, groups, unit) ? Portion::values : last;
    };
    // One history after the other, each in the order of its tokens.
    const auto history = [&](std::uint32_t unit) {
        return groups.group(groups.unit_group(unit)).history;
    };
    std::ranges::sort(taken, {}, [&](std::uint32_t unit) {
        const std::uint32_t rank = groups.group(groups.unit_group(unit)).first_rank;
        return std::tuple(history(unit), rank, unit);
    });
    constexpr std::size_t units_at_once = 8;
    for (std::size_t first = 0, end = 0; first < taken.size(); first = end) {
        const Portion portion = portion_of(taken[first]);
        while (end < taken.size() && end - first < units_at_once &&
               history(taken[end]) == history(taken[first]) && portion_of(taken[end]) == portion)
            ++end;
        pack_from(stream_index, std::span(taken).subspan(first, end - first), portion, executor);
    }
}

// Blocks of cells without exact rows. One whose values belong to keys that wait stays.
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
    if (plan_->scheme().exact() ||
        state(stream_index).version == trackers_[stream_index].groups().version())
        return;
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
    const CellGroups& groups = trackers_[stream_index].groups();
    const auto generations = groups.generations();
    std::vector<std::uint32_t> blocks, units, sources;
    for (std::uint32_t b = 0; b < s.packed.blocks(); ++b) {
        if (s.packed.packed(b)) continue;
        const std::uint32_t unit = b / ratio(groups);
        const bool in_use = unit < generations.size() && generations[unit] % 2 == 1;
        sources.push_back(in_use ? stats_from(stream_index, unit, units) : no_cell);
        blocks.push_back(b);
        if (in_use) units.push_back(unit);
    }
    s.packed.pack(blocks, executor, sources);
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

}  // namespace lowkv::ggml
