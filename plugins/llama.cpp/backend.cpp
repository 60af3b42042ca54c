#include "backend.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

#include "attention_op.h"
#include "cache_size.h"
#include "host.h"
#include "lowkv/error.h"
#include "registry.h"
#include "rope_params.h"
#include "served.h"
#include "stats_file.h"

namespace lowkv::ggml {
namespace {

std::int64_t row_number(const ggml_tensor& numbers, std::int64_t i) {
    const auto* at = static_cast<const std::byte*>(numbers.data) + i * numbers.nb[0];
    if (numbers.type == GGML_TYPE_I32) {
        std::int32_t value = 0;
        std::memcpy(&value, at, sizeof value);
        return value;
    }
    std::int64_t value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
}

std::string name_of(const ggml_tensor& node, const LayerCache& layer) {
    return concat("the operation ", ggml_op_desc(&node), " on layer ", layer.index(),
                  " of the packed cache");
}

[[noreturn]] void refuse(const ggml_tensor& node, const LayerCache& layer) {
    throw Error(ErrorCode::unsupported, name_of(node, layer),
                " is not served in this form: packed rows can be stored by SET_ROWS, read by "
                "FLASH_ATTN_EXT and shifted by ROPE. Run this program without lowkv");
}

}  // namespace

void Backend::set_threads(int threads) {
    const auto count = static_cast<unsigned>(std::max(threads, 1));
    if (count != executor_->threads()) executor_ = std::make_unique<OpenMPExecutor>(count);
    cpu_.set_threads(static_cast<int>(count));
}

void Backend::set_abort_callback(ggml_abort_callback callback, void* data) {
    abort_ = callback;
    abort_data_ = data;
    cpu_.set_abort_callback(callback, data);
}

ggml_status Backend::compute(ggml_cgraph* graph) {
    if (abort_ != nullptr && abort_(abort_data_)) return GGML_STATUS_ABORTED;
    const int nodes = ggml_graph_n_nodes(graph);
    const CacheBuffer* ours = nullptr;
    for (int i = 0; i < nodes && ours == nullptr; ++i)
        for_each_cache_tensor(*ggml_graph_node(graph, i),
                              [&](const ggml_tensor&, CacheTensor& t) { ours = t.buffer; });
    // State that is not a key/value cache is plain memory.
    if (ours == nullptr) return cpu_.compute(graph);

    graph_ = graph;
    for (node_ = 0; node_ < nodes; ++node_) {
        ggml_tensor& node = *ggml_graph_node(graph, node_);
        if (is_view(node) || (node.flags & GGML_TENSOR_FLAG_COMPUTE) == 0) continue;
        const ggml_status status = compute_node(node);
        if (status != GGML_STATUS_SUCCESS) return status;
    }
    write_stats_if_due(*ours);
    return GGML_STATUS_SUCCESS;
}

ggml_status Backend::compute_node(ggml_tensor& node) {
    const CacheTensor* target = cache_tensor(&node);
    if (operation(node) != op_name::rope || target == nullptr) return compute_operation(node);
    // A context shift. llama.cpp goes on when it fails, with keys that were turned in some layers
    // or in none: they must not be seen.
    const auto* shifts =
        served(node) ? static_cast<const std::int32_t*>(node.src[1]->data) : nullptr;
    try {
        const ggml_status status = compute_operation(node);
        if (status != GGML_STATUS_SUCCESS) target->buffer->poison_shifted(shifts, "it was aborted");
        return status;
    } catch (const std::exception& error) {
        target->buffer->poison_shifted(shifts, error.what());
        throw;
    }
}

ggml_status Backend::compute_operation(ggml_tensor& node) {
    bool any = false;
    CacheTensor* packed = nullptr;
    for_each_cache_tensor(node, [&](const ggml_tensor&, CacheTensor& t) {
        t.buffer->prepare();
        any = true;
        if (t.layer->mode() == LayerCache::Mode::packed) packed = &t;
    });
    if (!any) return cpu_.compute(&node);
    if (packed == nullptr) return compute_on_plain(node);
    if (!served(node)) refuse(node, *packed->layer);
    if (operation(node) == op_name::rope) return shift_keys(node, *packed);
    if (operation(node) == op_name::set_rows)
        set_rows(node, *packed);
    else
        attention(node);
    return GGML_STATUS_SUCCESS;
}

void Backend::set_rows(const ggml_tensor& node, CacheTensor& target) {
    LayerCache& layer = *target.layer;
    const ggml_tensor& rows = *node.src[0];
    const ggml_tensor& numbers = *node.src[1];
    const auto* data = static_cast<const float*>(rows.data);
    const std::size_t stride = rows.nb[1] / sizeof(float);
    const auto cells = static_cast<std::int64_t>(layer.cells());
    std::vector<std::int32_t>& known = target.buffer->step_positions();
    for (std::int64_t i = 0; i < rows.ne[1];) {
        // The rows of one stream come together.
        const auto stream = static_cast<std::uint32_t>(row_number(numbers, i) / cells);
        const std::int64_t first = i;
        cells_.clear();
        for (; i < rows.ne[1]; ++i) {
            const std::int64_t row = row_number(numbers, i);
            if (row / cells != stream) break;
            cells_.push_back(static_cast<std::uint32_t>(row % cells));
        }
        const float* from = data + static_cast<std::size_t>(first) * stride;
        // All layers write the same cells. A layer that meets the step that it wrote last begins
        // the next one.
        CellTracker& tracker = target.buffer->tracker(stream);
        if (target.part == Part::values)
            for (const std::uint32_t cell : cells_)
                if (!layer.writable(stream, cell))
                    throw Error(ErrorCode::unsupported, name_of(node, layer),
                                " stores values in cell ", cell, ", where it stored no keys");
        if (target.part == Part::keys && layer.stream(stream).written_step == tracker.step()) {
            target.buffer->follow(stream, *executor_);
            const auto mask = mask_ahead(layer, stream, cells_.size());
            tracker.begin_step(cells_, this, mask ? &*mask : nullptr);
            known.clear();
        }
        // From the first layer that turns its keys, because a later one may find them overwritten:
        // they are an input. Some models' first layers or every fourth have no RoPE.
        if (target.part == Part::keys && known.empty() &&
            stores_positions(target.buffer->setting().scheme))
            read_positions(rows, known);
        const std::span<const std::int32_t> positions =
            known.size() == static_cast<std::size_t>(rows.ne[1])
                ? std::span(known).subspan(static_cast<std::size_t>(first), cells_.size())
                : std::span<const std::int32_t>{};
        layer.write_step(target.part, stream, cells_, from, stride, positions);
    }
}

// What the tokens that are about to be written will see: the mask of the layer's attention, where
// that comes in the same graph and the mask is not made by it. Older llama.cpp casts it first.
std::optional<MaskRows> Backend::mask_ahead(const LayerCache& layer, std::uint32_t stream,
                                            std::size_t tokens) const {
    for (int i = node_ + 1; i < ggml_graph_n_nodes(graph_); ++i) {
        const ggml_tensor& node = *ggml_graph_node(graph_, i);
        if (operation(node) != op_name::flash_attn_ext) continue;
        const AttentionOp op(node);
        const CacheTensor* keys = cache_tensor(op.k);
        if (keys == nullptr || keys->layer != &layer) continue;
        const std::int64_t index = std::int64_t{stream} - op.first_stream(layer);
        // A mask that the graph computes is not there yet.
        const bool computed = op.mask != nullptr && operation(*root(op.mask)) != op_name::none;
        if (computed || index < 0 || index >= op.q->ne[3] ||
            op.q->ne[1] != static_cast<std::int64_t>(tokens))
            return std::nullopt;
        return op.mask_rows(index);
    }
    return std::nullopt;
}

void Backend::read_positions(const ggml_tensor& keys, std::vector<std::int32_t>& known) {
    const ggml_tensor* rope = rope_above(&keys);
    const ggml_tensor* positions = rope != nullptr ? rope->src[1] : nullptr;
    if (positions == nullptr || positions->type != GGML_TYPE_I32 || positions->data == nullptr ||
        positions->ne[0] != keys.ne[1])
        return;
    const auto* first = static_cast<const std::int32_t*>(positions->data);
    known.assign(first, first + keys.ne[1]);
}

void Backend::attention(const ggml_tensor& node) {
    const AttentionOp op(node);
    CacheTensor& keys = *cache_tensor(op.k);
    AttentionParams params;
    params.scale = op.scale;
    params.softcap = op.softcap;
    const std::vector<float> slopes = op.slopes();
    if (!slopes.empty()) params.alibi_slopes = slopes.data();
    if (op.sinks != nullptr) params.sink_logits = static_cast<const float*>(op.sinks->data);

    LayerCache& layer = *keys.layer;
    const std::uint32_t first_stream = op.first_stream(layer);
    const auto streams = static_cast<std::uint32_t>(op.q->ne[3]);
    // Both may change blocks of the layer's store, so they come before any block's address is
    // taken.
    for (std::uint32_t stream = first_stream; stream < first_stream + streams; ++stream) {
        if (layer.stream(stream).version < keys.buffer->tracker(stream).step_version())
            layer.follow(stream, *executor_);
        layer.repack(stream, *executor_);
    }
    if (stream_views_.size() < streams) stream_views_.resize(streams);
    attended_.clear();
    for (std::uint32_t s = 0; s < streams; ++s) see_stream(node, op, keys, s);
    if (!attended_.empty()) attend(layer.device(), attended_, params, workspace_, *executor_);
    finish_layer(keys, op, first_stream);
}

// Adds what the operation's stream number `index` attends to.
void Backend::see_stream(const ggml_tensor& node, const AttentionOp& op, CacheTensor& keys,
                         std::uint32_t index) {
    LayerCache& layer = *keys.layer;
    const std::uint32_t stream = op.first_stream(layer) + index;
    const auto floats = [](std::size_t bytes) { return bytes / sizeof(float); };
    AttentionIO io;
    const QueryRows queries = op.queries(index);
    io.q = queries.data;
    io.q_token_stride = queries.token_stride;
    io.q_head_stride = queries.head_stride;
    io.out = reinterpret_cast<float*>(static_cast<std::byte*>(node.data) + index * node.nb[3]);
    io.out_token_stride = floats(node.nb[2]);
    io.out_head_stride = floats(node.nb[1]);
    io.tokens = queries.tokens;
    io.heads = queries.heads;

    StepView& view = stream_views_[index].step;
    const MaskRows mask = op.mask_rows(index);
    keys.buffer->require_sane(stream, mask, io.tokens);
    view.see(keys.buffer->tracker(stream), layer.stream(stream).version, mask, io.tokens, this,
             *executor_);
    if (view.rows() == 0) {  // a draft model's first look into its target's cache
        for (std::size_t t = 0; t < io.tokens; ++t)
            for (std::size_t h = 0; h < io.heads; ++h)
                std::fill_n(io.out + t * io.out_token_stride + h * io.out_head_stride,
                            layer.shape().out_dim(), 0.0f);
        return;
    }
    LayerCache::Seen& seen = stream_views_[index].seen;
    layer.see(stream, view.units(), view.exact_blocks(), seen);
    io.n_cells = view.rows();
    Mask rows;
    rows.kind = Mask::Kind::additive_f16;
    rows.data = view.mask();
    rows.row_stride = view.rows();
    attended_.push_back({seen.pieces, io, rows});
}

// After the layer's attention, so that a step attends to its own tokens exactly: the first layer
// to get here ages the cells for all of them, and each packs what has left the window.
void Backend::finish_layer(CacheTensor& keys, const AttentionOp& op, std::uint32_t first_stream) {
    for (std::int64_t s = 0; s < op.q->ne[3]; ++s) {
        const std::uint32_t stream = first_stream + static_cast<std::uint32_t>(s);
        CellTracker& tracker = keys.buffer->tracker(stream);
        const bool ranks = op.unsupported_mask().empty();
        if (ranks && tracker.pending() > 0 &&
            tracker.pending() == static_cast<std::size_t>(op.q->ne[1])) {
            tracker.see_mask(op.mask_rows(s));
        }
        if (tracker.pending() > 0) continue;
        keys.layer->update_query_stats(stream, op.queries(s));
        keys.layer->attended(stream, *executor_);
    }
}

}  // namespace lowkv::ggml
