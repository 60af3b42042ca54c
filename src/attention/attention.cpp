// Splits an attention over tasks (kv head x query rows x range of cells), lets the implementation's
// kernels run them, and joins the partial results.

#include "lowkv/attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "attention/query.h"
#include "attention/workspace.h"
#include "codec/rotation.h"
#include "kernels/table.h"
#include "lowkv/error.h"

namespace lowkv {

using kernels::decode_max_rows;
using kernels::prefill_max_rows;
using kernels::Row;
using kernels::span_tokens;

namespace attention {
namespace {

void check(bool legal, const std::string& message) {
    if (!legal) throw Error(ErrorCode::invalid_argument, "attend: " + message);
}

}  // namespace

void check_arguments(const Shape& shape, const AttentionIO& io, const AttentionParams& params) {
    check(io.heads > 0 && io.heads % shape.kv_heads == 0,
          std::to_string(io.heads) + " query heads are not a multiple of " +
              std::to_string(shape.kv_heads) + " kv heads");
    check(io.tokens == 0 || (io.q != nullptr && io.out != nullptr), "q or out is null");
    const Mask& mask = params.mask;
    const bool additive = kernels::is_additive(mask.kind);
    check(!additive || mask.data != nullptr, "the additive mask has no data");
    check(!additive || io.tokens < 2 || mask.row_stride >= io.n_cells,
          "mask rows of " + std::to_string(mask.row_stride) + " values do not cover " +
              std::to_string(io.n_cells) + " cells");
    check(mask.kind != Mask::Kind::causal || io.n_cells >= io.tokens,
          "a causal mask needs at least as many cells (" + std::to_string(io.n_cells) +
              ") as query tokens (" + std::to_string(io.tokens) + ")");
    check(std::isfinite(params.scale) && std::isfinite(params.softcap) && params.softcap >= 0,
          "scale must be finite, softcap finite and not negative");
}

}  // namespace attention

namespace {

// How the rows of one kv head (token-major, then the query heads that share it) and the cells are
// cut into tasks.
struct Split {
    bool decode = false;
    std::uint32_t rows = 0;        // per kv head
    std::uint32_t chunk_rows = 0;  // rows per task
    std::uint32_t chunks = 0;
    std::uint32_t range_cells = 0;  // cells per task
    std::uint32_t ranges = 0;
};

constexpr std::uint32_t ceil_div(std::uint32_t a, std::uint32_t b) { return (a + b - 1) / b; }

Split make_split(const Shape& shape, const AttentionIO& io, const AttentionParams& params,
                 unsigned threads) {
    Split split;
    split.rows = io.tokens * (io.heads / shape.kv_heads);
    split.decode = split.rows <= params.decode_rows;
    std::uint32_t ranges = 1;
    if (split.decode) {
        split.chunks = ceil_div(split.rows, decode_max_rows);
        split.chunk_rows = ceil_div(split.rows, split.chunks);
        // Heads that the threads can't share evenly: cut the cells too, into twice as many ranges
        // as would come out even, because blocks differ in cost. Not into ranges so short that
        // joining them costs more than it gains.
        const std::uint32_t tasks = shape.kv_heads * split.chunks;
        const std::uint32_t even = threads / std::gcd(tasks, threads);
        if (even > 1) ranges = std::min(2 * even, ceil_div(io.n_cells, 2 * span_tokens));
    } else {
        // Small prompts get smaller chunks, so that every thread has work.
        const std::uint32_t even = ceil_div(split.rows * shape.kv_heads, 4 * threads);
        split.chunk_rows = std::clamp(even, std::uint32_t{24}, prefill_max_rows);
        split.chunks = ceil_div(split.rows, split.chunk_rows);
    }
    const std::uint32_t spans = std::max(ceil_div(io.n_cells, span_tokens), 1u);
    split.range_cells = ceil_div(spans, std::max(ranges, 1u)) * span_tokens;
    split.ranges = std::max(ceil_div(io.n_cells, split.range_cells), 1u);
    return split;
}

}  // namespace

Row attention::make_row(const AttentionIO& io, const AttentionParams& params, std::uint32_t token,
                        std::uint32_t head) {
    Row row;
    row.q = io.q + token * io.q_token_stride + head * io.q_head_stride;
    row.packed_q = row.q;
    row.limit = io.n_cells;
    const std::size_t mask_offset = token * params.mask.row_stride + head * params.mask.head_stride;
    switch (params.mask.kind) {
        case Mask::Kind::none: break;
        case Mask::Kind::causal: row.limit = io.n_cells - io.tokens + token + 1; break;
        case Mask::Kind::additive_f16:
            row.mask = static_cast<const std::uint16_t*>(params.mask.data) + mask_offset;
            break;
        case Mask::Kind::additive_f32:
            row.mask = static_cast<const float*>(params.mask.data) + mask_offset;
            break;
    }
    if (params.alibi_slopes != nullptr) row.slope = params.alibi_slopes[head];
    return row;
}

namespace {

// One row's result from its ranges' partial maxima, sums and outputs (`stride` apart). Returns the
// logarithm of the softmax's denominator.
float join(const float* max, const float* sum, std::size_t stride, const float* out,
           std::size_t out_stride, std::uint32_t ranges, std::uint32_t head_dim,
           const float* sink_logit, float* result) noexcept {
    float top = sink_logit != nullptr ? *sink_logit : -INFINITY;
    for (std::uint32_t i = 0; i < ranges; ++i) top = std::max(top, max[i * stride]);
    std::fill_n(result, head_dim, 0.0f);
    if (top == -INFINITY) return top;
    float total = sink_logit != nullptr ? std::exp(*sink_logit - top) : 0.0f;
    for (std::uint32_t i = 0; i < ranges; ++i) {
        const float weight = std::exp(max[i * stride] - top);
        if (weight == 0.0f) continue;
        total += sum[i * stride] * weight;
        const float* part = out + i * out_stride;
        for (std::uint32_t c = 0; c < head_dim; ++c) result[c] += part[c] * weight;
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    for (std::uint32_t c = 0; c < head_dim; ++c) result[c] *= inverse;
    return top + std::log(total);
}

}  // namespace

void attention::rotate_queries(const AttentionIO& io, const codec::Rotation& rotation,
                               float* rotated, Executor& executor) {
    constexpr std::size_t tokens_of_an_item = 16;
    const std::uint32_t head_dim = rotation.head_dim();
    const std::size_t items = (io.tokens + tokens_of_an_item - 1) / tokens_of_an_item;
    executor.parallel_for(items, [&](std::size_t item, unsigned) {
        const std::size_t first = item * tokens_of_an_item;
        const std::size_t last = std::min<std::size_t>(first + tokens_of_an_item, io.tokens);
        for (std::size_t token = first; token < last; ++token) {
            for (std::uint32_t head = 0; head < io.heads; ++head) {
                float* q = rotated + (token * io.heads + head) * head_dim;
                std::copy_n(io.q + token * io.q_token_stride + head * io.q_head_stride, head_dim,
                            q);
                rotation.apply(q);
            }
        }
    });
}

AttentionWorkspace::AttentionWorkspace() : impl_(std::make_unique<Impl>()) {}
AttentionWorkspace::~AttentionWorkspace() = default;
AttentionWorkspace::AttentionWorkspace(AttentionWorkspace&&) noexcept = default;
AttentionWorkspace& AttentionWorkspace::operator=(AttentionWorkspace&&) noexcept = default;

void attend(const Sequence& sequence, const AttentionIO& io, const AttentionParams& params,
            AttentionWorkspace& workspace, Executor& executor) {
    std::vector<BlockView>& views = workspace.impl().views;
    views.resize(ceil_div(std::max(io.n_cells, 1u), sequence.plan().block_tokens()));
    sequence.views(views);
    attend(sequence.plan(), views, io, params, workspace, executor);
}

void attend(const Plan& plan, std::span<const BlockView> blocks, const AttentionIO& io,
            const AttentionParams& params, AttentionWorkspace& workspace, Executor& executor) {
    const Shape& shape = plan.shape();
    const std::uint32_t head_dim = shape.head_dim;
    attention::check_arguments(shape, io, params);
    attention::check(blocks.size() >= ceil_div(io.n_cells, plan.block_tokens()),
                     std::to_string(blocks.size()) + " blocks of " +
                         std::to_string(plan.block_tokens()) + " do not cover " +
                         std::to_string(io.n_cells) + " cells");
    if (io.tokens == 0) return;

    AttentionWorkspace::Impl& work = workspace.impl();
    const Split split = make_split(shape, io, params, executor.threads());
    const std::uint32_t repeat = io.heads / shape.kv_heads;
    const std::size_t chunk_tasks = std::size_t{shape.kv_heads} * split.chunks;
    const std::size_t rows_held = chunk_tasks * split.ranges * split.chunk_rows;
    const codec::Rotation* key_rotation = plan.keys().rotation();
    const codec::Rotation* value_rotation = plan.values().rotation();
    const std::size_t out_floats = rows_held * head_dim;
    work.out.reserve((value_rotation != nullptr ? 2 : 1) * out_floats * sizeof(float));
    auto* const out = reinterpret_cast<float*>(work.out.data());
    auto* const packed_out = value_rotation != nullptr ? out + out_floats : out;
    if (key_rotation != nullptr) {
        work.rotated_q.resize(std::size_t{io.tokens} * io.heads * head_dim);
        attention::rotate_queries(io, *key_rotation, work.rotated_q.data(), executor);
    }
    work.max.resize(rows_held);
    work.sum.resize(rows_held);
    if (!split.decode) work.scratch.resize(executor.threads());
    for (auto& scratch : work.scratch) scratch.reserve(kernels::scratch_bytes());

    // Writes a row's result, from the first of its ranges on.
    const auto finish_row = [&](std::size_t first_row, std::uint32_t token, std::uint32_t head) {
        const auto join_into = [&](const float* from, float* result) {
            return join(work.max.data() + first_row, work.sum.data() + first_row, split.chunk_rows,
                        from + first_row * head_dim, std::size_t{split.chunk_rows} * head_dim,
                        split.ranges, head_dim,
                        params.sink_logits != nullptr ? params.sink_logits + head : nullptr,
                        result);
        };
        float* result = io.out + token * io.out_token_stride + head * io.out_head_stride;
        const float log_sum = join_into(out, result);
        if (io.log_sum != nullptr) {
            io.log_sum[std::size_t{token} * io.heads + head] = log_sum;
        }
        if (value_rotation == nullptr) return;
        float packed[kernels::max_head_dim];
        join_into(packed_out, packed);
        value_rotation->apply_inverse(packed);
        for (std::uint32_t c = 0; c < head_dim; ++c) result[c] += packed[c];
    };

    const auto row_of = [&](std::size_t chunk_task, std::uint32_t i) {
        const auto kv_head = static_cast<std::uint32_t>(chunk_task / split.chunks);
        const auto chunk = static_cast<std::uint32_t>(chunk_task % split.chunks);
        const std::uint32_t row = chunk * split.chunk_rows + i;
        struct {
            std::uint32_t token, head;
            bool exists;
        } at{row / repeat, kv_head * repeat + row % repeat, row < split.rows};
        return at;
    };

    executor.parallel_for(chunk_tasks * split.ranges, [&](std::size_t item, unsigned thread) {
        const std::size_t chunk_task = item / split.ranges;
        const auto range = static_cast<std::uint32_t>(item % split.ranges);
        kernels::Task task;
        task.plan = &plan;
        task.views = blocks.data();
        task.kv_head = static_cast<std::uint32_t>(chunk_task / split.chunks);
        task.first_cell = range * split.range_cells;
        task.last_cell = std::min(task.first_cell + split.range_cells, io.n_cells);
        Row rows[prefill_max_rows];
        while (task.row_count < split.chunk_rows) {
            const auto at = row_of(chunk_task, task.row_count);
            if (!at.exists) break;
            Row& row = rows[task.row_count++];
            row = attention::make_row(io, params, at.token, at.head);
            if (key_rotation != nullptr) {
                row.packed_q =
                    work.rotated_q.data() + (std::size_t{at.token} * io.heads + at.head) * head_dim;
            }
        }
        task.rows = rows;
        task.mask = params.mask.kind;
        task.causal_alibi =
            params.alibi_slopes != nullptr && params.mask.kind == Mask::Kind::causal;
        task.scale = params.scale;
        task.softcap = params.softcap;
        task.out = out + item * split.chunk_rows * head_dim;
        task.packed_out = packed_out + item * split.chunk_rows * head_dim;
        task.max = work.max.data() + item * split.chunk_rows;
        task.sum = work.sum.data() + item * split.chunk_rows;
        if (split.decode) {
            plan.kernels().decode(task);
        } else {
            task.scratch = work.scratch[thread].data();
            plan.kernels().prefill(task);
        }
        if (split.ranges > 1) return;
        for (std::uint32_t i = 0; i < task.row_count; ++i) {
            const auto at = row_of(chunk_task, i);
            finish_row(item * split.chunk_rows + i, at.token, at.head);
        }
    });
    if (split.ranges == 1) return;

    for (std::size_t chunk_task = 0; chunk_task < chunk_tasks; ++chunk_task) {
        for (std::uint32_t i = 0; i < split.chunk_rows; ++i) {
            const auto at = row_of(chunk_task, i);
            if (!at.exists) break;
            finish_row(chunk_task * split.ranges * split.chunk_rows + i, at.token, at.head);
        }
    }
}

}  // namespace lowkv
