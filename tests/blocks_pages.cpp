// Pages of a host's: for each the rows that it must have, the bytes that must be in the host's
// memory, and whether exact rows lie beside it. Sequences grow in chunks, share prefixes, take back
// tokens, end without a word, and come as bytes.

#include <tuple>

#include "blocks_owner.h"
#include "lowkv/paged.h"

using namespace lowkv;
using namespace blocks_test;

namespace {

constexpr std::uint32_t pages = 24;

struct Case {
    std::string scheme;
    Shape shape;
    RowType rows;
    std::uint32_t sliding = 0, spare = 4;
    bool whole = false;  // pages, and prefixes come as bytes at times
    bool own = false;    // the layer's memory, not the host's
    std::uint32_t page_tokens = 128;
};

struct Page {
    Tokens tokens = {};  // written, as they are read
    bool exact = false, packed = false, first = false;
    std::uint64_t used = 0;
    Tokens sinks = {};
    Bytes bytes = {};            // once packed
    Statistics statistics = {};  // that it took over or made, in the step that packed it
    std::uint64_t packed_in = 0;
};

struct Grown {
    std::vector<std::int32_t> pages;
    std::uint32_t cells = 0;
};

// What happened in all runs: a test in which nothing did says nothing.
struct Happened {
    std::uint64_t packed = 0, reopened = 0, evicted = 0, sinks = 0, carried = 0, replaced = 0;
} happened;

class Pages : public Owned {
  public:
    explicit Pages(const Case& c)
        : Owned({}, c.scheme, c.shape, c.rows),
          case_(c),
          retention_(parse_scheme(c.scheme).retention),
          page_tokens_(c.page_tokens),
          page_bytes_(c.whole ? PagedLayer::whole_page_bytes(*plan, page_tokens_, sinks())
                              : PagedLayer::page_bytes(*plan, page_tokens_)),
          pages_(pages),
          sequences_(1) {
        PageMemory memory{.pages = pages, .whole = c.whole};
        if (!c.own) {
            memory.stride = (page_bytes_ + 127) / 64 * 64;
            const Bytes garbage(pages * memory.stride, std::byte{0x3c});
            memory_ = DeviceMemory(store->device(), garbage.size());
            memory.data = memory_.data();
            store->device().copy_in(memory.data, garbage.data(), garbage.size());
        }
        layer_.emplace(store, plan, retention_, c.sliding, page_tokens_, memory, c.spare);
    }
    ~Pages() {
        layer_.reset();
        CHECK(store->stats().exact_blocks == 0);
        happened.packed += done_.packed;
        happened.reopened += done_.reopened;
        happened.evicted += done_.evicted;
        happened.sinks += done_.sinks;
        happened.carried += done_.carried;
        happened.replaced += done_.replaced;
    }

    static std::span<const Kind<Pages>> kinds() {
        using P = Pages;
        static constexpr Kind<P> all[] = {{"step", 55, &P::step},
                                          {"start", 12, &P::start},
                                          {"end", 10, &P::end},
                                          {"take back", 8, &P::take_back},
                                          {"carry", 15, &P::carry}};
        return all;
    }

    // The books, and the host's memory.
    void check() {
        const PagedStats stats = layer_->stats();
        std::size_t beside = 0, sink_bytes = 0;
        Bytes bytes(PagedLayer::page_bytes(*plan, page_tokens_));
        for (std::uint32_t i = 0; i < pages; ++i) {
            const Page& page = pages_[i];
            beside += page.exact && !exact() ? 1 : 0;
            if (!case_.whole)
                sink_bytes += 2 * page.sinks.size() * channels() * element_bytes(case_.rows);
            if (!page.packed) continue;
            store->device().copy_out(bytes.data(), address(i), bytes.size());
            if (bytes != page.bytes) FAIL_CHECK("page ", i);
        }
        CHECK(stats.exact_pages == beside);
        CHECK(stats.sink_bytes == sink_bytes);
        CHECK(stats.packed == done_.packed);
        CHECK(stats.reopened == done_.reopened);
        CHECK(stats.evicted == done_.evicted);
        CHECK(stats.replaced == done_.replaced);
        // Of a page that is not full, as many as its rows need.
        const StoreStats held = store->stats();
        CHECK(held.exact_blocks >= beside);
        CHECK(held.exact_blocks <= beside * page_tokens_ / plan->block_tokens());
        CHECK(held.exact_bytes == stats.exact_bytes);
        CHECK(held.packed_blocks == 0);
    }

  private:
    Case case_;
    Retention retention_;
    std::uint32_t page_tokens_;
    std::size_t page_bytes_;
    DeviceMemory memory_;
    std::optional<PagedLayer> layer_;
    AttentionWorkspace workspace_;
    std::vector<Page> pages_;
    std::vector<Grown> sequences_;
    std::uint64_t now_ = 0;
    Happened done_;

