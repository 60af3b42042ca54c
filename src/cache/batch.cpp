// A batch's life; src/attention/batch.cpp attends, batch_image.cpp saves and loads.

#include "lowkv/batch.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "lowkv/device.h"
#include "lowkv/error.h"
#include "round.h"

namespace lowkv {
namespace {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... message) {
    throw Error(ErrorCode::invalid_argument, "Batch: ", message...);
}

}  // namespace

Batch::Batch(const std::shared_ptr<Store>& store, Blocks::Ladder ladder, const Retention& retention,
             std::uint32_t sequences)
    : retention_(retention) {
    if (sequences == 0) refuse("a batch of 0 sequences; it needs at least 1");
    sequences_.reserve(sequences);
    const auto shared = std::make_shared<const Blocks::Ladder>(std::move(ladder));
    while (sequences_.size() < sequences) sequences_.emplace_back(store, shared);
    // A FilteredSequence serves filters.
    require_served({plan().scheme(), retention_, {}}, Host::sequence);
    if (shared->size() > 1 && &device() != cpu_device().get())
        refuse("rungs are for the CPU alone");
    state_.packed_first = state_.packed_end = batch_retention(plan(), retention_).sinks;
    state_.queries.resize(sequences);
}

Batch::Batch(const std::shared_ptr<Store>& store, const std::shared_ptr<const Plan>& plan,
             Retention retention, std::uint32_t sequences,
             std::vector<std::shared_ptr<const Plan>> rungs)
    : Batch(store, (rungs.push_back(plan), std::move(rungs)),
            plan != nullptr ? batch_retention(*plan, retention) : retention, sequences) {}

Retention batch_retention(const Plan& plan, Retention retention) noexcept {
    if (plan.scheme().exact()) retention.sinks = 0;
    return whole_sinks(retention, plan.block_tokens());
}

BatchBytes Batch::bytes() const {
    std::vector<std::tuple<const std::byte*, bool, std::size_t>> held;
    for (const Blocks& sequence : sequences_)
        for (std::uint32_t b = 0; b < sequence.slots(); ++b)
            held.emplace_back(sequence.view(b).keys, sequence.packed(b), sequence.bytes(b));
    std::ranges::sort(held);
    held.erase(std::unique(held.begin(), held.end()), held.end());
    BatchBytes bytes;
    for (const auto& [block, packed, its] : held) (packed ? bytes.packed : bytes.exact) += its;
    return bytes;
}

std::uint32_t Batch::exact_tokens() const {
    std::uint32_t most = 0;
    for (const Blocks& sequence : sequences_) {
        std::uint32_t exact = state_.tokens - state_.first;
        for (std::uint32_t b = 0; b < sequence.slots(); ++b)
            if (sequence.packed(b)) exact -= plan().block_tokens();
        most = std::max(most, exact);
    }
    return most;
}

void Batch::append(const BatchRows& keys, const BatchRows& values, std::uint32_t tokens,
                   std::span<const std::int32_t> positions) {
    if (!positions.empty() && positions.size() != std::size_t{tokens} * size())
        throw Error(ErrorCode::invalid_argument, positions.size(), " positions do not belong to ",
                    tokens, " tokens");
    const std::uint64_t end = std::uint64_t{state_.tokens} + tokens;
    if (end > Blocks::max_cells) refuse(end, " tokens; a sequence has at most ", Blocks::max_cells);
    std::vector<Blocks::Run> runs;
    const std::uint32_t block_tokens = plan().block_tokens();
    runs.reserve(size() * (tokens / block_tokens + 2));
    for (std::size_t s = 0; s < size(); ++s)
        for (std::uint32_t done = 0, n = 0; done < tokens; done += n) {
            const std::uint32_t cell = state_.tokens + done;
            n = std::min(tokens - done, block_tokens - cell % block_tokens);
            runs.push_back({&sequences_[s], cell, n, s, done,
                            positions.empty() ? nullptr : &positions[s * tokens + done]});
        }
    Blocks::write(runs, keys, values, true, serial_executor());
    state_.tokens += tokens;
}

void Batch::update_query_stats(const float* q, const BatchStrides& strides, std::uint32_t queries,
                               std::uint32_t heads, std::uint32_t weight) {
    for (std::uint32_t s = 0; s < size(); ++s)
        update_query_stats(
            s, {q + s * strides.sequence, strides.token, strides.head, queries, heads, weight});
}

void Batch::update_query_stats(std::uint32_t sequence, const QueryRows& queries) {
    if (sequence >= size()) refuse("sequence ", sequence, " of ", size());
    if (plan().wants_queries()) state_.queries[sequence].add(plan().shape(), queries);
}

bool Batch::wants_queries() const noexcept {
    return plan().wants_queries() && std::ranges::any_of(state_.queries, &QueryEnergy::wanted);
}

