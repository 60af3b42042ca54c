// A batch's life; src/attention/batch.cpp attends, batch_image.cpp saves and loads.

#include "lowkv/batch.h"

#include <algorithm>
#include <string>
#include <utility>

#include "cache/block.h"
#include "lowkv/device.h"
#include "lowkv/error.h"
#include "round.h"

namespace lowkv {
namespace {

[[noreturn]] void refuse(const std::string& message) {
    throw Error(ErrorCode::invalid_argument, "Batch: " + message);
}

}  // namespace

Batch::Batch(const std::shared_ptr<Store>& store, const std::shared_ptr<const Plan>& plan,
             Retention retention, std::uint32_t sequences,
             std::vector<std::shared_ptr<const Plan>> finer)
    : finer_(std::move(finer)) {
    if (sequences == 0) refuse("a batch of 0 sequences; it needs at least 1");
    if (plan != nullptr) retention = batch_retention(*plan, retention);
    sequences_.reserve(sequences);
    while (sequences_.size() < sequences) sequences_.emplace_back(store, plan, retention);
    for (const auto& rung : finer_) sequences_.front().check_rows(Sequence(store, rung, retention));
    if (!finer_.empty() && &device() != cpu_device().get())
        refuse("finer plans are for the CPU alone");
    state_.packed_first = state_.packed_end = retention.sinks;
}

Retention batch_retention(const Plan& plan, Retention retention) noexcept {
    if (plan.scheme().exact()) retention.sinks = 0;
    return whole_sinks(retention, plan.block_tokens());
}

BatchBytes Batch::bytes() const {
    std::vector<const cache::Block*> held;
    for (const Sequence& sequence : sequences_) {
        for (const cache::Block* block : sequence.blocks_) {
            if (block != nullptr) held.push_back(block);
        }
    }
    std::sort(held.begin(), held.end());
    held.erase(std::unique(held.begin(), held.end()), held.end());
    BatchBytes bytes;
    for (const cache::Block* block : held)
        (block->packed ? bytes.packed : bytes.exact) += block->bytes(plan());
    return bytes;
}

std::uint32_t Batch::exact_tokens() const {
    std::uint32_t most = 0;
    for (const Sequence& sequence : sequences_) {
        std::uint32_t exact = state_.tokens - state_.first;
        for (std::uint32_t b = 0; b < sequence.blocks(); ++b)
            if (sequence.packed(b)) exact -= plan().block_tokens();
        most = std::max(most, exact);
    }
    return most;
}

void Batch::append(const BatchRows& keys, const BatchRows& values, std::uint32_t tokens) {
    Sequence::append(sequences_, keys, values, tokens, {});
    state_.tokens += tokens;
}

void Batch::update_query_stats(const float* q, const BatchStrides& strides, std::uint32_t queries,
                               std::uint32_t heads, std::uint32_t weight) {
    for (std::size_t s = 0; s < sequences_.size(); ++s)
        sequences_[s].update_query_stats(
            {q + s * strides.sequence, strides.token, strides.head, queries, heads, weight});
}

void Batch::update_query_stats(std::uint32_t sequence, const QueryRows& queries) {
    if (sequence >= size())
        refuse("sequence " + std::to_string(sequence) + " of " + std::to_string(size()));
    sequences_[sequence].update_query_stats(queries);
}

bool Batch::wants_queries() const noexcept {
    return std::ranges::any_of(sequences_, &Sequence::wants_queries);
}

void Batch::mark_padding(std::span<const std::uint8_t> seen, std::uint32_t count) {
    if (count > state_.tokens || seen.size() != std::size_t{count} * size())
        refuse("mark_padding() of " + std::to_string(seen.size()) + " marks for " +
               std::to_string(count) + " of " + std::to_string(state_.tokens) + " tokens of " +
               std::to_string(size()) + " sequences");
    if (plan().scheme().exact() || std::ranges::find(seen, 0) == seen.end()) return;
    State then = state_;
    then.padding.resize(size());
    for (std::size_t i = 0; i < seen.size(); ++i) {
        if (seen[i] != 0) continue;
        std::vector<Range>& ranges = then.padding[i / count];
        const auto token = static_cast<std::uint32_t>(state_.tokens - count + i % count);
        if (ranges.empty() || ranges.back().end < token)
            ranges.push_back({token, token + 1});
        else
            ranges.back().end = token + 1;
    }
    state_ = std::move(then);
}

Batch::Due Batch::due(std::size_t sequence, std::uint32_t spared) const noexcept {
    std::span<const Range> padding;
    if (!state_.padding.empty()) padding = state_.padding[sequence];
    std::uint32_t seen = state_.tokens;
    for (const Range& gap : padding) seen -= gap.end - gap.first;
    // Where token number `number` is of those that are no padding.
    const auto place = [&](std::uint64_t number) {
        for (const Range& gap : padding) {
            if (number < gap.first) break;
            number += gap.end - gap.first;
        }
        return std::min<std::uint64_t>(number, state_.tokens);
    };
    const std::uint32_t tokens = plan().block_tokens(), sinks = retention().sinks;
    const std::uint64_t left = left_window(retention(), seen - std::min(spared, seen));
    Due due{{}, static_cast<std::uint32_t>(place(left) / tokens)};
    if (sinks > 0)
        due.sinks = {
            static_cast<std::uint32_t>(place(0) / tokens),
            static_cast<std::uint32_t>(ceil_div<std::uint64_t>(place(sinks - 1) + 1, tokens))};
    return due;
}

void Batch::pack(std::uint32_t spared, Executor& executor, std::size_t budget) {
    if (plan().scheme().exact()) return;
    const std::uint32_t tokens = plan().block_tokens();
    std::vector<Due> dues;
    for (std::size_t s = 0; s < size(); ++s) dues.push_back(due(s, spared));
    if (budget > 0) return pack_within(budget, dues, executor);
    std::vector<Sequence::Packing> places;
    for (std::size_t s = 0; s < size(); ++s) {
        Sequence& sequence = sequences_[s];
        for (std::uint32_t b = std::max(sequence.next_due_, state_.first / tokens); b < dues[s].end;
             ++b)
            if (dues[s].has(b)) places.push_back({{&sequence, b}});
    }
    Sequence::pack(places, true, executor);
    for (std::size_t s = 0; s < size(); ++s) {
        sequences_[s].next_due_ = std::max(sequences_[s].next_due_, dues[s].end);
        state_.packed_end = std::max(state_.packed_end, dues[s].end * tokens);
    }
}

void Batch::read(std::uint32_t first, std::uint32_t count, const BatchRowsOut& keys,
                 const BatchRowsOut& values, Executor& executor, std::uint32_t sequence,
                 std::uint32_t sequences) const {
    if (sequences == 0 || std::uint64_t{sequence} + sequences > size())
        refuse("read() of " + std::to_string(sequences) + " sequences from " +
               std::to_string(sequence) + " on, of " + std::to_string(size()));
    const std::uint64_t end = std::uint64_t{first} + count;
    if (first < state_.first || end > state_.tokens)
        refuse("tokens " + std::to_string(first) + " to " + std::to_string(end) +
               " are not among those held, " + std::to_string(state_.first) + " to " +
               std::to_string(state_.tokens));
    Sequence::read(std::span(sequences_).subspan(sequence, sequences), first, count, keys, values,
                   executor);
}

void Batch::select(std::span<const std::uint32_t> rows) {
    if (in_step()) refuse("select() in an open step: commit() or rollback() it first");
    if (rows.empty()) refuse("select() of no sequences; a batch needs at least 1");
    std::vector<Sequence> selected;
    std::vector<std::vector<Range>> padding;
    selected.reserve(rows.size());
    for (const std::uint32_t row : rows) {
        if (row >= size())
            refuse("sequence " + std::to_string(row) + " of " + std::to_string(size()));
        selected.push_back(sequences_[row].fork());
        if (!state_.padding.empty()) padding.push_back(state_.padding[row]);
    }
    sequences_ = std::move(selected);
    state_.padding = std::move(padding);
}

Batch Batch::fork() const {
    Batch fork;
    fork.sequences_.reserve(sequences_.size());
    for (const Sequence& sequence : sequences_) fork.sequences_.push_back(sequence.fork());
    fork.finer_ = finer_;
    fork.state_ = state_;
    return fork;
}

void Batch::truncate(std::uint32_t tokens) {
    if (tokens < state_.first)
        refuse("can't go back to " + std::to_string(tokens) + " tokens: those before " +
               std::to_string(state_.first) + " are dropped");
    if (tokens == 0)
        for (Sequence& sequence : sequences_) sequence.queries_ = {};
    if (tokens >= state_.tokens) return;
    State then = state_;
    then.tokens = tokens;
    if (tokens < state_.packed_end) {
        const std::uint32_t block_tokens = plan().block_tokens(), last = tokens / block_tokens;
        then.packed_end = std::max(last * block_tokens, state_.packed_first);
        std::vector<Sequence::Place> cut;
        for (Sequence& sequence : sequences_)
            if (tokens % block_tokens != 0 && sequence.packed(last))
                cut.push_back({&sequence, last});
        if (!cut.empty()) Sequence::make_writable(cut, 0);
    }
    for (std::vector<Range>& ranges : then.padding) {
        std::erase_if(ranges, [&](const Range& range) { return range.first >= tokens; });
        if (!ranges.empty()) ranges.back().end = std::min(ranges.back().end, tokens);
    }
    for (Sequence& sequence : sequences_) sequence.truncate(tokens);
    state_ = std::move(then);
}

void Batch::drop_before(std::uint32_t token) noexcept {
    const std::uint32_t tokens = plan().block_tokens();
    const std::uint32_t end = std::min(token, state_.tokens) / tokens;
    for (std::uint32_t b = state_.first / tokens; b < end; ++b) {
        for (Sequence& sequence : sequences_) sequence.drop(std::span(&b, 1));
    }
    if (end * tokens <= state_.first) return;
    state_.first = end * tokens;
    state_.packed_first = std::max(state_.packed_first, state_.first);
    state_.packed_end = std::max(state_.packed_end, state_.packed_first);
}

void Batch::begin() {
    State then = state_;
    std::size_t begun = 0;
    try {
        for (; begun < sequences_.size(); ++begun) sequences_[begun].begin();
    } catch (...) {
        for (std::size_t s = 0; s < begun; ++s) sequences_[s].commit();
        throw;
    }
    begun_ = std::move(then);
}

void Batch::commit() noexcept {
    for (Sequence& sequence : sequences_) sequence.commit();
}

void Batch::rollback() noexcept {
    if (!in_step()) return;
    for (Sequence& sequence : sequences_) sequence.rollback();
    state_ = std::move(begun_);
}

}  // namespace lowkv
