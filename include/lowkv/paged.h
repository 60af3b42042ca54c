#pragma once
// One layer's cache in pages that a host numbers and hands out itself: vLLM's blocks. They lie in
// memory of the store's device, the host's own or the layer's.
//
// A page is a whole number of lowkv's blocks, packed. What the host's memory can't hold lies beside
// it, by the page's number: exact rows of pages that are not full or still in a sequence's window,
// and the sinks of pages that begin a sequence, unless pages are whole. The host says nothing of
// pages that it frees, and need not: a row at offset 0 says that the page is new.
//
//   write(rows, slots)   rows go to the exact rows beside their pages
//   attend(sequences)    pages are read in place, exact or packed; then every page that has become
//                        full is packed, once, into the host's memory. From then on that is all
//                        that others who share, copy or save the page need; the exact rows beside
//                        it are better, and dropped when no sequence of a step has them in its
//                        window; those of a first page stay while there is room.
//
// Sequences that share a page share its statistics: a page is encoded like the one before it in its
// sequence, so that they are those of the sequence's first page, or of its first page of enough
// different rows.
//
// A page that isn't packed, or not any more, has marks of the layer's in the host's memory, and one
// that is packed is remembered by some of its bytes: where they have changed someone else has
// written the page, and its bytes count, not what lies beside it. A host whose pages come from
// elsewhere, packed by another process, asks for pages that are whole (PageMemory::whole).
//
// A layer is used by one thread at a time. Every operation that throws because of what it was given
// leaves the layer as it was.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "lowkv/attention.h"
#include "lowkv/cache.h"
#include "lowkv/device.h"

namespace lowkv {

// Of the store's device. Without `data` the layer takes it there, outside of the store's budget,
// stride included: nobody else writes those pages, and nobody looks whether someone has.
struct PageMemory {
    std::byte* data = nullptr;  // a multiple of 64
    std::size_t stride = 0;     // bytes from one page to the next: a multiple of 64
    std::uint32_t pages = 0;
    // Pages carry all that a sequence needs of them: their first rows, should they be sinks, and
    // what they were packed with. One that was packed with something else is refused. An exact
    // scheme's pages are whole anyway. Not of pages in the layer's memory.
    bool whole = false;
};

// A sequence's part of a step: its newest `queries` tokens attend.
struct PagedSequence {
    std::span<const std::int32_t> pages;  // of its cells, in order; those out of sight may be stale
    std::uint32_t cells = 0;              // tokens, those of the step included
    std::uint32_t queries = 0;
    std::uint32_t first_query = 0;  // its first row of q and out
};

struct PagedStats {
    std::size_t exact_pages = 0, most_exact_pages = 0;  // with exact rows beside them
    std::size_t exact_bytes = 0, sink_bytes = 0;        // beside the host's memory, now
    std::uint64_t packed = 0;                           // pages, since the layer was made
    std::uint64_t reopened = 0;  // decoded again, because they were written again
    std::uint64_t evicted = 0;   // packed before they were full, because `spare` was reached
    std::uint64_t replaced = 0;  // overwritten by someone else
};

class PagedLayer {
  public:
    // retention: the window and sinks of each sequence; a filter or flush is refused. `sliding`, if
    // not 0, is how many of the newest tokens a query sees; there are no sinks then. `spare`: pages
    // that may keep exact rows though no sequence of the last step needs them, the newest first:
    // those of sequences that wait, and the first pages of sequences with sinks.
    // Throws Error(invalid_argument) for pages that are no whole number of the plan's blocks or do
    // not fit in the stride, Error(unsupported) for codecs that need tokens' positions, and what
    // Device::allocate() throws.
    PagedLayer(std::shared_ptr<Store> store, std::shared_ptr<const Plan> plan,
               const Retention& retention, std::uint32_t sliding, std::uint32_t page_tokens,
               const PageMemory& memory, std::uint32_t spare);
    PagedLayer(const PagedLayer&) = delete;
    PagedLayer& operator=(const PagedLayer&) = delete;

    // What a page takes of the host's memory. An exact scheme's pages are exact rows themselves.
    static std::size_t page_bytes(const Plan& plan, std::uint32_t page_tokens);
    // ... of whole pages with so many sinks.
    static std::size_t whole_page_bytes(const Plan& plan, std::uint32_t page_tokens,
                                        std::uint32_t sinks);

    const Plan& plan() const noexcept { return *plan_; }
    // Where the pages are.
    const PageMemory& memory() const noexcept { return memory_; }
    PagedStats stats() const noexcept;

    // Row i of each, [token][head][channel], goes to cell slots[i] % page_tokens of page slots[i] /
    // page_tokens; a negative slot to none. A page is written from its first cell on; rows written
    // again (a guess that was rejected) end what the page has. Rows beside pages count in the
    // store's budget: Error(over_budget).
    void write(const Rows& keys, const Rows& values, std::span<const std::int64_t> slots);

    // io: q and out of all of the step's tokens, in the host's memory, whatever the device, because
    // the layer sums up queries itself. Which are whose, and how many cells there are, the
    // sequences say; params.mask is not used, attention is causal. io.lse is not served. Throws
    // Error(invalid_argument), besides for what attention.h says, for cells that were never
    // written, and for whole pages that were packed with something else.
    void attend(std::span<const PagedSequence> sequences, const AttentionIO& io,
                const AttentionParams& params, AttentionWorkspace& workspace,
                Executor& executor = serial_executor());

