// Rows into a table's blocks, which are reopened, copied or made as the cells need it, and back.

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "cache/block.h"
#include "cache/store.h"
#include "cpu/host_rows.h"
#include "lowkv/cache.h"
#include "lowkv/device.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

// That are decoded at a time, which bounds the scratch memory.
constexpr std::size_t most_tokens = 4096;

std::size_t offset(const BatchStrides& strides, std::size_t sequence, std::size_t token) noexcept {
    return sequence * strides.sequence + token * strides.token;
}

void clear(const Shape& shape, Part part, const RowsOut& rows, std::uint32_t count,
           std::size_t bytes) noexcept {
    const std::size_t channels = part == Part::keys ? shape.head_dim : shape.out_dim();
    for (std::size_t t = 0; t < count; ++t) {
        for (std::size_t head = 0; head < shape.kv_heads; ++head) {
            const std::size_t at = t * rows.token_stride + head * rows.head_stride;
            std::memset(static_cast<std::byte*>(rows.data) + at * bytes, 0, channels * bytes);
        }
    }
}

}  // namespace

void Blocks::check_cell(std::uint64_t cell) const {
    if (cell < max_cells) return;
    throw Error(ErrorCode::invalid_argument, "cell ", cell,
                " is out of range: a sequence has cells 0 to ", max_cells - 1);
}

// Rows can't be written in place: others, or a rollback, need the block as it is.
bool Blocks::needs_copy(std::uint32_t cell, bool appended) const noexcept {
    const std::uint32_t slot = cell / plan().block_tokens();
    const cache::Block* block = at(slot);
    if (block == nullptr || block->refs > 1) return true;
    return guarded(slot) && (block->rung > 0 || !appended || cell < step_.cells);
}

// All that can fail comes first. What other tables share stays as it is meanwhile, so that decoding
// needs no mutex.
void Blocks::open(std::span<const Run> runs, bool appended) {
    if (runs.empty()) return;
    struct Place {
        Blocks* table;
        std::uint32_t slot;
        bool copied;
        cache::Block* block;
        std::byte* data = nullptr;
    };
    std::vector<Place> places;
    std::set<std::pair<Blocks*, std::uint32_t>> known;
    const Plan& plan = runs.front().table->plan();
    Store::Impl& store = runs.front().table->store_->impl();
    std::size_t copies = 0, freed_bytes = 0;
    {
        const std::scoped_lock lock(store.mutex);
        for (const Run& run : runs) {
            Blocks& table = *run.table;
            const std::uint32_t slot = run.cell / plan.block_tokens();
            const bool copied = table.needs_copy(run.cell, appended);
            if (!(copied || table.packed(slot)) || !known.emplace(&table, slot).second) continue;
            places.push_back({&table, slot, copied, table.at(slot)});
            copies += copied ? 1 : 0;
            freed_bytes += copied ? 0 : table.bytes(*table.at(slot));
        }
    }
    if (places.empty()) return;
    cache::Slots slots(store, cache::Slots::As::exact, plan.exact_bytes(), places.size(),
                       freed_bytes);
    std::vector<std::unique_ptr<cache::Block>> fresh(copies);
    for (auto& block : fresh) block = std::make_unique<cache::Block>();
    cache::Decoding decoded;
    for (std::size_t i = 0; i < places.size(); ++i) {
        const Place& place = places[i];
        place.table->reserve(place.slot);
        if (place.block != nullptr && place.block->rung > 0)
            decoded[&place.table->plan_of(place.block->rung)].push_back(
                {place.block->data, slots[i]});
    }
    cache::decode(store.device, decoded, serial_executor());

    const std::scoped_lock lock(store.mutex);
    for (const Place& place : places) {
        auto& blocks = place.table->blocks_;
        if (place.slot >= blocks.size()) blocks.resize(std::size_t{place.slot} + 1);
        cache::Block* block = place.block;
        std::byte* data = slots.take();
        if (block == nullptr)
            store.device.clear(data, plan.exact_bytes());
        else if (block->rung > 0)
            ++store.stats.reopened_blocks;
        else
            store.device.copy(data, block->data, plan.exact_bytes());
        if (place.copied) {
            cache::Block* copy = fresh[--copies].release();
            if (block != nullptr) {
                copy->keys = block->keys;
                copy->values = block->values;
            }
            place.table->let_go(place.slot);
            blocks[place.slot] = block = copy;
        } else {
            store.drop(true, place.table->bytes(*block), block->data);
        }
        block->data = data;
        block->rung = 0;
    }
}

