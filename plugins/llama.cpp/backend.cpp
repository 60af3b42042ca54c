#include "backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <new>

#include "attention_op.h"
#include "lowkv/error.h"
#include "registry.h"
#include "report.h"
#include "rope_params.h"
#include "stats_file.h"

namespace lowkv::ggml {
namespace {

// Views have nothing to do, but their sources may be ours.
bool is_view_op(ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_VIEW ||
           op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
}

template <class F>
void for_each_cache_tensor(const ggml_tensor& node, F&& f) {
    if (CacheTensor* t = cache_tensor(&node); t != nullptr) f(node, *t);
    for (const ggml_tensor* source : node.src)
        if (source != nullptr)
            if (CacheTensor* t = cache_tensor(source); t != nullptr) f(*source, *t);
}

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

// Of any layer: all layers of a step write the same cells.
bool stores_positions(const Scheme& scheme) {
    return scheme.any_layer([](const LayerScheme& layer) { return layer.key.stage == Stage::pre; });
}

// ggml's ALiBi slopes (ggml_compute_forward_flash_attn_ext).
void alibi_slopes(float max_bias, std::uint32_t heads, std::vector<float>& slopes) {
    const std::uint32_t power = 1u << static_cast<std::uint32_t>(std::floor(std::log2(heads)));
    const float m0 = std::pow(2.0f, -max_bias / static_cast<float>(power));
    const float m1 = std::pow(2.0f, -(max_bias / 2.0f) / static_cast<float>(power));
    slopes.resize(heads);
    for (std::uint32_t h = 0; h < heads; ++h)
        slopes[h] = h < power ? std::pow(m0, static_cast<float>(h + 1))
                              : std::pow(m1, static_cast<float>(2 * (h - power) + 1));
}

}  // namespace

void Backend::set_threads(int threads) {
    threads = std::max(threads, 1);
    if (threads != threads_)
        executor_ = std::make_unique<OpenMPExecutor>(static_cast<unsigned>(threads));
    threads_ = threads;
    cpu_.set_threads(threads);
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
    // The delegate scheme, and state that is not a key/value cache: plain memory.
    if (ours == nullptr) return cpu_.compute(graph);

    for (int i = 0; i < nodes; ++i) {
        ggml_tensor& node = *ggml_graph_node(graph, i);
        if (is_view_op(node.op) || (node.flags & GGML_TENSOR_FLAG_COMPUTE) == 0) continue;
        const ggml_status status = compute_node(node);
        if (status != GGML_STATUS_SUCCESS) return status;
    }
    write_stats_if_due(*ours);
    return GGML_STATUS_SUCCESS;
}

ggml_status Backend::compute_node(ggml_tensor& node) {
    bool any = false;
    bool packed = false;
    for_each_cache_tensor(node, [&](const ggml_tensor&, CacheTensor& t) {
        t.buffer->prepare();
        any = true;
        packed |= t.layer->mode() == LayerCache::Mode::packed;
    });
    if (!any) return cpu_.compute(&node);
    if (packed) {
        CacheTensor* target = cache_tensor(&node);
        ggml_status status = GGML_STATUS_SUCCESS;
        switch (node.op) {
            case GGML_OP_SET_ROWS:
                if (target != nullptr && set_rows(node, *target)) return status;
                break;
            case GGML_OP_FLASH_ATTN_EXT:
                if (attention(node)) return status;
                break;
            case GGML_OP_ROPE:
                if (target != nullptr && shift_keys(node, *target, status)) return status;
                break;
            default: break;
        }
        report_once(GGML_LOG_LEVEL_WARN, std::string("the operation ") + ggml_op_desc(&node) +
                                             " on the cache is not served packed; it runs on a "
                                             "decoded copy, which is slow");
    }
    return compute_on_copies(node);
}

bool Backend::set_rows(const ggml_tensor& node, CacheTensor& target) {
    LayerCache& layer = *target.layer;
    const ggml_tensor& rows = *node.src[0];
    const ggml_tensor& numbers = *node.src[1];
    const std::size_t width = layer.row_bytes(target.part) / sizeof(ggml_fp16_t);
    if (rows.type != GGML_TYPE_F32 || rows.nb[0] != sizeof(float) ||
        rows.nb[1] % sizeof(float) != 0 || static_cast<std::size_t>(rows.ne[0]) != width ||
        static_cast<std::size_t>(node.ne[0]) != width || rows.ne[2] != 1 || rows.ne[3] != 1 ||
        node.view_offs != 0 || (numbers.type != GGML_TYPE_I64 && numbers.type != GGML_TYPE_I32))
        return false;

    const auto* data = static_cast<const float*>(rows.data);
    const std::size_t stride = rows.nb[1] / sizeof(float);
    const auto cells = static_cast<std::int64_t>(layer.cells());
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
        if (target.part == Part::keys && layer.stream(stream).written_step == tracker.step()) {
            target.buffer->follow(stream, *executor_);
            tracker.begin_step(cells_, this);
            // Now, because a later layer may find them overwritten: they are an input.
            positions_.clear();
            if (stores_positions(target.buffer->setting().scheme)) read_positions(rows);
        }
        const std::span<const std::int32_t> positions =
            positions_.size() == static_cast<std::size_t>(rows.ne[1])
                ? std::span(positions_).subspan(static_cast<std::size_t>(first), cells_.size())
                : std::span<const std::int32_t>{};
        layer.write_step(target.part, stream, cells_, from, stride, positions);
    }
    return true;
}

