// Attention on the CPU: splits it over tasks (sequence x kv head x query rows x range of cells),
// lets the implementation's kernels run them in one parallel loop, and joins the partial results.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/query.h"
#include "attention/workspace.h"
#include "isa/table.h"
#include "lowkv/rotation.h"
#include "round.h"

namespace lowkv {

using kernels::decode_max_rows;
using kernels::prefill_max_rows;
using kernels::Row;
using kernels::span_tokens;

namespace {

// Rows to chunks; set_ranges() cuts the cells.
AttentionSplit split_rows(const Plan& plan, const SequenceAttention& sequence,
                          const AttentionParams& params, unsigned threads) {
    const Shape& shape = plan.shape();
    const std::uint32_t most_rows = plan.kernels().prefill_rows;
    const AttentionIO& io = sequence.io;
    AttentionSplit split;
    split.rows = io.tokens * (io.heads / shape.kv_heads);
    split.decode = split.rows <= params.decode_rows && !shape.latent();
    if (split.rows == 0) return split;
    if (split.decode) {
        split.chunks = ceil_div(split.rows, decode_max_rows);
        split.chunk_rows = ceil_div(split.rows, split.chunks);
    } else if (shape.latent()) {
        // What is expanded of a tile serves as many rows as there can be.
        split.chunks = ceil_div(split.rows, most_rows);
        split.chunk_rows = round_up(ceil_div(split.rows, split.chunks), decode_max_rows);
    } else {
        // Small prompts get smaller chunks, so that every thread has work. Whole fours, as kernels
        // multiply them.
        const std::uint32_t even = ceil_div(split.rows * shape.kv_heads, 4 * threads);
        split.chunk_rows =
            std::clamp(round_up(even, decode_max_rows), std::uint32_t{24}, most_rows);
        split.chunks = ceil_div(split.rows, split.chunk_rows);
    }
    const Row first = attention::make_row(io, sequence.mask, nullptr, 0, 0);
    split.first_cell = first.begin / span_tokens * span_tokens;
    return split;
}

// `tasks`: of all sequences, if no cells are cut.
void set_ranges(AttentionSplit& split, const Shape& shape, std::uint32_t n_cells, std::size_t tasks,
                unsigned threads) {
    const std::uint32_t cells = n_cells - split.first_cell;
    std::uint32_t ranges = 1;
    constexpr unsigned enough = 16;  // tasks for each thread
    if (split.decode && tasks < std::size_t{enough} * threads) {
        // Heads that the threads can't share evenly: cut the cells too, into twice as many ranges
        // as would come out even, because blocks differ in cost. Not into ranges so short that
        // joining them costs more than it gains.
        const std::uint32_t even = threads / std::gcd(static_cast<unsigned>(tasks), threads);
        if (even > 1) ranges = std::min(2 * even, ceil_div(cells, span_tokens));
    } else if (shape.latent() && threads > 1) {
        ranges = static_cast<std::uint32_t>(ceil_div(std::size_t{2} * threads, tasks));
    }
    const std::uint32_t spans = std::max(ceil_div(cells, span_tokens), 1u);
    split.range_cells = ceil_div(spans, std::max(ranges, 1u)) * span_tokens;
    split.ranges = std::max(ceil_div(cells, split.range_cells), 1u);
}

// One call of attend().
class Call {
  public:
    Call(const Plan& plan, std::span<const SequenceAttention> sequences,
         const AttentionParams& params, AttentionWorkspace::Impl& work, Executor& executor)
        : plan_(plan), params_(params), work_(work), executor_(executor) {
        make_jobs(sequences);
    }

    void run() {
        if (tasks_ == 0) return;
        rotate();
        executor_.parallel_for(tasks_,
                               [this](std::size_t task, unsigned thread) { attend(task, thread); });
        // A single sequence's are too few to be worth waking threads for.
        constexpr std::size_t few = 32;
        if (chunks_to_join_ == 0) return;
        if (chunks_to_join_ <= few) {
            for (std::size_t chunk = 0; chunk < chunks_; ++chunk) join_ranges(chunk);
        } else {
            executor_.parallel_for(chunks_,
                                   [this](std::size_t chunk, unsigned) { join_ranges(chunk); });
        }
    }

  private:
    static constexpr std::size_t tokens_of_a_turn = 16;

    const Plan& plan_;
    const AttentionParams& params_;
    AttentionWorkspace::Impl& work_;
    Executor& executor_;
    std::size_t tasks_ = 0, chunks_ = 0, chunks_to_join_ = 0, turns_ = 0;
    float* out_ = nullptr;
    float* packed_out_ = nullptr;

    std::uint32_t kv_heads() const { return plan_.shape().kv_heads; }
    std::uint32_t head_dim() const { return plan_.shape().head_dim; }

