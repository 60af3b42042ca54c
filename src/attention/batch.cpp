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

Mask mask_of(const BatchAttention& attention, std::size_t sequence, std::uint32_t first_token) {
    Mask mask;
    if (attention.mask != nullptr) {
        mask.kind = Mask::Kind::additive_f32;
        mask.data = attention.mask + sequence * attention.mask_strides.sequence +
                    (first_token - attention.first_token);
        mask.row_stride = attention.mask_strides.token;
        mask.head_stride = attention.mask_strides.head;
    } else if (attention.causal) {
        mask.kind = Mask::Kind::causal;
    }
    mask.window = attention.window;
    return mask;
}

}  // namespace

void Batch::attend(const BatchAttention& attention, AttentionWorkspace& workspace,
                   Executor& executor) const {
    if (attention.first_token > tokens())
        attention::refuse("the first token, " + std::to_string(attention.first_token) +
                          ", is past the " + std::to_string(tokens()) + " there are");
    const std::uint32_t first_token = std::max(attention.first_token, first());
    const std::uint32_t block_tokens = plan().block_tokens();
    AttentionIO io;
    io.q_token_stride = attention.q_strides.token;
    io.q_head_stride = attention.q_strides.head;
    io.out_token_stride = attention.out_strides.token;
    io.out_head_stride = attention.out_strides.head;
    io.tokens = attention.queries;
    io.heads = attention.heads;
    io.n_cells = tokens();
    io.first_cell = first_token;
    AttentionParams params;
    params.scale = attention.scale;
    params.softcap = attention.softcap;
    params.sink_logits = attention.sink_logits;

    AttentionWorkspace::Impl& work = workspace.impl();
    const std::size_t blocks = ceil_div(std::size_t{io.n_cells}, std::size_t{block_tokens});
    std::uint32_t first_seen = io.first_cell;
    if (attention.window != 0 && io.n_cells - first_seen > io.tokens + attention.window)
        first_seen = io.n_cells - io.tokens - attention.window;
    const std::uint32_t first_block =
        first_seen / kernels::span_tokens * kernels::span_tokens / block_tokens;
    work.views.resize(size() * blocks);
    work.sequences.resize(size());
    for (std::size_t s = 0; s < size(); ++s) {
        const auto views = std::span(work.views).subspan(s * blocks, blocks);
        sequences_[s].views(views.subspan(std::min<std::size_t>(first_block, blocks)), first_block);
        io.q = attention.q == nullptr ? nullptr : attention.q + s * attention.q_strides.sequence;
        io.out =
            attention.out == nullptr ? nullptr : attention.out + s * attention.out_strides.sequence;
        if (attention.lse != nullptr)
            io.lse = attention.lse + s * attention.queries * attention.heads;
        work.sequences[s] = {views, io, mask_of(attention, s, first_token)};
    }
    lowkv::attend(sequences_.front().device(), plan(), work.sequences, params, workspace, executor);
}

}  // namespace lowkv