void Backend::read_positions(const ggml_tensor& keys) {
    const ggml_tensor* rope = rope_above(&keys);
    const ggml_tensor* positions = rope != nullptr ? rope->src[1] : nullptr;
    if (positions == nullptr || positions->type != GGML_TYPE_I32 || positions->data == nullptr ||
        positions->ne[0] != keys.ne[1])
        return;
    const auto* first = static_cast<const std::int32_t*>(positions->data);
    positions_.assign(first, first + keys.ne[1]);
}

bool Backend::attention(const ggml_tensor& node) {
    const AttentionOp op(node);
    CacheTensor* keys = cache_tensor(op.k);
    const CacheTensor* values = cache_tensor(op.v);
    if (keys == nullptr || values == nullptr || keys->layer != values->layer ||
        keys->part == values->part || !op.unsupported_heads().empty() || !op.served_layout())
        return false;
    LayerCache& layer = *keys->layer;
    const Shape& shape = layer.plan().shape();
    if (shape.head_dim != op.k->ne[0] || shape.kv_heads != op.k->ne[2]) return false;

    const auto heads = static_cast<std::uint32_t>(op.q->ne[2]);
    AttentionParams params;
    params.scale = op.scale;
    params.softcap = op.softcap;
    if (op.max_bias > 0.0f) {
        alibi_slopes(op.max_bias, heads, slopes_);
        params.alibi_slopes = slopes_.data();
    }
    if (op.sinks != nullptr) params.sink_logits = static_cast<const float*>(op.sinks->data);

    for (std::int64_t s = 0; s < op.q->ne[3]; ++s) attend_stream(node, op, *keys, s, params);
    finish_layer(*keys, op, op.first_stream(layer));
    return true;
}

void Backend::attend_stream(const ggml_tensor& node, const AttentionOp& op, CacheTensor& keys,
                            std::int64_t index, AttentionParams& params) {
    LayerCache& layer = *keys.layer;
    const std::uint32_t stream = op.first_stream(layer) + static_cast<std::uint32_t>(index);
    const auto floats = [](std::size_t bytes) { return bytes / sizeof(float); };
    AttentionIO io;
    io.q = reinterpret_cast<const float*>(static_cast<const std::byte*>(op.q->data) +
                                          index * op.q->nb[3]);
    io.q_token_stride = floats(op.q->nb[1]);
    io.q_head_stride = floats(op.q->nb[2]);
    io.out = reinterpret_cast<float*>(static_cast<std::byte*>(node.data) + index * node.nb[3]);
    io.out_token_stride = floats(node.nb[2]);
    io.out_head_stride = floats(node.nb[1]);
    io.tokens = static_cast<std::uint32_t>(op.q->ne[1]);
    io.heads = static_cast<std::uint32_t>(op.q->ne[2]);

    CellTracker& tracker = keys.buffer->tracker(stream);
    if (layer.stream(stream).version < tracker.step_version()) layer.follow(stream, *executor_);
    layer.repack(stream, *executor_);
    if (step_views_.size() <= static_cast<std::size_t>(index))
        step_views_.resize(static_cast<std::size_t>(index) + 1);
    StepView& view = step_views_[static_cast<std::size_t>(index)];
    const MaskRows mask = op.mask_rows(index);
    keys.buffer->require_sane(stream, mask.data, mask.stride, io.tokens, mask.visible);
    view.see(tracker, layer.stream(stream).version, mask, io.tokens, this, *executor_);
    layer.views(stream, view.units(), view.exact_blocks(), views_);
    io.n_cells = view.rows();
    params.mask.kind = Mask::Kind::additive_f16;
    params.mask.data = view.mask();
    params.mask.row_stride = view.rows();
    attend(layer.plan(), views_, io, params, workspace_, *executor_);
}

// After the layer's attention, so that a step attends to its own tokens exactly: the first layer
// to get here ages the cells for all of them, and each packs what has left the window.
void Backend::finish_layer(CacheTensor& keys, const AttentionOp& op, std::uint32_t first_stream) {
    for (std::int64_t s = 0; s < op.q->ne[3]; ++s) {
        const std::uint32_t stream = first_stream + static_cast<std::uint32_t>(s);
        CellTracker& tracker = keys.buffer->tracker(stream);
        if (tracker.pending() > 0 && tracker.pending() == static_cast<std::size_t>(op.q->ne[1])) {
            const MaskRows mask = op.mask_rows(s);
            tracker.observe(mask.data, mask.stride, mask.visible);
        }
        if (tracker.pending() == 0) keys.layer->attended(stream, *executor_);
    }
}

}  // namespace lowkv::ggml
