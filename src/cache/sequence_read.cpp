// Reading a sequence's rows.

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "cache/block.h"
#include "cache/store.h"
#include "cpu/host_rows.h"
#include "lowkv/cache.h"
#include "lowkv/error.h"
#include "round.h"

namespace lowkv {
namespace {

constexpr std::size_t blocks_at_a_time = 32;

// Of a head's key or value.
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
    const Reading one{this, keys, values};
    read(std::span(&one, 1), first, count, executor);
}

void Sequence::read(std::span<const Reading> readings, std::uint32_t first, std::uint32_t count,
                    Executor& executor) {
    const Plan& plan = *readings.front().sequence->plan_;
    const std::size_t bytes = cache::bytes_of(plan.rows());
    const std::uint32_t tokens = plan.block_tokens();
    const std::uint64_t end = std::uint64_t{first} + count;
    bool any_packed = false;
    for (const Reading& reading : readings) {
        const Sequence& sequence = *reading.sequence;
        if (end > sequence.size_) {
            throw Error(ErrorCode::invalid_argument,
                        "cells " + std::to_string(first) + " to " + std::to_string(end) +
                            " are not among the " + std::to_string(sequence.size_) + " there are");
        }
        for (std::uint32_t b = first / tokens; std::uint64_t{b} * tokens < end; ++b)
            any_packed = any_packed || sequence.packed(b);
    }
    if (count == 0) return;

    Store::Impl& store = readings.front().sequence->store_->impl();
    const std::uint32_t first_block = first / tokens;
    const std::size_t blocks = ceil_div<std::uint64_t>(end, tokens) - first_block;
    const std::size_t items = readings.size() * blocks;
    cache::Decoding decoded;
    const std::size_t most = any_packed ? blocks_at_a_time : items;
    for (std::size_t done = 0; done < items; done += most) {
        const std::size_t turn = std::min(most, items - done);
        const auto block_of = [&](std::size_t item) {
            return readings[item / blocks].sequence->blocks_[first_block + item % blocks];
        };
        const cache::Slots scratch(store, cache::Slots::As::scratch, plan.host().exact_bytes(),
                                   any_packed ? turn : 0);
        decoded.clear();
        for (std::size_t i = 0; i < turn; ++i) {
            const cache::Block* block = block_of(done + i);
            if (block != nullptr && block->packed)
                decoded[&block->plan(plan).host()].push_back({block->data, scratch[i]});
        }
        cache::decode(store.device, decoded, executor);
        executor.parallel_for(turn, [&](std::size_t i, unsigned) noexcept {
            const Reading& reading = readings[(done + i) / blocks];
            const auto b = static_cast<std::uint32_t>(first_block + (done + i) % blocks);
            const std::uint32_t from = std::max(first, b * tokens);
            const auto n = static_cast<std::uint32_t>(
                std::min<std::uint64_t>(end, (std::uint64_t{b} + 1) * tokens) - from);
            const cache::Block* block = block_of(done + i);
            for (const Part part : {Part::keys, Part::values}) {
                RowsOut rows = part == Part::keys ? reading.keys : reading.values;
                if (rows.data == nullptr) continue;
                rows.data = static_cast<std::byte*>(rows.data) +
                            std::size_t{from - first} * rows.token_stride * bytes;
                if (block == nullptr) {
                    clear(plan.shape(), part, rows, n, bytes);
                } else {
                    store.device.read_rows(block->packed ? plan.host() : plan, part,
                                           block->packed ? scratch[i] : block->data, from % tokens,
                                           n, rows);
                }
            }
        });
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
