// Rows of one sequence packed into another's blocks, in an order that the host gives.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/block.h"
#include "cache/encode.h"
#include "cache/store.h"
#include "lowkv/cache.h"
#include "lowkv/device.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

[[noreturn]] void refuse(const std::string& what) {
    throw Error(ErrorCode::invalid_argument, "Sequence::pack_from: " + what);
}

void check_once(std::span<const std::uint32_t> blocks) {
    std::vector<std::uint32_t> ascending(blocks.begin(), blocks.end());
    std::ranges::sort(ascending);
    if (std::ranges::adjacent_find(ascending) != ascending.end()) refuse("a block is named twice");
}

}  // namespace

// Its exact blocks are of the same form, in the same memory.
void Sequence::check_rows(const Sequence& source) const {
    const Plan &a = *source.plan_, &b = *plan_;
    if (!(a.shape() == b.shape()) || a.block_tokens() != b.block_tokens() || a.rows() != b.rows() ||
        a.has_positions() != b.has_positions())
        refuse("the other sequence has exact rows of another form");
    if (&source.device() != &device()) refuse("the other sequence lies on another device");
}

void Sequence::check_source(const Sequence& source, std::span<const std::uint32_t> blocks,
                            std::span<const std::uint32_t> cells) const {
    const std::uint32_t tokens = plan_->block_tokens();
    check_rows(source);
    if (cells.size() != blocks.size() * tokens)
        refuse(std::to_string(cells.size()) + " cells for " + std::to_string(blocks.size()) +
               " blocks of " + std::to_string(tokens) + " tokens");
    for (const std::uint32_t cell : cells) {
        if (cell == no_cell) continue;
        const std::uint32_t b = cell / tokens;
        if (b >= source.blocks_.size() || source.blocks_[b] == nullptr || source.packed(b))
            refuse("cell " + std::to_string(cell) + " of the rows' sequence is not exact");
    }
    check_once(blocks);
}

void Sequence::check_absent(std::span<const std::uint32_t> blocks,
                            std::span<const std::uint32_t> stats_from) const {
    if (!stats_from.empty() && stats_from.size() != blocks.size())
        refuse(std::to_string(stats_from.size()) + " reference blocks for " +
               std::to_string(blocks.size()) + " blocks");
    for (const std::uint32_t b : blocks) {
        check_cell((std::uint64_t{b} + 1) * plan_->block_tokens() - 1);
        if (b < blocks_.size() && blocks_[b] != nullptr)
            refuse("block " + std::to_string(b) + " is there already");
    }
}

// A block's worth of cells each as exact blocks: the source's own where they are one of its blocks
// as it is, else copies.
class Sequence::Gathered {
  public:
    Gathered(const Sequence& source, std::span<const std::uint32_t> cells, Executor& executor)
        : copies_(source.store_->impl(), cache::Slots::As::scratch, source.plan_->exact_bytes(),
                  source.scattered(cells, rows_)) {
        const Plan& plan = *source.plan_;
        const std::uint32_t tokens = plan.block_tokens();
        std::size_t copy = 0;
        std::vector<std::size_t> copied;
        for (std::size_t i = 0; i < rows_.size(); ++i) {
            if (rows_[i] != nullptr) continue;
            rows_[i] = copies_[copy++];
            copied.push_back(i);
        }
        executor.parallel_for(copied.size(), [&](std::size_t c, unsigned) {
            const std::size_t i = copied[c];
            if (!source.gather(cells.subspan(i * tokens, tokens), copies_[c]))
                source.device().clear(copies_[c], plan.exact_bytes());
        });
    }
    const std::byte* operator[](std::size_t i) const noexcept { return rows_[i]; }
    std::span<const std::byte* const> all() const noexcept { return rows_; }

  private:
    std::vector<const std::byte*> rows_;
    cache::Slots copies_;
};

// Fills `rows` with the blocks that can be read where they are, null for others, and counts those.
std::size_t Sequence::scattered(std::span<const std::uint32_t> cells,
                                std::vector<const std::byte*>& rows) const {
    const std::uint32_t tokens = plan_->block_tokens();
    for (std::size_t i = 0; i < cells.size(); i += tokens) {
        bool whole = cells[i] % tokens == 0;  // no_cell isn't
        for (std::uint32_t t = 1; t < tokens && whole; ++t) whole = cells[i + t] == cells[i] + t;
        rows.push_back(whole ? blocks_[cells[i] / tokens]->data : nullptr);
    }
    return static_cast<std::size_t>(std::ranges::count(rows, nullptr));
}

