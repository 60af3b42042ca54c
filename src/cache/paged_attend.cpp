// Attention to pages in place: a step's sequences at once.

#include <algorithm>

#include "attention/query.h"
#include "cache/paged_step.h"
#include "cache/store.h"
#include "lowkv/device.h"
#include "round.h"

namespace lowkv {

// The views of a sequence's pages from first_page on, those in its window marked as seen.
void PagedLayer::set_views(const PagedSequence& sequence, std::size_t first_page, Step& step) {
    const std::uint64_t window_first = left_window(retention_, sequence.cells);
    const std::size_t pages = ceil_div(sequence.cells, page_tokens_);
    for (std::size_t p = first_page; p < pages; ++p) {
        if (sequence.pages[p] < 0 || static_cast<std::uint32_t>(sequence.pages[p]) >= memory_.pages)
            refuse("page ", sequence.pages[p], " of ", memory_.pages);
        const auto number = static_cast<std::uint32_t>(sequence.pages[p]);
        const std::size_t end = std::min<std::size_t>((p + 1) * page_tokens_, sequence.cells);
        Beside* beside = in_place() ? nullptr : valid(number);
        const bool exact = beside != nullptr && has_rows(number);
        if (exact) {
            if (end - p * page_tokens_ > beside->rows) {
                refuse("cell ", end - 1, " of a sequence is row ", (end - 1) % page_tokens_,
                       " of page ", number, ", of which ", beside->rows, " have been written");
            }
            beside->used = step_;
            if (!beside->packed) beside->first = p == 0 && sinks_ > 0;
            if ((p + 1) * page_tokens_ > window_first) beside->seen = step_;
        }
        if (beside == nullptr && !in_place()) require_seal(number);
        const std::size_t bytes = in_place() ? plan_->exact_bytes() : plan_->packed_bytes();
        const std::size_t keys = in_place() ? plan_->exact_part_bytes() : plan_->keys().bytes();
        for (std::uint32_t b = 0; b < page_blocks_; ++b) {
            const std::byte* block = page(number) + b * bytes;
            step.views.push_back(exact ? rows_.view(first_slot(number) + b)
                                       : BlockView{block, block + keys, !in_place()});
        }
    }
}

void PagedLayer::find_pages(std::span<const PagedSequence> sequences, Step& step) {
    for (const PagedSequence& sequence : sequences) {
        if (sequence.queries > sequence.cells ||
            sequence.pages.size() < ceil_div(sequence.cells, page_tokens_))
            refuse(sequence.pages.size(), " pages and ", sequence.queries, " queries for ",
                   sequence.cells, " cells");
        Step::Part part;
        // The cells from the first on that the first query of the step sees.
        const std::uint64_t seen = std::uint64_t{sliding_} + sequence.queries - 1;
        if (sliding_ > 0 && sequence.queries > 0 && sequence.cells > seen)
            part.first_cell = sequence.cells - static_cast<std::uint32_t>(seen);
        part.first_page = part.first_cell / page_tokens_;
        part.first_view = step.views.size();
        set_views(sequence, part.first_page, step);
        if (sinks_ > 0 && sequence.queries > 0 && sequence.cells >= page_tokens_) {
            const auto first = static_cast<std::uint32_t>(sequence.pages[0]);
            if (!has_rows(first) && has_sinks(first)) part.sinks = first;
        }
        step.parts.push_back(part);
    }
}

// Queries of sequences whose first page the layer knows, which weigh the statistics that they make.
void PagedLayer::update_query_stats(std::span<const PagedSequence> sequences, const Step& step) {
    for (std::size_t s = 0; s < sequences.size(); ++s) {
        const AttentionIO& io = step.attended[s].io;
        if (io.tokens == 0) continue;
        Beside* first =
            beside_[static_cast<std::uint32_t>(sequences[s].pages[step.parts[s].first_page])].get();
        if (first == nullptr) continue;
        if (first->queries == nullptr) first->queries = std::make_unique<QueryEnergy>();
        if (!first->queries->wanted()) continue;
        first->queries->add(plan_->shape(),
                            {io.q, io.q_token_stride, io.q_head_stride, io.tokens, io.heads});
    }
}

void PagedLayer::attend(std::span<const PagedSequence> sequences, const AttentionIO& io,
                        const AttentionParams& params, AttentionWorkspace& workspace,
                        Executor& executor) {
    if (io.lse != nullptr) refuse("attention to pages leaves no lse");
    ++step_;
    Step step;
    find_pages(sequences, step);
    sink_blocks(step);
    step.pieces.reserve(2 * sequences.size());
    for (std::size_t s = 0; s < sequences.size(); ++s) {
        const PagedSequence& sequence = sequences[s];
        const Step::Part& part = step.parts[s];
        const auto before = static_cast<std::uint32_t>(part.first_page) * page_tokens_;
        const std::size_t views =
            (s + 1 < step.parts.size() ? step.parts[s + 1].first_view : step.views.size()) -
            part.first_view;
        const std::size_t first = step.pieces.size();
        // The first rows, which come first, are better than those of their page.
        if (part.sinks)
            step.pieces.push_back({&sink_rows_.plan(), step.sinks[*part.sinks], 0, sinks_});
        step.pieces.push_back({plan_.get(), std::span(step.views).subspan(part.first_view, views),
                               before, sequence.cells - before});
        PiecewiseAttention& attended = step.attended.emplace_back();
        attended.pieces = std::span(step.pieces).subspan(first);
        attended.mask = {.kind = Mask::Kind::causal, .window = sliding_};
        attended.io = io;
        attended.io.q = io.q + sequence.first_query * io.q_token_stride;
        attended.io.out = io.out + sequence.first_query * io.out_token_stride;
        attended.io.tokens = sequence.queries;
        attended.io.n_cells = sequence.cells;
        attended.io.first_cell = part.first_cell;
    }
    lowkv::attend(store_->device(), step.attended, params, workspace, executor);
    sink_rows_.drop_from(0);
    if (plan_->wants_queries()) update_query_stats(sequences, step);
    if (!in_place()) pack_full(sequences, step, executor);
}

}  // namespace lowkv
