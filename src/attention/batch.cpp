// Attention of a batch: all of its sequences in one call.

#include "lowkv/batch.h"

#include <algorithm>
#include <string>
#include <vector>

#include "attention/query.h"
#include "attention/workspace.h"
#include "isa/table.h"
#include "round.h"

namespace lowkv {
namespace {

// `count` elements behind where the mask begins.
Mask moved(Mask mask, std::size_t count) {
    if (kernels::is_additive(mask.kind) && mask.data != nullptr)
        mask.data =
            static_cast<const std::byte*>(mask.data) +
            count * (mask.kind == Mask::Kind::additive_f32 ? sizeof(float) : sizeof(std::uint16_t));
    return mask;
}

}  // namespace

void Batch::attend(const BatchAttention& attention, AttentionWorkspace& workspace,
                   Executor& executor) const {
    AttentionIO io = attention.io;
    const std::uint32_t asked = io.first_cell;
    if (asked > tokens())
        attention::refuse("the first token, " + std::to_string(asked) + ", is past the " +
                          std::to_string(tokens()) + " there are");
    io.first_cell = std::max(asked, first());
    io.n_cells = tokens();
    const Mask mask = moved(attention.params.mask, io.first_cell - asked);
    const std::uint32_t block_tokens = plan().block_tokens();

    AttentionWorkspace::Impl& work = workspace.impl();
    const std::size_t blocks = ceil_div(std::size_t{io.n_cells}, std::size_t{block_tokens});
    std::uint32_t first_seen = io.first_cell;
    const std::uint64_t in_windows = std::uint64_t{io.tokens} + mask.window;
    if (mask.window != 0 && io.n_cells - first_seen > in_windows)
        first_seen = io.n_cells - static_cast<std::uint32_t>(in_windows);
    const std::uint32_t first_block =
        first_seen / kernels::span_tokens * kernels::span_tokens / block_tokens;
    work.views.resize(size() * blocks);
    work.sequences.resize(size());
    for (std::size_t s = 0; s < size(); ++s) {
        const auto views = std::span(work.views).subspan(s * blocks, blocks);
        sequences_[s].views(views.subspan(std::min<std::size_t>(first_block, blocks)), first_block);
        work.sequences[s] = {views, io, moved(mask, s * attention.mask_sequence_stride)};
        if (io.q != nullptr) io.q += attention.q_sequence_stride;
        if (io.out != nullptr) io.out += attention.out_sequence_stride;
        if (io.lse != nullptr) io.lse += std::size_t{io.tokens} * io.heads;
    }
    // Sequences that have the same plans at the same places go together.
    std::vector<Run> next = this->runs(sequences_.front());
    for (std::size_t s = 0; s < size();) {
        const std::vector<Run> runs = std::move(next);
        const std::size_t begin = s++;
        while (s < size() && (next = this->runs(sequences_[s])) == runs) ++s;
        const std::span<const SequenceAttention> alike(&work.sequences[begin], s - begin);
        if (runs.size() > 1)
            attend_runs(runs, alike, attention.params, workspace, executor);
        else
            lowkv::attend(device(), runs.empty() ? plan() : *runs.front().plan, alike,
                          attention.params, workspace, executor);
    }
}

// The tokens of each plan apart, their softmaxes joined.
void Batch::attend_runs(std::span<const Run> runs, std::span<const SequenceAttention> sequences,
                        AttentionParams params, AttentionWorkspace& workspace,
                        Executor& executor) const {
    const AttentionIO& io = sequences.front().io;
    const Mask& mask = sequences.front().mask;
    const bool causal = mask.kind == Mask::Kind::causal;
    if (causal && (mask.window != 0 || params.alibi_slopes != nullptr ||
                   io.tokens > runs.back().end - runs.back().first))
        attention::refuse(
            "a causal mask with a window or ALiBi, or queries of packed tokens, in a batch with "
            "finer plans; give an additive mask");
    const std::uint32_t channels = plan().shape().out_dim();
    const std::size_t rows = std::size_t{io.tokens} * io.heads;
    std::vector<float> lse(sequences.size() * rows), other_lse(lse.size()), other;
    std::vector<SequenceAttention> parts;
    bool joins = false;
    for (const Run& run : runs) {
        if (run.end <= io.first_cell && &run != &runs.back()) continue;
        const std::uint32_t begin = std::max(run.first, io.first_cell);
        const std::uint32_t block_tokens = plan().block_tokens();
        other.resize(joins ? lse.size() * channels : 0);
        parts.assign(sequences.begin(), sequences.end());
        for (std::size_t s = 0; s < parts.size(); ++s) {
            SequenceAttention& part = parts[s];
            part.blocks =
                part.blocks.subspan(run.first / block_tokens,
                                    ceil_div(run.end, block_tokens) - run.first / block_tokens);
            part.mask = moved(part.mask, begin - io.first_cell);
            if (causal && &run != &runs.back()) part.mask = {};  // older than any query
            part.io.first_cell = begin - run.first;
            part.io.n_cells = run.end - run.first;
            part.io.lse = (joins ? other_lse : lse).data() + s * rows;
            if (!joins) continue;
            part.io.out = other.data() + s * rows * channels;
            part.io.out_token_stride = std::size_t{io.heads} * channels;
            part.io.out_head_stride = channels;
        }
        lowkv::attend(device(), *run.plan, parts, params, workspace, executor);
        if (joins) {
            executor.parallel_for(lse.size(), [&](std::size_t i, unsigned) {
                const AttentionIO& to = sequences[i / rows].io;
                const std::size_t token = i % rows / io.heads, head = i % io.heads;
                float* out = to.out + token * to.out_token_stride + head * to.out_head_stride;
                lse[i] = attention::join(out, lse[i], other.data() + i * channels, other_lse[i],
                                         channels);
            });
        }
        joins = true;
        params.sink_logits = nullptr;  // they are in the first softmax
    }
    if (io.lse != nullptr) std::ranges::copy(lse, io.lse);
}

}  // namespace lowkv
