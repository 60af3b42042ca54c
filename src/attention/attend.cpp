// What every attention has: its arguments are checked, and a device runs it.

#include "attention/query.h"
#include "attention/workspace.h"
#include "lowkv/attention.h"
#include "lowkv/batch.h"
#include "lowkv/device.h"
#include "lowkv/error.h"
#include "round.h"

namespace lowkv {
namespace {

std::size_t blocks_of(const Plan& plan, std::uint32_t cells) {
    return ceil_div(std::size_t{cells}, std::size_t{plan.block_tokens()});
}

std::span<const BlockView> views_of(const Sequence& sequence, std::uint32_t cells,
                                    AttentionWorkspace& workspace) {
    std::vector<BlockView>& views = workspace.impl().views;
    views.resize(blocks_of(sequence.plan(), cells));
    sequence.views(views);
    return views;
}

}  // namespace

AttentionWorkspace::AttentionWorkspace() : impl_(std::make_unique<Impl>()) {}
AttentionWorkspace::~AttentionWorkspace() = default;
AttentionWorkspace::AttentionWorkspace(AttentionWorkspace&&) noexcept = default;
AttentionWorkspace& AttentionWorkspace::operator=(AttentionWorkspace&&) noexcept = default;

void attend(const Sequence& sequence, const AttentionIO& io, const AttentionParams& params,
            AttentionWorkspace& workspace, Executor& executor) {
    const SequenceAttention one{views_of(sequence, io.n_cells, workspace), io, params.mask};
    attend(sequence.device(), sequence.plan(), std::span(&one, 1), params, workspace, executor);
}

void attend(const Device& device, const Plan& plan, std::span<const SequenceAttention> sequences,
            const AttentionParams& params, AttentionWorkspace& workspace, Executor& executor) {
    for (const SequenceAttention& sequence : sequences) {
        const AttentionIO& io = sequence.io;
        attention::check_arguments(plan.shape(), io, sequence.mask, params);
        if (sequence.blocks.size() < blocks_of(plan, io.n_cells))
            attention::refuse(sequence.blocks.size(), " blocks of ", plan.block_tokens(),
                              " do not cover ", io.n_cells, " cells");
    }
    device.attend(plan, sequences, params, workspace, executor);
    device.finish();
}

void attention_mass(const Sequence& sequence, const AttentionIO& io, const AttentionParams& params,
                    std::uint32_t first_cell, std::span<float> mass, AttentionWorkspace& workspace,
                    Executor& executor) {
    attention::check_arguments(sequence.plan().shape(), io, params.mask, params);
    if (io.lse == nullptr) {
        throw Error(ErrorCode::invalid_argument,
                    "attention_mass: io.lse is null; pass what attend() wrote there");
    }
    if (mass.size() > io.n_cells || first_cell > io.n_cells - mass.size()) {
        throw Error(ErrorCode::invalid_argument, "attention_mass: cells ", first_cell, " to ",
                    first_cell + mass.size(), " are not among the ", io.n_cells, " attended to");
    }
    if (io.tokens == 0 || mass.empty()) return;
    const SequenceAttention one{views_of(sequence, io.n_cells, workspace), io, params.mask};
    sequence.device().attention_mass(sequence.plan(), one, params, first_cell, mass, workspace,
                                     executor);
    sequence.device().finish();
}

}  // namespace lowkv