bool Sequence::gather(std::span<const std::uint32_t> cells, std::byte* to) const noexcept {
    const auto tokens = static_cast<std::uint32_t>(cells.size());
    const auto first =
        std::find_if(cells.begin(), cells.end(), [](auto c) { return c != no_cell; });
    if (first == cells.end()) return false;
    std::uint32_t known = *first;
    for (std::uint32_t t = 0; t < tokens;) {
        const bool missing = cells[t] == no_cell;
        if (!missing) known = cells[t];
        const std::uint32_t from = known % tokens;
        std::uint32_t count = 1;
        while (t + count < tokens &&
               (missing ? cells[t + count] == no_cell
                        : cells[t + count] == known + count && from + count < tokens))
            ++count;
        device().copy_rows(*plan_, to, t, blocks_[known / tokens]->data, from, count, missing);
        if (!missing) known += count - 1;
        t += count;
    }
    return true;
}

void Sequence::pack_from(const Sequence& source, std::span<const std::uint32_t> blocks,
                         std::span<const std::uint32_t> cells, Executor& executor,
                         std::span<const std::uint32_t> stats_from) {
    pack_from(source, blocks, cells, executor, stats_from, std::nullopt);
}

void Sequence::pack_keys_from(const Sequence& source, std::span<const std::uint32_t> blocks,
                              std::span<const std::uint32_t> cells, Executor& executor,
                              std::span<const std::uint32_t> stats_from) {
    if (plan_->scheme().exact()) refuse("an exact scheme's keys can't be packed alone");
    pack_from(source, blocks, cells, executor, stats_from, Part::keys);
}

void Sequence::pack_from(const Sequence& source, std::span<const std::uint32_t> blocks,
                         std::span<const std::uint32_t> cells, Executor& executor,
                         std::span<const std::uint32_t> stats_from, std::optional<Part> only) {
    check_source(source, blocks, cells);
    check_absent(blocks, stats_from);
    if (blocks.empty()) return;
    const std::uint32_t end = (*std::ranges::max_element(blocks) + 1) * plan_->block_tokens();
    open_cut(end);
    if (plan_->scheme().exact()) {
        copy_from(source, blocks, cells, executor);
        size_ = std::max(size_, end);
    } else {
        const Gathered rows(source, cells, executor);
        pack_rows(blocks, rows.all(), executor, stats_from, only);
    }
}

// Stale cells would come back to life below a new size.
void Sequence::open_cut(std::uint32_t new_size) {
    if (!cut_ || new_size <= size_) return;
    const Place cut{this, size_ / plan_->block_tokens()};
    make_writable(std::span(&cut, 1), 0);
}

void Sequence::pack_rows(std::span<const std::uint32_t> blocks,
                         std::span<const std::byte* const> rows, Executor& executor,
                         std::span<const std::uint32_t> stats_from, std::optional<Part> only) {
    std::vector<Packing> places;
    for (std::size_t i = 0; i < blocks.size(); ++i)
        places.push_back(
            {{this, blocks[i]}, stats_from.empty() ? first_packed : stats_from[i], rows[i]});
    std::ranges::sort(places, {}, &Place::block);
    const std::uint32_t end = places.back().block + 1;
    const auto before = blocks_.size();
    blocks_.resize(std::max<std::size_t>(before, end));
    try {
        pack(places, false, executor, only);
    } catch (...) {
        blocks_.resize(before);
        throw;
    }
    size_ = std::max(size_, end * plan_->block_tokens());
}

void Sequence::pack_again_from(const Sequence& source, std::span<const std::uint32_t> blocks,
                               Executor& executor, std::span<const std::uint32_t> stats_from) {
    check_rows(source);
    if (plan_->scheme().exact()) refuse("an exact scheme packs nothing again");
    for (const std::uint32_t b : blocks)
        if (b >= source.blocks_.size() || !source.packed(b) || source.blocks_[b]->values.none())
            refuse("block " + std::to_string(b) + " of the other sequence is not packed");
    check_absent(blocks, stats_from);
    if (blocks.empty()) return;
    const cache::Slots decoded(store_->impl(), cache::Slots::As::scratch, plan_->exact_bytes(),
                               blocks.size());
    std::vector<BlockCopy> copies;
    std::vector<const std::byte*> rows;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        copies.push_back({source.blocks_[blocks[i]]->data, decoded[i]});
        rows.push_back(decoded[i]);
    }
    device().decode(*source.plan_, copies, executor);
    pack_rows(blocks, rows, executor, stats_from, std::nullopt);
}

