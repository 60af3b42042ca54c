// Reading a sequence's rows.

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "cache/block.h"
#include "cache/store.h"
#include "cpu/host_rows.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "round.h"

namespace lowkv {
namespace {

// That are decoded at a time, which bounds the scratch memory.
constexpr std::size_t most_tokens = 4096;

// The channels of a head's key or value.
std::size_t channels_of(const Shape& shape, Part part) noexcept {
    return part == Part::keys ? shape.head_dim : shape.out_dim();
}

void clear(const Shape& shape, Part part, const RowsOut& rows, std::uint32_t count,
           std::size_t bytes) noexcept {
    const std::size_t head_bytes = channels_of(shape, part) * bytes;
    for (std::size_t t = 0; t < count; ++t) {
        for (std::size_t head = 0; head < shape.kv_heads; ++head) {
            const std::size_t at = t * rows.token_stride + head * rows.head_stride;
            std::memset(static_cast<std::byte*>(rows.data) + at * bytes, 0, head_bytes);
        }
    }
}

}  // namespace

void Sequence::read_row(Part part, std::uint32_t cell, float* row) const {
    const std::size_t head_dim = channels_of(plan_->shape(), part);
    const std::size_t channels = plan_->shape().kv_heads * head_dim;
    const std::uint32_t tokens = plan_->block_tokens();
    const cache::Block* block = cell < size_ ? blocks_[cell / tokens] : nullptr;
    if (block == nullptr || !(part == Part::keys ? block->keys : block->values)[cell % tokens]) {
        std::fill_n(row, channels, 0.0f);
        return;
    }
    std::vector<std::byte> held(channels * cache::bytes_of(plan_->rows()));
    const RowsOut out{held.data(), head_dim, channels};
    read(cell, 1, part == Part::keys ? out : RowsOut{}, part == Part::values ? out : RowsOut{});
    cache::convert(plan_->kernels(), plan_->rows(), held.data(), RowType::f32,
                   reinterpret_cast<std::byte*>(row), channels);
}

void Sequence::read_key(std::uint32_t cell, float* row) const { read_row(Part::keys, cell, row); }

void Sequence::read_value(std::uint32_t cell, float* row) const {
    read_row(Part::values, cell, row);
}

void Sequence::read(std::uint32_t first, std::uint32_t count, const RowsOut& keys,
                    const RowsOut& values, Executor& executor) const {
    const auto of_batch = [](const RowsOut& rows) {
        return BatchRowsOut{rows.data, {0, rows.head_stride, rows.token_stride}};
    };
    read(std::span(this, 1), first, count, of_batch(keys), of_batch(values), executor);
}

void Sequence::read(std::span<const Sequence> sequences, std::uint32_t first, std::uint32_t count,
                    const BatchRowsOut& keys, const BatchRowsOut& values, Executor& executor) {
    const Plan& plan = *sequences.front().plan_;
    const std::uint32_t tokens = plan.block_tokens();
    const std::uint64_t end = std::uint64_t{first} + count;
    for (const Sequence& sequence : sequences) {
        if (end > sequence.size_) {
            throw Error(ErrorCode::invalid_argument,
                        "cells " + std::to_string(first) + " to " + std::to_string(end) +
                            " are not among the " + std::to_string(sequence.size_) + " there are");
        }
    }
    if (count == 0) return;

    struct Piece {
        const cache::Block* block;
        const std::byte* exact;
        std::size_t sequence;
        std::uint32_t cell, count;
    };
    std::vector<Piece> absent, exact, packed;
    for (std::size_t s = 0; s < sequences.size(); ++s) {
        for (std::uint32_t cell = first, n = 0; cell < end; cell += n) {
            n = sequences[s].run_in_block(cell, static_cast<std::uint32_t>(end - cell));
            const cache::Block* block = sequences[s].blocks_[cell / tokens];
            (block == nullptr ? absent
             : block->packed  ? packed
                              : exact)
                .push_back({block, block == nullptr ? nullptr : block->data, s, cell, n});
        }
    }
    Store::Impl& store = sequences.front().store_->impl();
    std::vector<BlockRows<const std::byte>> runs;
    const auto give = [&](const Plan& stored, std::span<const Piece> pieces) {
        for (const Part part : {Part::keys, Part::values}) {
            const BatchRowsOut& all = part == Part::keys ? keys : values;
            if (all.data == nullptr || pieces.empty()) continue;
            const RowsOut rows{all.data, all.strides.head, all.strides.token};
            runs.clear();
            for (const Piece& piece : pieces)
                runs.push_back({piece.exact, piece.cell % tokens, piece.count,
                                piece.sequence * all.strides.sequence +
                                    (piece.cell - first) * all.strides.token});
            if (pieces.front().exact != nullptr) {
                store.device.read_rows(stored, part, runs, rows, executor);
                continue;
            }
            executor.parallel_for(runs.size(), [&](std::size_t i, unsigned) noexcept {
                clear(plan.shape(), part, cache::rows_at(rows, plan.rows(), runs[i].at),
                      runs[i].count, cache::bytes_of(plan.rows()));
            });
        }
    };
    give(plan, absent);
    give(plan, exact);
    const std::size_t most = most_tokens / tokens;
    const cache::Slots scratch(store, cache::Slots::As::scratch, plan.exact_bytes(),
                               std::min(packed.size(), most));
    cache::Decoding decoded;
    for (std::size_t done = 0; done < packed.size(); done += most) {
        const auto turn = std::span(packed).subspan(done, std::min(packed.size() - done, most));
        decoded.clear();
        for (std::size_t i = 0; i < turn.size(); ++i) {
            turn[i].exact = scratch[i];
            decoded[&turn[i].block->plan(plan)].push_back({turn[i].block->data, scratch[i]});
        }
        cache::decode(store.device, decoded, executor);
        give(plan, turn);
    }
    store.device.finish();
}

std::int32_t Sequence::position(std::uint32_t cell) const noexcept {
    const std::uint32_t tokens = plan_->block_tokens();
    const cache::Block* block = cell < size_ ? blocks_[cell / tokens] : nullptr;
    if (block == nullptr || !plan_->has_positions()) return static_cast<std::int32_t>(cell);
    const std::size_t offset = block->packed ? block->plan(*plan_).keys().positions_offset()
                                             : plan_->exact_positions_offset();
    std::int32_t position = 0;
    device().copy_out(&position, block->data + offset + sizeof position * (cell % tokens),
                      sizeof position);
    return position;
}

}  // namespace lowkv
