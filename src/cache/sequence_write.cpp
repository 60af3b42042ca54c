// Writing into a sequence: blocks are reopened, copied or made as the cells need it.

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "cache/block.h"
#include "cache/store.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

// How many of cells [i, ...) are consecutive.
std::uint32_t run_length(std::span<const std::uint32_t> cells, std::size_t i) noexcept {
    std::size_t end = i + 1;
    while (end < cells.size() && cells[end] == cells[end - 1] + 1) ++end;
    return static_cast<std::uint32_t>(end - i);
}

}  // namespace

void Sequence::check_cell(std::uint64_t cell) const {
    if (cell < max_cells) return;
    throw Error(ErrorCode::invalid_argument, "cell " + std::to_string(cell) +
                                                 " is out of range: a sequence has cells 0 to " +
                                                 std::to_string(max_cells - 1));
}

// Rows can't be written in place: others, or a rollback, need the block as it is.
bool Sequence::needs_copy(std::uint32_t block, std::uint32_t first_cell) const noexcept {
    const cache::Block* held = block < blocks_.size() ? blocks_[block] : nullptr;
    if (held == nullptr || held->refs > 1) return true;
    return guarded(block) && (held->packed || first_cell < step_.size);
}

void Sequence::make_writable(std::span<const Place> places, std::uint32_t first_cell) {
    while (!try_to_make_writable(places, first_cell)) {
    }
}

// All that can fail comes first. False: others have packed or released a block meanwhile.
bool Sequence::try_to_make_writable(std::span<const Place> places, std::uint32_t first_cell) {
    if (places.empty()) return true;
    const Plan& plan = *places.front().sequence->plan_;
    Store::Impl& store = places.front().sequence->store_->impl();
    const std::size_t exact_bytes = plan.exact_bytes();
    struct Need {
        bool copy = false;
        const std::byte* packed = nullptr;
        std::shared_ptr<const Plan> finer;  // of the packed codes
        bool operator==(const Need&) const = default;
    };
    const auto needed = [&](const Place& place) {
        const Sequence& owner = *place.sequence;
        const bool copy = owner.needs_copy(place.block, first_cell);
        if (!owner.packed(place.block)) return Need{copy, nullptr, nullptr};
        const cache::Block& block = *owner.blocks_[place.block];
        return Need{copy, block.data, block.finer};
    };
    std::vector<Need> needs;
    std::size_t slot_count = 0, block_count = 0, freed_bytes = 0;
    bool ready = true;
    {
        const std::scoped_lock lock(store.mutex);
        for (const Place& place : places) {
            const Need& need = needs.emplace_back(needed(place));
            if (need.copy) ++block_count;
            if (need.copy || need.packed) ++slot_count;
            if (need.packed && !need.copy)
                freed_bytes += place.sequence->blocks_[place.block]->bytes(plan);
            ready = ready && !need.copy && !need.packed && !place.sequence->is_cut(place.block);
        }
    }
    if (ready) return true;
    cache::Slots slots(store, cache::Slots::As::exact, exact_bytes, slot_count, freed_bytes);
    std::vector<std::unique_ptr<cache::Block>> fresh(block_count);
    for (auto& block : fresh) block = std::make_unique<cache::Block>();
    for (const auto& [sequence, b] : places) {
        auto& blocks = sequence->blocks_;
        if (b >= blocks.capacity()) blocks.reserve(std::max<std::size_t>(b + 1, 2 * blocks.size()));
    }
    cache::Decoding decoded;
    std::size_t slot = 0;
    for (const Need& need : needs) {
        if (need.packed)
            decoded[need.finer ? need.finer.get() : &plan].push_back({need.packed, slots[slot]});
        if (need.copy || need.packed) ++slot;
    }
    // Outside of the mutex: other sequences go on.
    cache::decode(store.device, decoded, serial_executor());

    const std::scoped_lock lock(store.mutex);
    for (std::size_t i = 0; i < places.size(); ++i)
        if (needed(places[i]) != needs[i]) return false;
    for (std::size_t i = 0; i < places.size(); ++i) {
        const auto& [sequence, b] = places[i];
        auto& blocks = sequence->blocks_;
        if (b >= blocks.size()) blocks.resize(std::size_t{b} + 1);
        cache::Block* block = blocks[b];
        if (needs[i].copy || needs[i].packed) {
            std::byte* data = slots.take();
            if (block == nullptr) {
                store.device.clear(data, exact_bytes);
            } else if (needs[i].packed) {
                ++store.stats.reopened_blocks;
            } else {
                store.device.copy(data, block->data, exact_bytes);
            }
            if (needs[i].copy) {
                cache::Block* copy = fresh.back().release();
                fresh.pop_back();
                if (block != nullptr) {
                    copy->keys = block->keys;
                    copy->values = block->values;
                }
                sequence->let_go(b);
                blocks[b] = block = copy;
            } else {
                const std::size_t packed_bytes = block->bytes(plan);
                store.pool(packed_bytes).deallocate(block->data);
                store.drop(true, packed_bytes);
            }
            block->data = data;
            block->packed = false;
            block->finer = nullptr;
        }
        if (sequence->is_cut(b)) sequence->drop_stale_cells(*block);
    }
    return true;
}