    void make_jobs(std::span<const SequenceAttention> sequences) {
        const unsigned threads = executor_.threads();
        work_.jobs.clear();
        std::size_t tasks = 0;
        for (const SequenceAttention& sequence : sequences) {
            if (sequence.io.tokens == 0) continue;
            AttentionJob job;
            job.sequence = &sequence;
            job.split = split_rows(plan_, sequence, params_, threads);
            tasks += std::size_t{kv_heads()} * job.split.chunks;
            work_.jobs.push_back(job);
        }
        std::size_t rows = 0, queries = 0, masks = 0;
        bool prefills = false;
        for (AttentionJob& job : work_.jobs) {
            const AttentionIO& io = job.sequence->io;
            set_ranges(job.split, plan_.shape(), io.n_cells, tasks, threads);
            const std::size_t chunks = std::size_t{kv_heads()} * job.split.chunks;
            job.first_task = tasks_;
            job.first_chunk = chunks_;
            job.first_row = rows;
            job.first_query = queries;
            job.first_turn = turns_;
            job.first_blank = masks;
            tasks_ += chunks * job.split.ranges;
            chunks_ += chunks;
            if (job.split.ranges > 1) chunks_to_join_ += chunks;
            rows += chunks * job.split.ranges * job.split.chunk_rows;
            queries += std::size_t{io.tokens} * io.heads;
            turns_ += ceil_div(std::size_t{io.tokens}, tokens_of_a_turn);
            if (job.split.decode) continue;
            prefills = true;
            masks += std::size_t{io.tokens} * ceil_div(io.n_cells, span_tokens);
        }
        const bool apart = plan_.values().rotation() != nullptr;
        const std::size_t out_floats = rows * head_dim();
        work_.out.reserve((apart ? 2 : 1) * out_floats * sizeof(float));
        out_ = reinterpret_cast<float*>(work_.out.data());
        packed_out_ = apart ? out_ + out_floats : out_;
        if (plan_.keys().rotation() != nullptr) work_.rotated_q.resize(queries * head_dim());
        work_.blank.assign(masks, 0);
        work_.max.resize(rows);
        work_.sum.resize(rows);
        if (prefills) work_.scratch.resize(threads);
        for (auto& scratch : work_.scratch) scratch.reserve(kernels::scratch_bytes());
    }

    // The last job that begins at `number` or before.
    const AttentionJob& job_of(std::size_t number, std::size_t AttentionJob::* first) const {
        if (work_.jobs.size() == 1) return work_.jobs.front();
        const auto after = std::upper_bound(
            work_.jobs.begin(), work_.jobs.end(), number,
            [&](std::size_t n, const AttentionJob& job) { return n < job.*first; });
        return *(after - 1);
    }

    void rotate() {
        const codec::Rotation* rotation = plan_.keys().rotation();
        if (rotation == nullptr) return;
        executor_.parallel_for(turns_, [&](std::size_t turn, unsigned) {
            const AttentionJob& job = job_of(turn, &AttentionJob::first_turn);
            const AttentionIO& io = job.sequence->io;
            const std::size_t first = (turn - job.first_turn) * tokens_of_a_turn;
            attention::rotate_queries(io, *rotation, first,
                                      std::min<std::size_t>(first + tokens_of_a_turn, io.tokens),
                                      work_.rotated_q.data() + job.first_query * head_dim());
        });
    }

    struct At {
        std::uint32_t token, head;
        bool exists;
    };
    At row_at(const AttentionJob& job, std::size_t chunk, std::uint32_t i) const {
        const std::uint32_t repeat = job.sequence->io.heads / kv_heads();
        const auto kv_head = static_cast<std::uint32_t>(chunk / job.split.chunks);
        const std::uint32_t row =
            static_cast<std::uint32_t>(chunk % job.split.chunks) * job.split.chunk_rows + i;
        return {row / repeat, kv_head * repeat + row % repeat, row < job.split.rows};
    }