    std::uint32_t sinks() const { return case_.sliding > 0 || exact() ? 0 : retention_.sinks; }
    std::size_t channels() const { return case_.shape.channels(); }
    Page& page(std::int32_t number) { return pages_[static_cast<std::size_t>(number)]; }
    std::byte* address(std::size_t page) const {
        return layer_->memory().data + page * layer_->memory().stride;
    }
    long holders(std::int32_t page) const {
        return std::ranges::count_if(sequences_, [&](const Grown& its) {
            return std::ranges::find(its.pages, page) != its.pages.end();
        });
    }
    std::vector<std::int32_t> unused() const {
        std::vector<std::int32_t> all;
        for (std::int32_t p = 0; p < static_cast<std::int32_t>(pages); ++p)
            if (holders(p) == 0) all.push_back(p);
        return all;
    }

    // ---- operations ----

    // A prefix that the host has cached: whole pages of another, or nothing.
    Grown prefix() {
        Grown fresh;
        if (case_.sliding > 0) return fresh;
        const Grown& other = sequences_[below(sequences_.size())];
        const std::size_t shared = below(other.cells / page_tokens_ + 1);
        fresh.pages.assign(other.pages.begin(),
                           other.pages.begin() + static_cast<std::ptrdiff_t>(shared));
        fresh.cells = static_cast<std::uint32_t>(shared * page_tokens_);
        return fresh;
    }
    void start() {
        if (sequences_.size() < 4) sequences_.push_back(prefix());
    }
    void end() { end(below(sequences_.size())); }
    void end(std::size_t i) {
        sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(i));
        if (sequences_.empty()) sequences_.emplace_back();
    }
    // Tokens that were guessed: of pages that nobody else has.
    void take_back() {
        Grown& its = sequences_[below(sequences_.size())];
        const std::uint32_t cells = its.cells - below(std::min(its.cells, 6u) + 1);
        const std::size_t kept = (cells + page_tokens_ - 1) / page_tokens_;
        if (cells % page_tokens_ != 0 && holders(its.pages[kept - 1]) > 1) return;
        its.cells = cells;
        its.pages.resize(kept);
    }

    // A prefix that comes as bytes, to other pages, with room for a step.
    void carry() {
        Grown fresh = prefix();
        std::vector<std::int32_t> free = unused();
        if (!case_.whole || fresh.pages.empty() || free.size() < fresh.pages.size() + 4) return;
        for (std::int32_t& number : fresh.pages) {
            // Often one with exact rows, which are then stale: that has to be noticed.
            auto to = std::ranges::find_if(free, [&](std::int32_t p) { return page(p).exact; });
            if (to == free.end() || below(2) == 0) to = free.begin() + below(free.size());
            const Page& from = page(number);
            Bytes bytes(page_bytes_);
            REQUIRE(from.packed);
            store->device().copy_out(bytes.data(), address(static_cast<std::size_t>(number)),
                                     bytes.size());
            store->device().copy_in(address(static_cast<std::size_t>(*to)), bytes.data(),
                                    bytes.size());
            done_.replaced += page(*to).exact ? 1 : 0;
            page(*to) = {.packed = true, .sinks = from.sinks, .bytes = from.bytes};
            ++done_.carried;
            number = *to;
            free.erase(to);
        }
        sequences_.insert(sequences_.begin(), std::move(fresh));
        step(true);
    }

    // A few sequences grow, each by some tokens; those for which there is no page end.
    void step() { step(false); }
    void step(bool with_first) {
        ++now_;
        std::vector<PagedSequence> parts;
        std::vector<std::vector<std::int32_t>> tables;
        std::vector<std::int64_t> slots;
        Tokens tokens;
        for (std::size_t i = 0; i < sequences_.size(); ++i) {
            if (below(4) == 0 && !(i == 0 && with_first)) continue;
            Grown& its = sequences_[i];
            const std::uint32_t count = 1 + below(below(3) == 0 ? 300 : 3);
            const std::size_t needed = (its.cells + count + page_tokens_ - 1) / page_tokens_;
            const std::vector<std::int32_t> free = unused();
            const std::size_t more = needed - std::min(needed, its.pages.size());
            if (more > free.size()) {
                end(i--);
                continue;
            }
            its.pages.insert(its.pages.end(), free.begin(),
                             free.begin() + static_cast<std::ptrdiff_t>(more));
            parts.push_back(
                {{}, its.cells + count, count, static_cast<std::uint32_t>(slots.size())});
            for (const Token& token : rows(count)) {
                const std::int32_t page = its.pages[its.cells / page_tokens_];
                slots.push_back(std::int64_t{page} * page_tokens_ + its.cells++ % page_tokens_);
                tokens.push_back(token);
            }
            if (below(5) == 0) {  // padding, as hosts have it
                slots.push_back(-1);
                tokens.push_back({Row(channels(), NAN), Row(channels(), NAN)});
            }
            tables.push_back(its.pages);
            // What has left a sliding window is somebody else's, or nobody's.
            if (case_.sliding > 0 && its.cells > case_.sliding + 300)
                std::fill_n(tables.back().begin(), (its.cells - case_.sliding - 300) / page_tokens_,
                            0);
        }
        for (std::size_t i = 0; i < parts.size(); ++i) parts[i].pages = tables[i];
        write(slots, tokens);
        attend(parts, slots.size());
        pack_full(parts);
    }