void Sequence::drop_stale_cells(cache::Block& block) noexcept {
    const std::uint32_t first = size_ % plan_->block_tokens();
    const cache::Cells kept = cache::cell_range(0, first);
    block.keys &= kept;
    block.values &= kept;
    device().clear_rows(*plan_, block.data, first);
    cut_ = false;
}

std::uint32_t Sequence::run_in_block(std::uint32_t cell, std::uint32_t count) const noexcept {
    return std::min(count, plan_->block_tokens() - cell % plan_->block_tokens());
}

BlockRows<std::byte> Sequence::run_at(std::uint32_t cell, std::uint32_t count,
                                      std::size_t at) const noexcept {
    const std::uint32_t block_tokens = plan_->block_tokens();
    return {blocks_[cell / block_tokens]->data, cell % block_tokens, count, at};
}

void Sequence::note_written(Part part, std::uint32_t cell, std::uint32_t count,
                            const std::int32_t* positions) noexcept {
    const std::uint32_t block_tokens = plan_->block_tokens();
    const std::uint32_t first = cell % block_tokens;
    next_due_ = std::min(next_due_, cell / block_tokens);
    size_ = std::max(size_, cell + count);
    cache::Block& block = *blocks_[cell / block_tokens];
    const cache::Cells written = cache::cell_range(first, count);
    const bool latent = plan_->shape().latent();  // both at once
    if (part == Part::keys || latent) block.keys |= written;
    if (part == Part::values || latent) block.values |= written;
    if (part != Part::keys || !plan_->has_positions()) return;
    std::array<std::int32_t, cache::max_block_tokens> numbers;
    if (positions != nullptr)
        std::copy_n(positions, count, numbers.begin());
    else
        std::iota(numbers.begin(), numbers.begin() + count, static_cast<std::int32_t>(cell));
    device().copy_in(block.data + cache::exact_position_offset(*plan_, first), numbers.data(),
                     count * sizeof numbers[0]);
}

void Sequence::check_positions(std::span<const std::int32_t> positions, std::size_t tokens) {
    if (positions.empty() || positions.size() == tokens) return;
    throw Error(ErrorCode::invalid_argument, std::to_string(positions.size()) +
                                                 " positions do not belong to " +
                                                 std::to_string(tokens) + " tokens");
}

Rows Sequence::floats(const float* rows, std::size_t row_stride) const noexcept {
    return {rows, RowType::f32, plan_->shape().head_dim, row_stride};
}

void Sequence::append(const float* keys, const float* values, std::uint32_t tokens,
                      std::span<const std::int32_t> positions) {
    const std::size_t channels = plan_->shape().channels();
    append(floats(keys, channels), floats(values, channels), tokens, positions);
}

void Sequence::add_tail(std::uint32_t tokens, std::vector<Place>& places) {
    const std::uint32_t block_tokens = plan_->block_tokens();
    for (std::uint32_t b = size_ / block_tokens; b <= (size_ + tokens - 1) / block_tokens; ++b)
        places.push_back({this, b});
}

void Sequence::append(const Rows& keys, const Rows& values, std::uint32_t tokens,
                      std::span<const std::int32_t> positions) {
    const auto of_batch = [](const Rows& rows) {
        return BatchRows{rows.data, rows.type, {0, rows.head_stride, rows.token_stride}};
    };
    append(std::span(this, 1), of_batch(keys), of_batch(values), tokens, positions);
}