    void attend(std::size_t number, unsigned thread) const {
        const AttentionJob& job = job_of(number, &AttentionJob::first_task);
        const AttentionSplit& split = job.split;
        const AttentionIO& io = job.sequence->io;
        const std::size_t item = number - job.first_task;
        const std::size_t chunk = item / split.ranges;
        const auto range = static_cast<std::uint32_t>(item % split.ranges);
        const std::size_t first_row = job.first_row + item * split.chunk_rows;
        const float* rotated =
            plan_.keys().rotation() != nullptr ? work_.rotated_q.data() : nullptr;
        kernels::Task task;
        attention::set_task(task, io, job.sequence->mask, params_);
        task.plan = &plan_;
        task.views = job.sequence->blocks.data();
        task.kv_head = static_cast<std::uint32_t>(chunk / split.chunks);
        task.first_cell = split.first_cell + range * split.range_cells;
        task.last_cell = std::min(task.first_cell + split.range_cells, io.n_cells);
        Row rows[prefill_max_rows];
        while (task.row_count < split.chunk_rows) {
            const At at = row_at(job, chunk, task.row_count);
            if (!at.exists) break;
            Row& row = rows[task.row_count++];
            row = attention::make_row(io, job.sequence->mask, params_.alibi_slopes, at.token,
                                      at.head);
            if (rotated != nullptr) {
                const std::size_t query =
                    job.first_query + std::size_t{at.token} * io.heads + at.head;
                row.packed_q = rotated + query * head_dim();
            }
            if (!split.decode)
                row.blank = work_.blank.data() + job.first_blank +
                            std::size_t{at.token} * ceil_div(io.n_cells, span_tokens);
        }
        task.rows = rows;
        task.out = out_ + first_row * head_dim();
        task.packed_out = packed_out_ + first_row * head_dim();
        task.max = work_.max.data() + first_row;
        task.sum = work_.sum.data() + first_row;
        if (split.decode) {
            plan_.kernels().decode(task);
        } else {
            task.scratch = work_.scratch[thread].data();
            plan_.kernels().prefill(task);
        }
        if (split.ranges > 1) return;
        for (std::uint32_t i = 0; i < task.row_count; ++i)
            finish_row(job, first_row + i, row_at(job, chunk, i));
    }

    void join_ranges(std::size_t number) const {
        const AttentionJob& job = job_of(number, &AttentionJob::first_chunk);
        if (job.split.ranges == 1) return;
        const std::size_t chunk = number - job.first_chunk;
        const std::size_t first_row =
            job.first_row + chunk * job.split.ranges * job.split.chunk_rows;
        for (std::uint32_t i = 0; i < job.split.chunk_rows; ++i) {
            const At at = row_at(job, chunk, i);
            if (!at.exists) break;
            finish_row(job, first_row + i, at);
        }
    }

    // Writes a row's result, from the first of its ranges on.
    void finish_row(const AttentionJob& job, std::size_t first_row, At at) const {
        const AttentionIO& io = job.sequence->io;
        const std::size_t stride = job.split.chunk_rows;
        const float* sink_logit =
            params_.sink_logits != nullptr ? params_.sink_logits + at.head : nullptr;
        const auto join_into = [&](const float* from, float* result) {
            return attention::join(work_.max.data() + first_row, work_.sum.data() + first_row,
                                   stride, from + first_row * head_dim(), stride * head_dim(),
                                   job.split.ranges, plan_.shape().out_dim(), sink_logit, result);
        };
        float* result = io.out + at.token * io.out_token_stride + at.head * io.out_head_stride;
        const float lse = join_into(out_, result);
        if (io.lse != nullptr) io.lse[std::size_t{at.token} * io.heads + at.head] = lse;
        const codec::Rotation* rotation = plan_.values().rotation();
        if (rotation == nullptr) return;
        float packed[kernels::max_head_dim];
        join_into(packed_out_, packed);
        rotation->apply_inverse(packed);
        for (std::uint32_t c = 0; c < head_dim(); ++c) result[c] += packed[c];
    }
};

}  // namespace

float attention::join(const float* max, const float* sum, std::size_t stride, const float* out,
                      std::size_t out_stride, std::uint32_t parts, std::uint32_t channels,
                      const float* sink_logit, float* result) noexcept {
    float top = sink_logit != nullptr ? *sink_logit : -INFINITY;
    for (std::uint32_t i = 0; i < parts; ++i) top = std::max(top, max[i * stride]);
    std::fill_n(result, channels, 0.0f);
    if (top == -INFINITY) return top;
    float total = sink_logit != nullptr ? std::exp(*sink_logit - top) : 0.0f;
    for (std::uint32_t i = 0; i < parts; ++i) {
        const float weight = std::exp(max[i * stride] - top);
        if (weight == 0.0f) continue;
        total += (sum != nullptr ? sum[i * stride] : 1.0f) * weight;
        const float* part = out + i * out_stride;
        for (std::uint32_t c = 0; c < channels; ++c) result[c] += part[c] * weight;
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    for (std::uint32_t c = 0; c < channels; ++c) result[c] *= inverse;
    return top + std::log(total);
}

void attention::run(const Plan& plan, std::span<const SequenceAttention> sequences,
                    const AttentionParams& params, AttentionWorkspace& workspace,
                    Executor& executor) {
    Call(plan, sequences, params, workspace.impl(), executor).run();
}

}  // namespace lowkv
