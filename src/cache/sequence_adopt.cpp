// Rows of one sequence packed into another's blocks, in an order that the host gives.

#include <algorithm>
#include <string>

#include "cache/block.h"
#include "lowkv/cache.h"
#include "lowkv/device.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

[[noreturn]] void refuse(const std::string& what) {
    throw Error(ErrorCode::invalid_argument, "Sequence::adopt: " + what);
}

}  // namespace

void Sequence::adopt(const Sequence& source, std::span<const std::uint32_t> blocks,
                     std::span<const std::uint32_t> cells, Executor& executor,
                     std::span<const std::uint32_t> like) {
    const std::uint32_t tokens = plan_->block_tokens();
    if (source.plan_ != plan_) refuse("the rows' sequence has another plan");
    if (cells.size() != blocks.size() * tokens)
        refuse(std::to_string(cells.size()) + " cells for " + std::to_string(blocks.size()) +
               " blocks of " + std::to_string(tokens) + " tokens");
    for (const std::uint32_t b : blocks) {
        check_cell((std::uint64_t{b} + 1) * tokens - 1);
        if (b < blocks_.size() && blocks_[b] != nullptr)
            refuse("block " + std::to_string(b) + " is there already");
    }
    for (const std::uint32_t cell : cells) {
        if (cell == no_cell) continue;
        const std::uint32_t b = cell / tokens;
        if (b >= source.blocks_.size() || source.blocks_[b] == nullptr || source.packed(b))
            refuse("cell " + std::to_string(cell) + " of the rows' sequence is not exact");
    }

    std::vector<std::uint32_t> ascending(blocks.begin(), blocks.end());
    std::sort(ascending.begin(), ascending.end());
    if (std::adjacent_find(ascending.begin(), ascending.end()) != ascending.end())
        refuse("a block is named twice");
    std::vector<Place> places;
    for (const std::uint32_t b : ascending) places.push_back({this, b});
    make_writable(places, 0);
    executor.parallel_for(blocks.size(), [&](std::size_t i, unsigned) {
        cache::Block& block = *blocks_[blocks[i]];
        const auto its = cells.subspan(i * tokens, tokens);
        const auto first = static_cast<std::uint32_t>(
            std::find_if(its.begin(), its.end(), [](auto c) { return c != no_cell; }) -
            its.begin());
        std::uint32_t known = first < tokens ? its[first] : no_cell;
        for (std::uint32_t t = 0; t < tokens && known != no_cell;) {
            const bool missing = its[t] == no_cell;
            if (!missing) known = its[t];
            const std::uint32_t from = known % tokens;
            std::uint32_t count = 1;
            while (t + count < tokens &&
                   (missing ? its[t + count] == no_cell
                            : its[t + count] == known + count && from + count < tokens))
                ++count;
            device().copy_rows(*plan_, block.data, t, source.blocks_[known / tokens]->data, from,
                               count, missing);
            if (!missing) known += count - 1;
            t += count;
        }
        block.keys = block.values = cache::cell_range(0, tokens);
    });
    const std::uint32_t before = size_;
    size_ = std::max(size_, (ascending.empty() ? 0 : (ascending.back() + 1) * tokens));
    try {
        pack(blocks, executor, like);
    } catch (...) {
        drop(blocks);
        size_ = before;
        throw;
    }
}

}  // namespace lowkv
