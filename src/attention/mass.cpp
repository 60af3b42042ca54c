// Attention mass on the CPU: the tasks are ranges of cells, so that every task adds to cells of its
// own.

#include <algorithm>
#include <vector>

#include "attention/query.h"
#include "attention/workspace.h"
#include "isa/table.h"
#include "round.h"

namespace lowkv {

using kernels::decode_max_rows;
using kernels::prefill_max_rows;
using kernels::Row;
using kernels::span_tokens;

void attention::run_mass(const Plan& plan, const SequenceAttention& sequence,
                         const AttentionParams& params, std::uint32_t first_cell,
                         std::span<float> mass, AttentionWorkspace& workspace, Executor& executor) {
    const Shape& shape = plan.shape();
    const AttentionIO& io = sequence.io;
    AttentionWorkspace::Impl& work = workspace.impl();
    const codec::Rotation* rotation = plan.keys().rotation();
    if (rotation != nullptr) {
        work.rotated_q.resize(std::size_t{io.tokens} * io.heads * shape.head_dim);
        executor.parallel_for(io.tokens, [&](std::size_t token, unsigned) {
            attention::rotate_queries(io, *rotation, token, token + 1, work.rotated_q.data());
        });
    }
    work.scratch.resize(executor.threads());
    for (auto& scratch : work.scratch) scratch.reserve(kernels::scratch_bytes());

    const std::uint32_t repeat = io.heads / shape.kv_heads, rows_of_head = io.tokens * repeat;
    const std::uint32_t chunk_rows =
        rows_of_head <= params.decode_rows ? decode_max_rows : plan.kernels().prefill_rows;
    const std::uint32_t first_span = first_cell / span_tokens;
    const auto end_cell = static_cast<std::uint32_t>(first_cell + mass.size());
    const std::uint32_t spans = ceil_div(end_cell, span_tokens) - first_span;
    // A few spans a task, because each loads all queries anew.
    const std::uint32_t task_spans = std::max(spans / (4 * executor.threads()), 1u);
    std::vector<float> sums(std::size_t{spans} * span_tokens);

    executor.parallel_for(ceil_div(spans, task_spans), [&](std::size_t item, unsigned thread) {
        const auto span = static_cast<std::uint32_t>(item) * task_spans;
        kernels::Task task;
        task.plan = &plan;
        task.views = sequence.blocks.data();
        task.first_cell = (first_span + span) * span_tokens;
        task.last_cell = std::min(task.first_cell + task_spans * span_tokens, end_cell);
        attention::set_task(task, io, sequence.mask, params);
        task.scratch = work.scratch[thread].data();
        Row rows[prefill_max_rows];
        float lse[prefill_max_rows];
        task.rows = rows;
        for (task.kv_head = 0; task.kv_head < shape.kv_heads; ++task.kv_head) {
            for (std::uint32_t first = 0; first < rows_of_head; first += chunk_rows) {
                task.row_count = std::min(chunk_rows, rows_of_head - first);
                for (std::uint32_t i = 0; i < task.row_count; ++i) {
                    const std::uint32_t token = (first + i) / repeat;
                    const std::uint32_t head = task.kv_head * repeat + (first + i) % repeat;
                    const std::size_t at = std::size_t{token} * io.heads + head;
                    rows[i] =
                        attention::make_row(io, sequence.mask, params.alibi_slopes, token, head);
                    if (rotation != nullptr) {
                        rows[i].packed_q = work.rotated_q.data() + at * shape.head_dim;
                    }
                    lse[i] = io.lse[at];
                }
                plan.kernels().weigh(task, lse, sums.data() + std::size_t{span} * span_tokens);
            }
        }
    });
    const float* sum = sums.data() + (first_cell - first_span * span_tokens);
    for (std::size_t i = 0; i < mass.size(); ++i) mass[i] += sum[i];
}

}  // namespace lowkv