void Sequence::copy_from(const Sequence& source, std::span<const std::uint32_t> blocks,
                         std::span<const std::uint32_t> cells, Executor& executor) {
    const std::uint32_t tokens = plan_->block_tokens();
    std::vector<Place> places;
    for (const std::uint32_t b : blocks) places.push_back({this, b});
    make_writable(places, 0);
    executor.parallel_for(blocks.size(), [&](std::size_t i, unsigned) {
        cache::Block& block = *blocks_[blocks[i]];
        source.gather(cells.subspan(i * tokens, tokens), block.data);
        block.keys = block.values = cache::cell_range(0, tokens);
    });
}

bool Sequence::waits_for_values(std::uint32_t b) const noexcept {
    return packed(b) && blocks_[b]->values.none() && blocks_[b]->refs == 1 && !guarded(b);
}

void Sequence::pack_values_from(const Sequence& source, std::span<const std::uint32_t> blocks,
                                std::span<const std::uint32_t> cells, Executor& executor) {
    const std::uint32_t tokens = plan_->block_tokens();
    check_source(source, blocks, cells);
    for (const std::uint32_t b : blocks)
        if (!waits_for_values(b))
            refuse("block " + std::to_string(b) + " doesn't wait for its values");
    const Gathered rows(source, cells, executor);
    std::vector<BlockCopy> encoded;
    for (std::size_t i = 0; i < blocks.size(); ++i)
        encoded.push_back({rows[i], blocks_[blocks[i]]->data});
    device().encode(*plan_, encoded, executor, Part::values);
    for (const std::uint32_t b : blocks) blocks_[b]->values = cache::cell_range(0, tokens);
}

void Sequence::put_packed(std::span<const std::uint32_t> blocks,
                          std::span<const std::byte* const> bytes, std::optional<Part> only) {
    if (plan_->scheme().exact()) refuse("an exact scheme has no packed bytes");
    if (in_step()) refuse("packed bytes are put between steps");
    if (bytes.size() != blocks.size()) refuse("each block has its bytes");
    if (blocks.empty()) return;
    check_once(blocks);
    std::size_t absent = 0;
    std::uint32_t end = 0;
    for (const std::uint32_t b : blocks) {
        check_cell((std::uint64_t{b} + 1) * plan_->block_tokens() - 1);
        const bool is_absent = b >= blocks_.size() || blocks_[b] == nullptr;
        const bool fits =
            (is_absent && only != Part::values) || (waits_for_values(b) && only != Part::keys);
        if (!fits) refuse("block " + std::to_string(b) + " is there, or waits for no values");
        absent += is_absent ? 1 : 0;
        end = std::max(end, (b + 1) * plan_->block_tokens());
    }
    for (const std::byte* codes : bytes)
        if (only != Part::values && !cache::names_all_channels(*plan_, codes))
            throw Error(ErrorCode::invalid_image, "its codes lack channels of the keys");
    open_cut(end);
    std::vector<std::unique_ptr<cache::Block>> fresh(absent);
    for (auto& block : fresh) block = std::make_unique<cache::Block>();
    blocks_.reserve(end / plan_->block_tokens());
    cache::Slots slots(store_->impl(), cache::Slots::As::packed, plan_->packed_bytes(), absent);

    const std::size_t keys_bytes = plan_->keys().bytes(), values_bytes = plan_->values().bytes();
    const cache::Cells all = cache::cell_range(0, plan_->block_tokens());
    blocks_.resize(std::max<std::size_t>(blocks_.size(), end / plan_->block_tokens()));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        cache::Block*& block = blocks_[blocks[i]];
        if (block == nullptr) {
            block = fresh[--absent].release();
            block->data = slots.take();
            block->packed = true;
        }
        const std::byte* from = bytes[i];
        if (only != Part::values) {
            device().copy_in(block->data, from, keys_bytes);
            block->leads = cache::leads(*plan_, from);
            block->keys = all;
            from += keys_bytes;
        }
        if (only != Part::keys) {
            device().copy_in(block->data + keys_bytes, from, values_bytes);
            block->values = all;
        } else {
            device().clear(block->data + keys_bytes, values_bytes);
        }
    }
    device().finish();
    size_ = std::max(size_, end);
}

}  // namespace lowkv