    void write(const std::vector<std::int64_t>& slots, const Tokens& tokens) {
        Row keys, values;
        for (std::size_t i = 0; i < slots.size(); ++i) {
            keys.insert(keys.end(), tokens[i].key.begin(), tokens[i].key.end());
            values.insert(values.end(), tokens[i].value.begin(), tokens[i].value.end());
            if (slots[i] < 0) continue;
            const auto row = static_cast<std::uint32_t>(slots[i] % page_tokens_);
            Page& its = page(static_cast<std::int32_t>(slots[i] / page_tokens_));
            if (row == 0) its = {};
            if (!its.exact && row > 0 && !exact()) {
                its.tokens = read(its);
                ++done_.reopened;
            }
            if (row < sinks()) its.sinks.clear();
            its.tokens.resize(row);
            its.tokens.push_back(tokens[i]);
            its.exact = true;
            its.packed = false;
        }
        layer_->write({keys.data(), RowType::f32, case_.shape.head_dim, channels()},
                      {values.data(), RowType::f32, case_.shape.head_dim, channels()}, slots);
    }

    // Of a packed page, with its sinks.
    Tokens read(const Page& page) const {
        Tokens tokens;
        for (auto at = page.bytes.begin(); at != page.bytes.end();) {
            const auto end = at + static_cast<std::ptrdiff_t>(plan->packed_bytes());
            std::ranges::copy(decoded(*plan, {at, end}), std::back_inserter(tokens));
            at = end;
        }
        std::ranges::copy(page.sinks, tokens.begin());
        return tokens;
    }

    void attend(const std::vector<PagedSequence>& parts, std::size_t queries) {
        Asked its(*this, queries);
        its.io.q_token_stride = its.io.out_token_stride = its.heads * its.dim;
        its.io.q_head_stride = its.io.out_head_stride = its.dim;
        std::vector<Tokens> seen;
        for (const PagedSequence& part : parts) seen.push_back(as_read(part));
        layer_->attend(parts, its.io, its.params, workspace_, *threads);
        for (std::size_t i = 0; i < parts.size(); ++i) {
            const PagedSequence& part = parts[i];
            for (std::uint32_t t = 0; t < part.queries; t += 1 + below(60)) {  // some of them
                const std::size_t head = below(its.heads), own = part.cells - part.queries + t;
                const double error = its.error(
                    seen[i], (part.first_query + t) * its.heads + head, head,
                    [&](std::size_t cell) -> double {
                        if (cell > own || (case_.sliding > 0 && own - cell >= case_.sliding))
                            return -INFINITY;
                        return its.params.alibi_slopes != nullptr
                                   ? -double{its.slopes[head]} * static_cast<double>(own - cell)
                                   : 0;
                    });
                CHECK(error <= 6e-3);
            }
        }
    }
    Tokens as_read(const PagedSequence& part) {
        Tokens tokens;
        for (std::uint32_t p = 0; p * page_tokens_ < part.cells; ++p) {
            const Page& its = page(part.pages[p]);
            Tokens more = its.exact ? its.tokens : its.packed ? read(its) : Tokens();
            if (!its.exact && p == 0 && !its.sinks.empty()) ++done_.sinks;
            if (!its.exact && p > 0 && its.packed)  // sinks are where a sequence begins
                more = read({.packed = true, .bytes = its.bytes});
            more.resize(page_tokens_);  // of a page out of sight; of one that isn't full
            tokens.insert(tokens.end(), more.begin(), more.end());
        }
        return tokens;
    }

