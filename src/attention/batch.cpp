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
    if (mask.window != 0 && io.n_cells - first_seen > io.tokens + mask.window)
        first_seen = io.n_cells - io.tokens - mask.window;
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
    lowkv::attend(sequences_.front().device(), plan(), work.sequences, attention.params, workspace,
                  executor);
}

}  // namespace lowkv
