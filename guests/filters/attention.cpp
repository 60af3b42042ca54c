// Attention over a filtered sequence. What is masked by position becomes a mask by cell.

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/query.h"
#include "codec/small_floats.h"
#include "lowkv/attention.h"
#include "lowkv/filter.h"

namespace lowkv {
namespace {

void check_filtered(const FilteredSequence& sequence, const AttentionIO& io,
                    const AttentionParams& params) {
    attention::check_arguments(sequence.cells().plan().shape(), io, params.mask, params);
    if (io.n_cells != sequence.size()) {
        attention::refuse("a filtered sequence is attended to as a whole: n_cells is ", io.n_cells,
                          ", legal: its size, ", sequence.size());
    }
    if (params.mask.head_stride != 0) {
        attention::refuse(
            "a filtered sequence takes one mask for all heads; legal: a head_stride of 0");
    }
    if (params.mask.window != 0 || io.first_cell != 0) {
        attention::refuse(
            "a filtered sequence is attended to as a whole; legal: a window and a first_cell of 0, "
            "and an additive mask for what is hidden");
    }
    if (params.mask.kind == Mask::Kind::causal) attention::check_slopes(io, params);
}

// What is added to the scores of the query token at `own_position`, by cell.
void gather_row(const FilteredSequence& sequence, const AttentionIO& io,
                const AttentionParams& params, std::uint32_t token, std::span<float> row) {
    const std::uint32_t own_position = io.n_cells - io.tokens + token;
    const std::size_t first = token * params.mask.row_stride;
    for (std::uint32_t cell = 0; cell < row.size(); ++cell) {
        const std::uint32_t position = sequence.position(cell);
        switch (params.mask.kind) {
            case Mask::Kind::none: row[cell] = 0.0f; break;
            case Mask::Kind::causal: {
                const float distance =
                    static_cast<float>(own_position) - static_cast<float>(position);
                const float added = params.alibi_slopes != nullptr ? -distance : 0.0f;
                row[cell] = position <= own_position ? added : -INFINITY;
                break;
            }
            case Mask::Kind::additive_f16:
                row[cell] = codec::f16_to_f32(
                    static_cast<const std::uint16_t*>(params.mask.data)[first + position]);
                break;
            case Mask::Kind::additive_f32:
                row[cell] = static_cast<const float*>(params.mask.data)[first + position];
                break;
        }
    }
}

// Calls run(io, params) with cells in place of positions: once, or for some query tokens after the
// others, so that their masks stay small.
template <class Run>
void by_cells(const FilteredSequence& sequence, const AttentionIO& io,
              const AttentionParams& params, Run run) {
    check_filtered(sequence, io, params);
    const std::uint32_t n_cells = sequence.cells().size();
    AttentionIO by_cell = io;
    by_cell.n_cells = n_cells;
    // The undecided cells lie in the order of their positions, after all others.
    const bool in_order = params.mask.kind == Mask::Kind::causal &&
                          params.alibi_slopes == nullptr && io.tokens <= sequence.undecided();
    if (params.mask.kind == Mask::Kind::none || in_order || io.tokens == 0) {
        return run(by_cell, params);
    }
    constexpr std::uint32_t mask_floats = 1u << 20;
    const std::uint32_t chunk =
        std::clamp(mask_floats / std::max(n_cells, 1u), 1u, std::uint32_t{io.tokens});
    std::vector<float> mask(std::size_t{chunk} * n_cells);
    AttentionParams masked = params;
    masked.mask = {Mask::Kind::additive_f32, mask.data(), n_cells};
    for (std::uint32_t first = 0; first < io.tokens; first += chunk) {
        by_cell.tokens = std::min(chunk, io.tokens - first);
        by_cell.q = io.q + first * io.q_token_stride;
        by_cell.out = io.out + first * io.out_token_stride;
        if (io.lse != nullptr) {
            by_cell.lse = io.lse + std::size_t{first} * io.heads;
        }
        for (std::uint32_t i = 0; i < by_cell.tokens; ++i) {
            gather_row(sequence, io, params, first + i,
                       std::span(mask).subspan(std::size_t{i} * n_cells, n_cells));
        }
        run(by_cell, masked);
    }
}

}  // namespace

void attend(const FilteredSequence& sequence, const AttentionIO& io, const AttentionParams& params,
            AttentionWorkspace& workspace, Executor& executor) {
    by_cells(sequence, io, params, [&](const AttentionIO& cells_io, const AttentionParams& masked) {
        attend(sequence.cells(), cells_io, masked, workspace, executor);
    });
}

void add_attention_mass(FilteredSequence& sequence, const AttentionIO& io,
                        const AttentionParams& params, AttentionWorkspace& workspace,
                        Executor& executor) {
    std::vector<float> mass(sequence.undecided());
    const std::uint32_t first_cell = sequence.cells().size() - sequence.undecided();
    by_cells(sequence, io, params, [&](const AttentionIO& cells_io, const AttentionParams& masked) {
        attention_mass(sequence.cells(), cells_io, masked, first_cell, mass, workspace, executor);
    });
    sequence.add_mass(mass, io.tokens);
}

}  // namespace lowkv