  private:
    // Some bytes of a page in the host's memory, from all over it: where they have changed, someone
    // else has written the page.
    using Mark = std::array<std::byte, 64>;
    // What lies beside a page of the host's.
    struct Beside {
        std::uint32_t rows = 0;  // written
        bool packed = false;     // what the host's memory has is valid
        bool first = false;      // of a sequence that was seen, with sinks
        std::uint64_t used = 0;  // the last step that read or wrote it
        std::uint64_t seen = 0;  // the last step with it in a sequence's window
        Mark mark{};             // of the page as the layer has left it
        // Of the sequence that begins with the page, until a page of it leads.
        std::unique_ptr<QueryEnergy> queries;
        std::vector<std::byte> sinks;  // rows, keys then values, of a sequence's first page, not of
                                       // a whole one
    };
    // A page to be packed.
    struct Due {
        std::uint32_t page;
        std::optional<std::uint32_t> before = std::nullopt;  // in its sequence
        QueryEnergy* queries = nullptr;                      // of its sequence
    };
    struct Step;

    std::shared_ptr<Store> store_;
    std::shared_ptr<const Plan> plan_;
    Blocks rows_;       // exact rows beside pages: cell = page * page_tokens + offset
    Blocks sink_rows_;  // of one step's sinks that lie apart
    Retention retention_;
    std::uint32_t sinks_, sliding_, page_tokens_, spare_;
    std::uint32_t page_blocks_ = 0;
    std::size_t page_bytes_ = 0;
    std::uint64_t seal_ = 0;  // what whole pages are packed with
    PageMemory memory_;
    DeviceMemory own_memory_;                      // of pages that the host has no memory for
    std::vector<std::unique_ptr<Beside>> beside_;  // by page; null: nothing
    std::vector<std::uint32_t> exact_;             // the pages with exact rows, in no order
    std::vector<Blocks::Run> runs_;                // scratch, of write()
    std::uint64_t step_ = 0;
    std::uint64_t opened_;  // pages, from a number on that is the layer's own
    PagedStats stats_;

    bool in_place() const noexcept { return plan_->scheme().exact(); }
    bool own() const noexcept { return own_memory_.data() != nullptr; }
    std::byte* page(std::uint32_t number) const noexcept {
        return memory_.data + number * memory_.stride;
    }
    std::span<const Blocks::Run> runs_of(std::span<const std::int64_t> slots);
    void check_runs(std::span<const Blocks::Run> runs) const;
    std::uint32_t page_of(const Blocks::Run& run) const noexcept { return run.cell / page_tokens_; }
    std::uint32_t first_slot(std::uint32_t number) const noexcept { return number * page_blocks_; }
    // Beside the page; without them it is only packed.
    bool has_rows(std::uint32_t number) const noexcept {
        return rows_.view(first_slot(number)).keys != nullptr;
    }
    void put_codes(std::span<const std::uint32_t> pages);
    void open(std::span<const Blocks::Run> runs);
    void fill(Blocks& table, std::uint32_t first, std::uint32_t count,
              std::span<const std::byte> rows, std::size_t stride) const;
    void write_in_place(std::span<const Blocks::Run> runs, const Rows& keys, const Rows& values);
    // Of a key and a value.
    static std::size_t row_bytes(const Plan& plan) {
        return 2 * plan.shape().channels() * element_bytes(plan.rows());
    }
    template <class F>
    void each_piece(std::uint32_t number, Mark& mark, F f) const;
    Mark mark_of(std::uint32_t number) const noexcept;
    void mark_open(std::uint32_t number) noexcept;
    Beside* valid(std::uint32_t number);
    void drop_rows(std::uint32_t number) noexcept;
    void close(std::uint32_t number) noexcept;
    void forget(std::uint32_t number) noexcept;

    void find_pages(std::span<const PagedSequence> sequences, Step& step);
    void set_views(const PagedSequence& sequence, std::size_t first_page, Step& step);
    void sink_blocks(Step& step);
    void pack_full(std::span<const PagedSequence> sequences, const Step& step, Executor& executor);
    std::vector<Due> find_due(std::span<const PagedSequence> sequences, const Step& step) const;
    void update_query_stats(std::span<const PagedSequence> sequences, const Step& step);
    const std::byte* statistics_of(std::uint32_t number) const;
    void pack(std::span<const Due> due, Executor& executor);
    static std::uint64_t seal_of(const Plan& plan, std::uint32_t page_tokens, std::uint32_t sinks);
    std::byte* seal(std::uint32_t number) const noexcept;
    void require_seal(std::uint32_t number) const;
    bool has_sinks(std::uint32_t number) const noexcept;
    std::vector<std::byte> sinks_of(std::uint32_t number) const;
    std::vector<std::byte> rows_at(std::uint32_t first, std::uint32_t count) const;
    void keep_sinks(std::uint32_t number);
    void drop_unseen() noexcept;
    void evict(Executor& executor);
};

}  // namespace lowkv