void Blocks::note_written(Part part, const Run& run) noexcept {
    const std::uint32_t first = run.cell % plan().block_tokens();
    cache::Block& block = *at(run.cell / plan().block_tokens());
    const cache::Cells written = cache::cell_range(first, run.count);
    const bool latent = plan().shape().latent();  // both at once
    if (part == Part::keys || latent) block.keys |= written;
    if (part == Part::values || latent) block.values |= written;
    if (part != Part::keys || !plan().has_positions()) return;
    std::array<std::int32_t, cache::max_block_tokens> numbers;
    if (run.positions != nullptr)
        std::copy_n(run.positions, run.count, numbers.begin());
    else
        std::iota(numbers.begin(), numbers.begin() + run.count,
                  static_cast<std::int32_t>(run.cell));
    device().copy_in(block.data + plan().exact_positions_offset() + first * sizeof numbers[0],
                     numbers.data(), run.count * sizeof numbers[0]);
}

void Blocks::write(std::span<const Run> runs, const BatchRows& keys, const BatchRows& values,
                   bool appended, Executor& executor) {
    for (const BatchRows* rows : {&keys, &values})
        element_bytes(rows->type);  // throws for a type that there is not
    if (runs.empty()) return;
    const Plan& plan = runs.front().table->plan();
    for (const Run& run : runs) run.table->check_cell(std::uint64_t{run.cell} + run.count - 1);
    std::vector<BlockRows<std::byte>> to;
    to.reserve(runs.size());
    open(runs, appended);
    for (const Part part : {Part::keys, Part::values}) {
        const BatchRows& rows = part == Part::keys ? keys : values;
        if (rows.data == nullptr || (part == Part::values && plan.shape().latent())) continue;
        to.clear();
        for (const Run& run : runs)
            to.push_back({run.table->at(run.cell / plan.block_tokens())->data,
                          run.cell % plan.block_tokens(), run.count,
                          offset(rows.strides, run.sequence, run.token)});
        runs.front().table->device().write_rows(
            plan, part, to, {rows.data, rows.type, rows.strides.head, rows.strides.token},
            executor);
        for (const Run& run : runs) run.table->note_written(part, run);
    }
}

void Blocks::write(std::span<const std::uint32_t> cells, const Rows& keys, const Rows& values,
                   std::span<const std::int32_t> positions, Executor& executor) {
    if (keys.data == nullptr && plan().shape().latent())
        throw Error(ErrorCode::invalid_argument,
                    "a latent layer's values are in its keys: write those alone");
    if (!positions.empty() && positions.size() != cells.size())
        throw Error(ErrorCode::invalid_argument, positions.size(), " positions do not belong to ",
                    cells.size(), " tokens");
    std::vector<Run> runs;
    for (std::size_t i = 0, n = 1; i < cells.size(); i += n, n = 1) {
        const std::uint32_t left = plan().block_tokens() - cells[i] % plan().block_tokens();
        while (i + n < cells.size() && n < left && cells[i + n] == cells[i] + n) ++n;
        runs.push_back({this, cells[i], static_cast<std::uint32_t>(n), 0, i,
                        positions.empty() ? nullptr : &positions[i]});
    }
    write(runs, of_one(keys), of_one(values), false, executor);
}

