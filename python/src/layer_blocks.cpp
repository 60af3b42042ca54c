#include "layer_blocks.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "check.h"

namespace lowkv::python {
namespace {

constexpr std::size_t alignment = 64;  // of a packed block, see attention.h

// No f16 has all exponent bits set.
bool is_finite(const std::byte* halves, std::size_t bytes) {
    constexpr unsigned exponent = 0x7c00;
    unsigned bad = 0;
    for (std::size_t i = 0; i < bytes; i += sizeof(std::uint16_t)) {
        std::uint16_t bits;
        std::memcpy(&bits, halves + i, sizeof bits);
        bad |= (bits & exponent) == exponent ? 1u : 0u;
    }
    return bad == 0;
}

}  // namespace

PackedBlock::PackedBlock(std::size_t bytes, std::shared_ptr<BlockMemory> memory)
    : memory_(std::move(memory)),
      bytes_(bytes),
      data_(static_cast<std::byte*>(
          std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment))) {
    if (data_ == nullptr) throw std::bad_alloc();
    memory_->bytes += bytes_;
    ++memory_->blocks;
}

PackedBlock::~PackedBlock() {
    memory_->bytes -= bytes_;
    --memory_->blocks;
    std::free(data_);
}

LayerBlocks::LayerBlocks(std::shared_ptr<const Plan> plan, std::size_t batch,
                         std::shared_ptr<BlockMemory> memory)
    : plan_(std::move(plan)), memory_(std::move(memory)), rows_(batch) {
    check(batch > 0, "a layer needs at least 1 row, not 0");
}

LayerBlocks::Fresh LayerBlocks::make_blocks(std::size_t count) const {
    Fresh fresh(batch() * count);
    for (auto& block : fresh) block = std::make_shared<PackedBlock>(plan_->packed_bytes(), memory_);
    return fresh;
}

void LayerBlocks::append(Fresh fresh, std::size_t count) {
    for (std::size_t i = 0; i < fresh.size(); ++i) {
        rows_[i / count].push_back(std::move(fresh[i]));
    }
}

const PackedBlock& LayerBlocks::at(std::size_t row, std::size_t block) const {
    check(row < batch() && block < rows_[row].size(),
          "row " + std::to_string(row) + ", block " + std::to_string(block) +
              " is out of range: there are " + std::to_string(batch()) + " rows of " +
              std::to_string(blocks()) + " blocks");
    return *rows_[row][block];
}

void LayerBlocks::append(const std::byte* exact, std::size_t count, Executor& executor) {
    check(is_finite(exact, batch() * count * plan_->exact_bytes()),
          "keys or values are infinite, NaN, or above 65504, which a packed block can't hold; use "
          "scheme='exact'");
    Fresh fresh = make_blocks(count);
    const std::uint32_t heads = plan_->shape().kv_heads;
    executor.parallel_for(fresh.size() * heads, [&](std::size_t item, unsigned) {
        const std::size_t i = item / heads;
        const auto head = static_cast<std::uint32_t>(item % heads);
        encode_block(*plan_, exact + i * plan_->exact_bytes(), fresh[i]->data(), head, head + 1);
    });
    memory_->encoded_blocks += fresh.size();
    append(std::move(fresh), count);
}

void LayerBlocks::decode(std::size_t first, std::size_t count, std::byte* exact,
                         Executor& executor) const {
    check(first + count <= blocks(),
          "blocks " + std::to_string(first) + " to " + std::to_string(first + count) +
              " are out of range: there are " + std::to_string(blocks()));
    executor.parallel_for(batch() * count, [&](std::size_t i, unsigned) {
        decode_block(*plan_, rows_[i / count][first + i % count]->data(),
                     exact + i * plan_->exact_bytes());
    });
}

void LayerBlocks::attend(std::size_t first, const Queries& queries, Executor& executor) const {
    static thread_local AttentionWorkspace workspace;
    static thread_local std::vector<BlockView> views;
    check(first <= blocks(), "the first block, " + std::to_string(first) + ", is past the last");
    const std::size_t count = blocks() - first;
    const std::size_t cells = count * plan_->block_tokens();
    if (count == 0) return attend_nothing(queries);
    views.resize(count);
    for (std::size_t row = 0; row < batch(); ++row) {
        for (std::size_t b = 0; b < count; ++b) {
            const std::byte* data = rows_[row][first + b]->data();
            views[b] = {data, data + plan_->keys().bytes(), true};
        }
        AttentionIO io;
        io.q = queries.q + row * queries.q_strides.batch;
        io.q_token_stride = queries.q_strides.token;
        io.q_head_stride = queries.q_strides.head;
        io.out = queries.out + row * queries.out_strides.batch;
        io.out_token_stride = queries.out_strides.token;
        io.out_head_stride = queries.out_strides.head;
        io.tokens = queries.tokens;
        io.heads = queries.heads;
        io.n_cells = static_cast<std::uint32_t>(cells);
        io.log_sum = queries.log_sum + row * queries.tokens * queries.heads;
        AttentionParams params;
        params.scale = queries.scale;
        params.softcap = queries.softcap;
        if (queries.mask != nullptr) {
            params.mask = {Mask::Kind::additive_f32,
                           queries.mask + row * queries.mask_strides.batch,
                           queries.mask_strides.token, queries.mask_strides.head};
        }
        lowkv::attend(*plan_, views, io, params, workspace, executor);
    }
}

void LayerBlocks::attend_nothing(const Queries& queries) const {
    std::fill_n(queries.log_sum, batch() * queries.tokens * queries.heads,
                -std::numeric_limits<float>::infinity());
    for (std::size_t row = 0; row < batch(); ++row) {
        for (std::size_t token = 0; token < queries.tokens; ++token) {
            for (std::size_t head = 0; head < queries.heads; ++head) {
                std::fill_n(queries.out + row * queries.out_strides.batch +
                                token * queries.out_strides.token + head * queries.out_strides.head,
                            plan_->shape().head_dim, 0.0f);
            }
        }
    }
}

void LayerBlocks::select(std::span<const std::size_t> rows) {
    std::vector<Row> chosen;
    chosen.reserve(rows.size());
    for (const std::size_t row : rows) {
        check(row < batch(), "row " + std::to_string(row) + " is out of range: there are " +
                                 std::to_string(batch()) + " rows");
        chosen.push_back(rows_[row]);
    }
    check(!chosen.empty(), "a layer needs at least 1 row, not 0");
    rows_ = std::move(chosen);
}

void LayerBlocks::drop_front(std::size_t count) {
    for (Row& row : rows_) {
        row.erase(row.begin(),
                  row.begin() + static_cast<Row::difference_type>(std::min(count, row.size())));
    }
}

void LayerBlocks::truncate(std::size_t count, std::size_t reopened) {
    for (Row& row : rows_) row.resize(std::min(count, row.size()));
    memory_->reopened_blocks += reopened * batch();
}

std::span<const std::byte> LayerBlocks::packed(std::size_t row, std::size_t block) const {
    const PackedBlock& found = at(row, block);
    return {found.data(), found.bytes()};
}

void LayerBlocks::append_packed(const std::byte* packed, std::size_t count) {
    Fresh fresh = make_blocks(count);
    for (const auto& block : fresh) {
        std::memcpy(block->data(), packed, block->bytes());
        packed += block->bytes();
    }
    append(std::move(fresh), count);
}

}  // namespace lowkv::python
