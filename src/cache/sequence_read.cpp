// Reading a sequence's rows.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cache/block.h"
#include "cache/exact_block.h"
#include "lowkv/cache.h"
#include "lowkv/error.h"

namespace lowkv {

void Sequence::read_row(Part part, std::uint32_t cell, float* row) const {
    cache::ExactShape shape = cache::exact_shape(*plan_);
    const std::uint32_t token = cell % shape.block_tokens;
    const cache::Block* block = cell < size_ ? blocks_[cell / shape.block_tokens] : nullptr;
    if (block == nullptr || !(part == Part::keys ? block->keys : block->values)[token]) {
        std::fill_n(row, shape.channels(), 0.0f);
        return;
    }
    std::vector<std::byte> decoded;
    const std::byte* exact = block->data;
    std::size_t part_bytes = plan_->exact_part_bytes();
    if (block->packed) {
        decoded.resize(plan_->f16_bytes());
        decode_block(*plan_, block->data, decoded.data());
        exact = decoded.data();
        part_bytes = plan_->f16_part_bytes();
        shape.type = RowType::f16;
    }
    std::vector<std::byte> its(shape.channels() * shape.bytes());
    const RowsOut out{its.data(), shape.head_dim, shape.channels()};
    if (part == Part::keys) {
        cache::load_keys(exact, shape, token, 1, out);
    } else {
        cache::load_values(exact + part_bytes, shape, token, 1, out);
    }
    cache::convert(plan_->kernels(), shape.type, its.data(), RowType::f32,
                   reinterpret_cast<std::byte*>(row), shape.channels());
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
    const cache::ExactShape shape = cache::exact_shape(plan);
    const std::uint32_t tokens = shape.block_tokens;
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

    const std::size_t scratch_bytes = plan.exact_bytes() + plan.f16_bytes();
    std::vector<std::byte> scratch(any_packed ? executor.threads() * scratch_bytes : 0);
    const std::uint32_t first_block = first / tokens;
    const std::size_t blocks = (end + tokens - 1) / tokens - first_block;
    executor.parallel_for(readings.size() * blocks, [&](std::size_t item, unsigned thread) {
        const Reading& reading = readings[item / blocks];
        const auto b = static_cast<std::uint32_t>(first_block + item % blocks);
        const std::uint32_t from = std::max(first, b * tokens);
        const auto n = static_cast<std::uint32_t>(
            std::min<std::uint64_t>(end, (std::uint64_t{b} + 1) * tokens) - from);
        const auto at = [&](RowsOut rows) {
            rows.data = static_cast<std::byte*>(rows.data) +
                        std::size_t{from - first} * rows.token_stride * shape.bytes();
            return rows;
        };
        const RowsOut keys = at(reading.keys), values = at(reading.values);
        const cache::Block* block = reading.sequence->blocks_[b];
        if (block == nullptr) {
            for (const RowsOut& rows : {keys, values}) {
                for (std::uint32_t t = 0; t < n; ++t) {
                    for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
                        std::memset(
                            static_cast<std::byte*>(rows.data) +
                                (t * rows.token_stride + head * rows.head_stride) * shape.bytes(),
                            0, shape.head_dim * shape.bytes());
                    }
                }
            }
            return;
        }
        const std::byte* exact = block->data;
        if (block->packed) {
            std::byte* own = scratch.data() + thread * scratch_bytes;
            cache::decode_exact(plan, block->data, own + plan.exact_bytes(), own);
            exact = own;
        }
        cache::load_keys(cache::exact_keys(exact), shape, from % tokens, n, keys);
        cache::load_values(cache::exact_values(plan, exact), shape, from % tokens, n, values);
    });
}

std::int32_t Sequence::position(std::uint32_t cell) const noexcept {
    const std::uint32_t tokens = plan_->block_tokens();
    const cache::Block* block = cell < size_ ? blocks_[cell / tokens] : nullptr;
    if (block == nullptr || !plan_->has_positions()) return static_cast<std::int32_t>(cell);
    const std::byte* positions = block->data + (block->packed ? plan_->keys().positions_offset()
                                                              : plan_->exact_positions_offset());
    std::int32_t position = 0;
    std::memcpy(&position, positions + std::size_t{4} * (cell % tokens), sizeof position);
    return position;
}

}  // namespace lowkv