void Sequence::append(std::span<Sequence> sequences, const BatchRows& keys, const BatchRows& values,
                      std::uint32_t tokens, std::span<const std::int32_t> positions) {
    element_bytes(keys.type);  // throws for a type that there is not
    element_bytes(values.type);
    check_positions(positions, tokens);
    if (tokens == 0) return;
    const Sequence& one = sequences.front();
    const std::uint32_t first = one.size_;
    one.check_cell(std::uint64_t{first} + tokens - 1);
    std::vector<Place> places;
    for (Sequence& sequence : sequences) sequence.add_tail(tokens, places);
    std::vector<BlockRows<std::byte>> runs;
    runs.reserve(places.size());
    make_writable(places, first);
    const auto each_run = [&](auto f) {  // f(token, tokens), of one block each
        for (std::uint32_t done = 0, n = 0; done < tokens; done += n)
            f(done, n = one.run_in_block(first + done, tokens - done));
    };
    for (const Part part : one.plan_->stored_parts()) {
        const BatchRows& rows = part == Part::keys ? keys : values;
        runs.clear();
        for (std::size_t s = 0; s < sequences.size(); ++s)
            each_run([&](std::uint32_t token, std::uint32_t n) {
                runs.push_back(sequences[s].run_at(
                    first + token, n, s * rows.strides.sequence + token * rows.strides.token));
            });
        one.device().write_rows(*one.plan_, part, runs,
                                {rows.data, rows.type, rows.strides.head, rows.strides.token},
                                serial_executor());
    }
    for (Sequence& sequence : sequences)
        each_run([&](std::uint32_t token, std::uint32_t n) {
            sequence.note_written(Part::keys, first + token, n,
                                  positions.empty() ? nullptr : &positions[token]);
            sequence.note_written(Part::values, first + token, n, nullptr);
        });
}

void Sequence::write_parts(std::span<const std::uint32_t> cells, const Rows* keys,
                           const Rows* values, std::span<const std::int32_t> positions,
                           Executor& executor) {
    for (const Rows* rows : {keys, values})
        if (rows != nullptr) element_bytes(rows->type);  // throws for a type that there is not
    check_positions(positions, cells.size());
    const std::uint32_t block_tokens = plan_->block_tokens();
    std::vector<Place> places;
    bool grows = false;
    for (std::size_t i = 0; i < cells.size();) {
        const std::uint32_t n = run_length(cells, i);
        const std::uint64_t last = std::uint64_t{cells[i]} + n - 1;
        check_cell(last);
        grows |= last >= size_;
        for (std::uint32_t b = cells[i] / block_tokens; b <= last / block_tokens; ++b)
            places.push_back({this, b});
        i += n;
    }
    // Stale cells would come back to life below the new size.
    if (grows && cut_) places.push_back({this, size_ / block_tokens});
    const auto below = [](const Place& a, const Place& b) { return a.block < b.block; };
    const auto same = [](const Place& a, const Place& b) { return a.block == b.block; };
    std::vector<BlockRows<std::byte>> runs;
    runs.reserve(places.size());
    std::sort(places.begin(), places.end(), below);
    places.erase(std::unique(places.begin(), places.end(), same), places.end());
    make_writable(places, 0);

    const auto each_run = [&](auto f) {  // f(row, rows), of one block each
        for (std::size_t i = 0; i < cells.size();)
            for (std::uint32_t rest = run_length(cells, i), n = 0; rest > 0; rest -= n, i += n)
                f(i, n = run_in_block(cells[i], rest));
    };
    for (const Part part : {Part::keys, Part::values}) {
        const Rows* rows = part == Part::keys ? keys : values;
        if (rows == nullptr) continue;
        runs.clear();
        each_run([&](std::size_t row, std::uint32_t n) {
            runs.push_back(run_at(cells[row], n, row * rows->token_stride));
        });
        device().write_rows(*plan_, part, runs, *rows, executor);
        each_run([&](std::size_t row, std::uint32_t n) {
            note_written(part, cells[row], n, positions.empty() ? nullptr : &positions[row]);
        });
    }
}

void Sequence::write(std::span<const std::uint32_t> cells, const Rows& keys, const Rows& values,
                     std::span<const std::int32_t> positions, Executor& executor) {
    write_parts(cells, &keys, plan_->shape().latent() ? nullptr : &values, positions, executor);
}

void Sequence::write_keys(std::span<const std::uint32_t> cells, const Rows& rows,
                          std::span<const std::int32_t> positions, Executor& executor) {
    write_parts(cells, &rows, nullptr, positions, executor);
}

void Sequence::write_values(std::span<const std::uint32_t> cells, const Rows& rows,
                            Executor& executor) {
    if (plan_->shape().latent())
        throw Error(ErrorCode::invalid_argument,
                    "a latent layer's values are in its keys: write those alone");
    write_parts(cells, nullptr, &rows, {}, executor);
}

void Sequence::write_keys(std::span<const std::uint32_t> cells, const float* rows,
                          std::size_t row_stride, std::span<const std::int32_t> positions) {
    write_keys(cells, floats(rows, row_stride), positions);
}

void Sequence::write_values(std::span<const std::uint32_t> cells, const float* rows,
                            std::size_t row_stride) {
    write_values(cells, floats(rows, row_stride));
}

}  // namespace lowkv