void Batch::mark_padding(std::span<const std::uint8_t> seen, std::uint32_t count) {
    if (count > state_.tokens || seen.size() != std::size_t{count} * size())
        refuse("mark_padding() of ", seen.size(), " marks for ", count, " of ", state_.tokens,
               " tokens of ", size(), " sequences");
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
    if (budget == 0) return pack_due(spared, true, executor);
    if (plan().scheme().exact()) return;
    std::vector<Due> dues;
    for (std::size_t s = 0; s < size(); ++s) dues.push_back(due(s, spared));
    pack_within(budget, dues, executor);
}

void Batch::pack_due(std::uint32_t spared, bool apart, Executor& executor) {
    if (plan().scheme().exact()) return;
    std::vector<Blocks::Packing> places;
    std::uint32_t looked = ~0u, end = 0;
    for (std::size_t s = 0; s < size(); ++s) {
        const Due its = due(s, spared);
        for (std::uint32_t b = state_.looked; b < its.end; ++b)
            if (its.has(b)) places.push_back(packing(s, b));
        looked = std::min(looked, its.end);
        end = std::max(end, its.end);
    }
    Blocks::pack(std::move(places), {.rung = last_rung(), .apart = apart}, executor);
    state_.looked = std::max(state_.looked, looked);
    state_.packed_end = std::max(state_.packed_end, end * plan().block_tokens());
}

void Batch::read(std::uint32_t first, std::uint32_t count, const BatchRowsOut& keys,
                 const BatchRowsOut& values, Executor& executor, std::uint32_t sequence,
                 std::uint32_t sequences) const {
    if (sequences == 0 || std::uint64_t{sequence} + sequences > size())
        refuse("read() of ", sequences, " sequences from ", sequence, " on, of ", size());
    const std::uint64_t end = std::uint64_t{first} + count;
    if (first < state_.first || end > state_.tokens)
        refuse("tokens ", first, " to ", end, " are not among those held, ", state_.first, " to ",
               state_.tokens);
    Blocks::read(std::span(sequences_).subspan(sequence, sequences), first, count, keys, values,
                 executor);
}

void Batch::select(std::span<const std::uint32_t> rows) {
    if (in_step()) refuse("select() in an open step: commit() or rollback() it first");
    if (rows.empty()) refuse("select() of no sequences; a batch needs at least 1");
    std::vector<Blocks> selected;
    std::vector<std::vector<Range>> padding;
    std::vector<QueryEnergy> queries;
    selected.reserve(rows.size());
    for (const std::uint32_t row : rows) {
        if (row >= size()) refuse("sequence ", row, " of ", size());
        selected.push_back(sequences_[row].fork());
        queries.push_back(state_.queries[row]);
        if (!state_.padding.empty()) padding.push_back(state_.padding[row]);
    }
    sequences_ = std::move(selected);
    state_.padding = std::move(padding);
    state_.queries = std::move(queries);
}

void Batch::truncate(std::uint32_t tokens) {
    if (tokens < state_.first)
        refuse("can't go back to ", tokens, " tokens: those before ", state_.first, " are dropped");
    if (tokens == 0) std::ranges::fill(state_.queries, QueryEnergy());
    if (tokens >= state_.tokens) return;
    const std::uint32_t block_tokens = plan().block_tokens(), last = tokens / block_tokens;
    State then = state_;
    then.tokens = tokens;
    then.looked = std::min(then.looked, last);
    then.packed_end = std::max(std::min(then.packed_end, last * block_tokens), then.packed_first);
    for (std::vector<Range>& ranges : then.padding) {
        std::erase_if(ranges, [&](const Range& range) { return range.first >= tokens; });
        if (!ranges.empty()) ranges.back().end = std::min(ranges.back().end, tokens);
    }
    std::vector<Blocks::Run> cut;
    for (Blocks& sequence : sequences_)
        if (tokens % block_tokens != 0 && sequence.packed(last))
            cut.push_back({&sequence, last * block_tokens, block_tokens, 0, 0});
    Blocks::open(cut);
    for (Blocks& sequence : sequences_) sequence.drop_from(ceil_div(tokens, block_tokens));
    state_ = std::move(then);
}

void Batch::drop_before(std::uint32_t token) noexcept {
    const std::uint32_t tokens = plan().block_tokens();
    const std::uint32_t end = std::min(token, state_.tokens) / tokens;
    for (std::uint32_t b = state_.first / tokens; b < end; ++b) {
        for (Blocks& sequence : sequences_) sequence.drop(std::span(&b, 1));
    }
    if (end * tokens <= state_.first) return;
    state_.first = end * tokens;
    state_.packed_first = std::max(state_.packed_first, state_.first);
    state_.packed_end = std::max(state_.packed_end, state_.packed_first);
}

void Batch::begin() {
    if (!in_step()) begun_ = state_;
    std::size_t begun = 0;
    try {
        for (; begun < sequences_.size(); ++begun) sequences_[begun].begin(state_.tokens);
    } catch (...) {
        for (std::size_t s = 0; s < begun; ++s) sequences_[s].commit();
        throw;
    }
}

void Batch::commit() noexcept {
    for (Blocks& sequence : sequences_) sequence.commit();
}

void Batch::rollback() noexcept {
    if (!in_step()) return;
    for (Blocks& sequence : sequences_) sequence.rollback();
    std::swap(state_, begun_);
}

}  // namespace lowkv