void Blocks::read(std::span<const Blocks> tables, std::uint32_t first, std::uint32_t count,
                  const BatchRowsOut& keys, const BatchRowsOut& values, Executor& executor) {
    if (count == 0) return;
    const Plan& plan = tables.front().plan();
    const std::uint32_t tokens = plan.block_tokens(), end = first + count;
    struct Piece {
        const Plan* packed_by;
        const std::byte* block;
        std::size_t sequence;
        std::uint32_t cell, count;
    };
    std::vector<Piece> absent, exact, packed;
    for (std::size_t s = 0; s < tables.size(); ++s) {
        for (std::uint32_t cell = first, n = 0; cell < end; cell += n) {
            n = std::min(end - cell, tokens - cell % tokens);
            const cache::Block* block = tables[s].at(cell / tokens);
            const bool is_packed = block != nullptr && block->rung > 0;
            (block == nullptr ? absent
             : is_packed      ? packed
                              : exact)
                .push_back({is_packed ? &tables[s].plan_of(block->rung) : nullptr,
                            block == nullptr ? nullptr : block->data, s, cell, n});
        }
    }
    Store::Impl& store = tables.front().store_->impl();
    std::vector<BlockRows<const std::byte>> runs;
    const auto give = [&](std::span<const Piece> pieces) {
        for (const Part part : {Part::keys, Part::values}) {
            const BatchRowsOut& all = part == Part::keys ? keys : values;
            if (all.data == nullptr || pieces.empty()) continue;
            const RowsOut rows{all.data, all.strides.head, all.strides.token};
            runs.clear();
            for (const Piece& piece : pieces)
                runs.push_back({piece.block, piece.cell % tokens, piece.count,
                                offset(all.strides, piece.sequence, piece.cell - first)});
            if (pieces.front().block != nullptr) {
                store.device.read_rows(plan, part, runs, rows, executor);
                continue;
            }
            executor.parallel_for(runs.size(), [&](std::size_t i, unsigned) noexcept {
                clear(plan.shape(), part, cache::rows_at(rows, plan.rows(), runs[i].at),
                      runs[i].count, cache::bytes_of(plan.rows()));
            });
        }
    };
    give(absent);
    give(exact);
    const std::size_t most = most_tokens / tokens;
    const cache::Slots scratch(store, cache::Slots::As::scratch, plan.exact_bytes(),
                               std::min(packed.size(), most));
    cache::Decoding decoded;
    for (std::size_t done = 0; done < packed.size(); done += most) {
        const auto turn = std::span(packed).subspan(done, std::min(packed.size() - done, most));
        decoded.clear();
        for (std::size_t i = 0; i < turn.size(); ++i)
            decoded[turn[i].packed_by].push_back(
                {std::exchange(turn[i].block, scratch[i]), scratch[i]});
        cache::decode(store.device, decoded, executor);
        give(turn);
    }
    store.device.finish();
}

std::int32_t Blocks::position(std::uint32_t cell) const noexcept {
    const cache::Block* block = at(cell / plan().block_tokens());
    if (block == nullptr || !plan().has_positions()) return static_cast<std::int32_t>(cell);
    const std::size_t offset = block->rung > 0 ? plan_of(block->rung).keys().positions_offset()
                                               : plan().exact_positions_offset();
    std::int32_t position = 0;
    device().copy_out(&position,
                      block->data + offset + sizeof position * (cell % plan().block_tokens()),
                      sizeof position);
    return position;
}

// Rows of a block's worth of cells into an exact block of plan `as`; zeros if none of them is
// there.
void Blocks::gather(std::span<const std::uint32_t> cells, const Plan& as, std::byte* to) const {
    const auto tokens = static_cast<std::uint32_t>(cells.size());
    const auto first = std::ranges::find_if(cells, [](auto c) { return c != no_cell; });
    if (first == cells.end()) return device().clear(to, as.exact_bytes());
    if (tokens != plan().block_tokens()) return convert(cells, *first, as, to);
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
        device().copy_rows(plan(), to, t, blocks_[known / tokens]->data, from, count, missing);
        if (!missing) known += count - 1;
        t += count;
    }
}

// The same where blocks are of another length: by rows in the host's memory.
void Blocks::convert(std::span<const std::uint32_t> cells, std::uint32_t first, const Plan& as,
                     std::byte* to) const {
    const Shape& shape = plan().shape();
    const std::uint32_t tokens = plan().block_tokens();
    const std::size_t row = shape.channels() * element_bytes(plan().rows());
    std::vector<std::byte> rows(cells.size() * row);
    for (const Part part : plan().stored_parts()) {
        for (std::uint32_t t = 0, count = 1; t < cells.size(); t += count, count = 1) {
            std::byte* its = rows.data() + t * row;
            if (cells[t] == no_cell && t > 0) {
                std::copy_n(its - row, row, its);
                continue;
            }
            const std::uint32_t from = (t == 0 ? first : cells[t]) % tokens;
            const std::byte* block = blocks_[(t == 0 ? first : cells[t]) / tokens]->data;
            while (cells[t] != no_cell && t + count < cells.size() && from + count < tokens &&
                   cells[t + count] == cells[t] + count)
                ++count;
            const BlockRows<const std::byte> run{block, from, count};
            device().read_rows(plan(), part, {&run, 1}, {its, shape.head_dim, shape.channels()},
                               serial_executor());
            device().finish();
        }
        const BlockRows<std::byte> all{to, 0, as.block_tokens()};
        device().write_rows(as, part, {&all, 1},
                            {rows.data(), plan().rows(), shape.head_dim, shape.channels()},
                            serial_executor());
        device().finish();
    }
}

}  // namespace lowkv