    // What the layer must have done after a step.
    void pack_full(const std::vector<PagedSequence>& parts) {
        if (exact()) return;
        std::set<std::int32_t> read, seen;
        for (const PagedSequence& part : parts) {
            const std::uint32_t before = part.cells - part.queries;
            const std::uint32_t hidden =
                case_.sliding == 0 || before + 1 <= case_.sliding ? 0 : before + 1 - case_.sliding;
            for (std::uint32_t p = hidden / page_tokens_; p * page_tokens_ < part.cells; ++p) {
                Page& its = page(part.pages[p]);
                read.insert(part.pages[p]);
                if ((p + 1) * page_tokens_ + retention_.window > part.cells)
                    seen.insert(part.pages[p]);
                if (!its.exact || its.packed) continue;
                its.first = p == 0 && sinks() > 0;
                if (its.tokens.size() == page_tokens_)
                    pack(its, p > hidden / page_tokens_ ? &page(part.pages[p - 1]) : nullptr);
            }
        }
        std::vector<std::tuple<bool, std::uint64_t, std::int32_t>> idle;
        for (std::int32_t p = 0; p < static_cast<std::int32_t>(pages); ++p) {
            Page& its = page(p);
            if (read.contains(p)) its.used = now_;
            if (read.contains(p) && its.packed && !its.first && !seen.contains(p))
                its.exact = false;
            if (its.exact && its.used != now_)
                idle.emplace_back(!its.packed, its.used + 64, p);
            else if (its.exact && its.packed && !seen.contains(p))
                idle.emplace_back(true, its.used, p);
        }
        std::ranges::sort(idle);
        for (std::size_t i = 0; i + case_.spare < idle.size(); ++i) {
            Page& its = page(std::get<2>(idle[i]));
            if (!its.packed) {
                its.tokens.resize(page_tokens_, its.tokens.back());
                pack(its, nullptr);
                ++done_.evicted;
            }
            its.exact = false;
        }
    }

    // With the statistics of the page before it, if that leads.
    void pack(Page& page, const Page* before) {
        page.bytes.clear();
        Statistics& stats = page.statistics;
        stats = {};
        if (before != nullptr && before->packed_in == now_)
            stats = before->statistics;
        else if (before != nullptr) {
            const auto last = static_cast<std::ptrdiff_t>(plan->packed_bytes());
            stats.from.assign(before->bytes.end() - last, before->bytes.end());
            stats.leads = cache::leads(*plan, stats.from.data());
        }
        for (std::uint32_t t = 0; t < page_tokens_; t += plan->block_tokens()) {
            const Bytes block =
                encoded(*plan, std::span(page.tokens).subspan(t, plan->block_tokens()), stats);
            page.bytes.insert(page.bytes.end(), block.begin(), block.end());
        }
        page.packed = true;
        page.packed_in = now_;
        ++done_.packed;
        if (page.first || case_.whole)
            page.sinks.assign(page.tokens.begin(), page.tokens.begin() + sinks());
    }
};

const Case cases[] = {
    {"lowkv2.8", {2, 32}, RowType::f32},
    {"lowkv2.8,window=0", {1, 64}, RowType::f32, 0, 0},
    {"kivi2,sinks=40", {2, 32}, RowType::f32, 0, 2},
    {"lowkv4,window=200", {2, 16}, RowType::f32, 200, 3},
    {"lowkv2.8", {2, 32}, RowType::f32, 0, 4, false, true},
    {"lowkv2.8", {2, 32}, RowType::f32, 0, 4, true},
    {"kivi2,sinks=40,window=0", {2, 32}, RowType::bf16, 0, 2, true},
    {"kivi2,sinks=0", {1, 32}, RowType::f32, 0, 2, true},
    {"kivi2,window=200", {2, 32}, RowType::f32, 200, 3, true},
    {"int8", {1, 48}, RowType::f32, 0, 1},
    {"k=exact,v=token-8-g32", {1, 32}, RowType::f16, 0, 2},
    {"exact", {2, 32}, RowType::f32},
    {"exact", {1, 32}, RowType::bf16, 150, 4, false, true},
    // Of several blocks: statistics come from the last one of the page before.
    {"lowkv2.8", {2, 32}, RowType::f32, 0, 4, false, false, 256},
    {"lowkv2.8,window=0", {1, 32}, RowType::f32, 0, 1, true, false, 384},
    {"kivi2,window=200", {1, 32}, RowType::f32, 200, 2, true, false, 256},
};

}  // namespace

TEST_CASE("random steps of pages leave what the model says") {
    for (const Case& c : cases) {
        CAPTURE(c.scheme);
        for (unsigned seed = 0; seed < 2; ++seed) {
            if (!lowkv::test::in_sample(seed)) continue;
            Pages pages(c);
            run(pages, seed, 80);
        }
    }
    CHECK(happened.packed > 0);
    CHECK(happened.reopened > 0);
    CHECK(happened.evicted > 0);
    CHECK(happened.sinks > 0);
    CHECK(happened.carried > happened.replaced);
    CHECK(happened.replaced > 0);
}
