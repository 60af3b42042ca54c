// A sequence alone: a batch of one, with rows of floats.

#include <algorithm>
#include <span>
#include <vector>

#include "cpu/host_rows.h"
#include "lowkv/batch.h"
#include "round.h"

namespace lowkv {

Sequence::Sequence(const std::shared_ptr<Store>& store, const std::shared_ptr<const Plan>& plan,
                   const Retention& retention)
    : batch_(store, Blocks::Ladder{plan}, retention, 1) {}

std::uint32_t Sequence::blocks() const noexcept { return ceil_div(size(), plan().block_tokens()); }

void Sequence::append(const float* keys, const float* values, std::uint32_t tokens,
                      std::span<const std::int32_t> positions) {
    const std::size_t head_dim = plan().shape().head_dim, channels = plan().shape().channels();
    append({keys, RowType::f32, head_dim, channels}, {values, RowType::f32, head_dim, channels},
           tokens, positions);
}

void Sequence::append(const Rows& keys, const Rows& values, std::uint32_t tokens,
                      std::span<const std::int32_t> positions) {
    batch_.append(of_one(keys), of_one(values), tokens, positions);
}

void Sequence::read(std::uint32_t first, std::uint32_t count, float* keys, float* values,
                    Executor& executor) const {
    float* const out[] = {keys, values};
    const std::size_t dims[] = {plan().shape().head_dim, plan().shape().out_dim()};
    const std::size_t tokens = std::min(count, size());  // more are refused
    std::vector<std::byte> held[2];
    RowsOut rows[2];
    for (const int part : {0, 1}) {
        const std::size_t channels = plan().shape().kv_heads * dims[part];
        if (out[part] == nullptr) continue;
        held[part].resize(tokens * channels * cache::bytes_of(plan().rows()));
        rows[part] = {held[part].data(), dims[part], channels};
    }
    read(first, count, rows[0], rows[1], executor);
    for (const int part : {0, 1})
        if (out[part] != nullptr)
            cache::convert(plan().kernels(), plan().rows(), held[part].data(), RowType::f32,
                           reinterpret_cast<std::byte*>(out[part]),
                           tokens * rows[part].token_stride);
}

void Sequence::read(std::uint32_t first, std::uint32_t count, const RowsOut& keys,
                    const RowsOut& values, Executor& executor) const {
    batch_.read(first, count, of_one(keys), of_one(values), executor);
}

void Sequence::pack(std::span<const std::uint32_t> blocks, Executor& executor) {
    std::vector<Blocks::Packing> places;
    for (const std::uint32_t block : blocks) places.push_back(batch_.packing(0, block));
    Blocks::pack(std::move(places), {.rung = batch_.last_rung()}, executor);
}

void Sequence::rearrange(std::uint32_t first, std::span<const std::uint32_t> order,
                         Executor& executor) {
    const std::uint32_t tokens = plan().block_tokens(), begin = first / tokens;
    std::vector<std::uint32_t> cells(order.begin(), order.end());
    cells.resize(round_up(cells.size(), std::size_t{tokens}), Blocks::no_cell);
    std::vector<Blocks::Packing> places;
    for (std::uint32_t b = 0; b < cells.size() / tokens; ++b) {
        places.push_back(batch_.packing(0, begin + b));
        places.back().cells = std::span(cells).subspan(std::size_t{b} * tokens, tokens);
    }
    Blocks& table = batch_.sequences_.front();
    Blocks::pack(std::move(places), {.rung = 0, .rows = &table}, executor);
    batch_.state_.tokens = first + static_cast<std::uint32_t>(order.size());
    table.drop_from(ceil_div(batch_.state_.tokens, tokens));
}

}  // namespace lowkv
