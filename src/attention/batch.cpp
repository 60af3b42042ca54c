// Attention of a batch: all of its sequences in one call.

#include "lowkv/batch.h"

#include <algorithm>

#include "attention/query.h"
#include "attention/workspace.h"
#include "isa/table.h"
#include "round.h"

namespace lowkv {

void Batch::attend(const BatchAttention& attention, AttentionWorkspace& workspace,
                   Executor& executor) const {
    AttentionIO io = attention.io;
    const std::uint32_t asked = io.first_cell;
    if (asked > tokens())
        attention::refuse("the first token, ", asked, ", is past the ", tokens(), " there are");
    io.first_cell = std::max(asked, first());
    io.n_cells = tokens();
    const Mask mask = attention::cut(attention.params.mask, io.first_cell - asked);
    const std::uint32_t block_tokens = plan().block_tokens();

    AttentionWorkspace::Impl& work = workspace.impl();
    const std::size_t blocks = ceil_div(std::size_t{io.n_cells}, std::size_t{block_tokens});
    std::uint32_t first_seen = io.first_cell;
    const std::uint64_t in_windows = std::uint64_t{io.tokens} + mask.window;
    if (mask.window != 0 && io.n_cells - first_seen > in_windows)
        first_seen = io.n_cells - static_cast<std::uint32_t>(in_windows);
    // Kernels look at whole spans, which in pieces begin anywhere.
    const std::uint32_t first_block =
        last_rung() == 1 ? first_seen / kernels::span_tokens * kernels::span_tokens / block_tokens
                         : 0;
    work.views.resize(size() * blocks);
    std::vector<PiecewiseAttention>& sequences = work.in_pieces.sequences;
    sequences.resize(size());
    std::vector<AttentionPiece>& pieces = work.in_pieces.pieces;
    pieces.clear();
    pieces.reserve(size() * (last_rung() == 1 ? 1 : std::max<std::size_t>(blocks, 1)));
    for (std::size_t s = 0; s < size(); ++s) {
        const auto views = std::span(work.views).subspan(s * blocks, blocks);
        sequences_[s].views(views.subspan(std::min<std::size_t>(first_block, blocks)), first_block);
        const std::size_t piece = pieces.size();
        add_pieces(sequences_[s], views, pieces);
        sequences[s] = {std::span(pieces).subspan(piece), io,
                        attention::cut(mask, s * attention.mask_sequence_stride)};
        if (io.q != nullptr) io.q += attention.q_sequence_stride;
        if (io.out != nullptr) io.out += attention.out_sequence_stride;
        if (io.lse != nullptr) io.lse += std::size_t{io.tokens} * io.heads;
    }
    lowkv::attend(device(), sequences, attention.params, workspace, executor);
}

}  // namespace lowkv
