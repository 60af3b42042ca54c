// Pages of a host's, against a model that is too simple to be wrong: for each page the rows that it
// must have, the bytes that must be in the host's memory, and whether exact rows lie beside it.
// Sequences grow in chunks, share prefixes, take back tokens, and end without a word.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "batch_common.h"
#include "cache/encode.h"
#include "lowkv/device.h"
#include "lowkv/paged.h"
#include "sample.h"
#include "sealed_device.h"

using namespace lowkv;
using batch_test::random_row;
using batch_test::Rng;
using batch_test::Row;

namespace {

constexpr std::uint32_t page_tokens = 128, heads_per_kv = 2;
constexpr float scale = 0.03f;

struct Case {
    std::string scheme;
    Shape shape;
    RowType rows;
    std::uint32_t sliding = 0, spare = 4;
    bool whole = false;  // pages, and prefixes come as bytes at times
    bool own = false;    // the layer's memory, not the host's
};

struct Token {
    Row key, value;
};

struct ModelPage {
    std::vector<Token> tokens;  // written, as they are read
    bool exact = false, packed = false, first = false;
    std::uint64_t used = 0;
    std::vector<Token> sinks;
    std::vector<std::byte> bytes;  // once packed
};

struct ModelSequence {
    std::vector<std::int32_t> pages;
    std::uint32_t cells = 0;
};

// What happened in all runs: a test in which nothing did says nothing.
struct Happened {
    std::uint64_t packed = 0, reopened = 0, evicted = 0, sinks = 0, carried = 0, replaced = 0;
};

class Fuzz {
  public:
    Fuzz(const Case& c, unsigned seed)
        : rng_(seed),
          case_(c),
          plan_(batch_test::make_plan(c.scheme, c.shape, c.rows)),
          retention_(parse_scheme(c.scheme).retention),
          store_(lowkv::test::make_store()),
          threads_(make_thread_executor(2)),
          page_bytes_(c.whole ? PagedLayer::whole_page_bytes(*plan_, page_tokens, sinks())
                              : PagedLayer::page_bytes(*plan_, page_tokens)),
          model_(pages) {
        PageMemory memory{.pages = pages, .whole = c.whole};
        if (!c.own) {
            memory.stride = (page_bytes_ + 127) / 64 * 64;
            const std::vector<std::byte> garbage(pages * memory.stride, std::byte{0x3c});
            memory_ = DeviceMemory(store_->device(), garbage.size());
            memory.data = memory_.data();
            store_->device().copy_in(memory.data, garbage.data(), garbage.size());
        }
        layer_.emplace(store_, plan_, retention_, c.sliding, page_tokens, memory, c.spare);
    }

    void run(int steps, Happened& happened) {
        for (int i = 0; i < steps; ++i) {
            if (sequences_.empty() || (sequences_.size() < 4 && below(4) == 0)) start(false);
            if (below(12) == 0) end(below(sequences_.size()));
            if (below(8) == 0) take_back();
            if (case_.whole && below(4) == 0) start(true);
            step();
            check_books();
        }
        layer_.reset();
        CHECK(store_->stats().exact_blocks == 0);
        happened.packed += packed_;
        happened.reopened += reopened_;
        happened.evicted += evicted_;
        happened.sinks += sinks_read_;
        happened.carried += carried_;
        happened.replaced += replaced_;
    }

  private:
    static constexpr std::uint32_t pages = 24;

    Rng rng_;
    Case case_;
    std::shared_ptr<const Plan> plan_;
    Retention retention_;
    std::shared_ptr<Store> store_;
    std::unique_ptr<Executor> threads_;
    std::size_t page_bytes_;
    DeviceMemory memory_;
    std::optional<PagedLayer> layer_;
    AttentionWorkspace workspace_;
    std::vector<float> slopes_, logits_;  // of the last attend()
    std::vector<ModelPage> model_;
    std::vector<ModelSequence> sequences_;
    std::uint64_t now_ = 0, packed_ = 0, reopened_ = 0, evicted_ = 0, sinks_read_ = 0;
    std::uint64_t carried_ = 0, replaced_ = 0;
    bool just_carried_ = false;  // the first sequence

    bool in_place() const { return plan_->scheme().exact(); }
    std::uint32_t sinks() const { return case_.sliding > 0 || in_place() ? 0 : retention_.sinks; }
    std::size_t below(std::size_t n) { return rng_() % n; }
    std::size_t channels() const { return case_.shape.channels(); }

    bool used(std::int32_t page) const {
        return std::ranges::any_of(sequences_, [&](const ModelSequence& s) {
            return std::ranges::find(s.pages, page) != s.pages.end();
        });
    }

    // Of nothing, or sharing the whole pages of another: a prefix that the host has cached, or that
    // comes as bytes.
    void start(bool comes) {
        ModelSequence fresh;
        if (!sequences_.empty() && case_.sliding == 0) {
            const ModelSequence& other = sequences_[below(sequences_.size())];
            const std::size_t shared = below(other.cells / page_tokens + 1);
            fresh.pages.assign(other.pages.begin(),
                               other.pages.begin() + static_cast<std::ptrdiff_t>(shared));
            fresh.cells = static_cast<std::uint32_t>(shared * page_tokens);
        }
        just_carried_ = comes && carry(fresh.pages);
        if (!comes || just_carried_)
            sequences_.insert(comes ? sequences_.begin() : sequences_.end(), fresh);
    }
    // To other pages, as bytes, with room for a step; the model forgets what those have.
    bool carry(std::vector<std::int32_t>& from) {
        std::vector<std::int32_t> unused;
        for (std::int32_t p = 0; p < static_cast<std::int32_t>(pages); ++p) {
            if (!used(p)) unused.push_back(p);
        }
        if (from.empty() || unused.size() < from.size() + 4) return false;
        for (std::int32_t& number : from) {
            // Often one with exact rows, which are then stale: that has to be noticed.
            const auto stale = std::ranges::find_if(unused, [&](std::int32_t page) {
                return model_[static_cast<std::size_t>(page)].exact;
            });
            const std::size_t which = stale != unused.end() && below(2) == 0
                                          ? static_cast<std::size_t>(stale - unused.begin())
                                          : below(unused.size());
            const std::int32_t to = unused[which];
            unused.erase(unused.begin() + static_cast<std::ptrdiff_t>(which));
            const ModelPage& page = model_[static_cast<std::size_t>(number)];
            ModelPage& its = model_[static_cast<std::size_t>(to)];
            std::vector<std::byte> bytes(page_bytes_);
            REQUIRE(page.packed);
            store_->device().copy_out(bytes.data(), address(number), bytes.size());
            store_->device().copy_in(address(to), bytes.data(), bytes.size());
            if (its.exact) ++replaced_;
            its = {};
            its.packed = true;
            its.bytes = page.bytes;
            its.sinks = page.sinks;
            ++carried_;
            number = to;
        }
        return true;
    }
    std::byte* address(std::int32_t page) const {
        return layer_->memory().data + static_cast<std::size_t>(page) * layer_->memory().stride;
    }
    void end(std::size_t i) {
        sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(i));
        if (sequences_.empty()) start(false);
    }
    // Tokens that were guessed: of pages that nobody else has.
    void take_back() {
        ModelSequence& s = sequences_[below(sequences_.size())];
        const auto least = s.cells > 6 ? s.cells - 6 : 0;
        const auto cells = static_cast<std::uint32_t>(least + below(s.cells - least + 1));
        const std::size_t kept = (cells + page_tokens - 1) / page_tokens;
        if (cells % page_tokens != 0 && shared(s.pages[kept - 1])) return;
        s.cells = cells;
        s.pages.resize(kept);
    }
    bool shared(std::int32_t page) const {
        return std::ranges::count_if(sequences_, [&](const ModelSequence& s) {
                   return std::ranges::find(s.pages, page) != s.pages.end();
               }) > 1;
    }

    // A few sequences grow, each by some tokens; those for which there is no page end.
    void step() {
        ++now_;
        std::vector<PagedSequence> parts;
        std::vector<std::size_t> whose;  // of sequences_; those that end are behind them
        std::vector<std::int64_t> slots;
        std::vector<Token> rows;
        std::uint32_t queries = 0;
        for (std::size_t i = 0; i < sequences_.size(); ++i) {
            if (below(4) == 0 && !(i == 0 && just_carried_)) continue;
            ModelSequence& s = sequences_[i];
            const std::size_t most = below(3) == 0 ? 300 : 3;
            const auto count = static_cast<std::uint32_t>(1 + below(most));
            if (!take_pages(s, s.cells + count)) {
                end(i--);
                continue;
            }
            for (std::uint32_t t = 0; t < count; ++t, ++s.cells) {
                const std::int32_t page = s.pages[s.cells / page_tokens];
                slots.push_back(std::int64_t{page} * page_tokens + s.cells % page_tokens);
                rows.push_back({random_row(rng_, channels()), random_row(rng_, channels())});
            }
            whose.push_back(i);
            parts.push_back({{}, s.cells, count, queries});
            just_carried_ = false;
            queries += count;
            if (below(5) == 0) {  // padding, as hosts have it
                slots.push_back(-1);
                rows.push_back({Row(channels(), NAN), Row(channels(), NAN)});
                ++queries;
            }
        }
        std::vector<std::vector<std::int32_t>> tables;
        for (const std::size_t i : whose) {
            tables.push_back(sequences_[i].pages);
            // What has left a sliding window is somebody else's, or nobody's.
            if (case_.sliding > 0 && sequences_[i].cells > case_.sliding + 300) {
                const auto gone = (sequences_[i].cells - case_.sliding - 300) / page_tokens;
                std::fill_n(tables.back().begin(), gone, 0);
            }
        }
        for (std::size_t i = 0; i < whose.size(); ++i) parts[i].pages = tables[i];
        write(slots, rows);
        attend(parts, queries);
    }

    bool take_pages(ModelSequence& s, std::uint32_t cells) {
        const std::size_t needed = (cells + page_tokens - 1) / page_tokens;
        for (std::int32_t p = 0; p < static_cast<std::int32_t>(pages) && s.pages.size() < needed;
             ++p) {
            if (!used(p)) s.pages.push_back(p);
        }
        return s.pages.size() >= needed;
    }

    void write(const std::vector<std::int64_t>& slots, const std::vector<Token>& rows) {
        std::vector<float> keys, values;
        for (std::size_t i = 0; i < slots.size(); ++i) {
            keys.insert(keys.end(), rows[i].key.begin(), rows[i].key.end());
            values.insert(values.end(), rows[i].value.begin(), rows[i].value.end());
            if (slots[i] < 0) continue;
            const auto number = static_cast<std::size_t>(slots[i]) / page_tokens;
            const std::size_t row = static_cast<std::size_t>(slots[i]) % page_tokens;
            ModelPage& page = model_[number];
            if (row == 0) page = {};
            if (!page.exact && row > 0 && !in_place()) {
                page.tokens = decoded(page.bytes);
                std::ranges::copy(page.sinks, page.tokens.begin());
                ++reopened_;
            }
            if (row < sinks()) page.sinks.clear();
            page.tokens.resize(row);
            page.tokens.push_back(rows[i]);
            page.exact = true;
            page.packed = false;
        }
        const Rows k{keys.data(), RowType::f32, case_.shape.head_dim, channels()};
        const Rows v{values.data(), RowType::f32, case_.shape.head_dim, channels()};
        layer_->write(k, v, slots);
    }

    void attend(const std::vector<PagedSequence>& parts, std::uint32_t queries) {
        const std::size_t heads = std::size_t{case_.shape.kv_heads} * heads_per_kv;
        const std::size_t width = heads * case_.shape.head_dim;
        std::vector<float> q(queries * width), out(queries * width, -77.0f);
        // Of one size: the model weighs no channel more than another.
        for (float& x : q) x = random_row(rng_, 1)[0] < 0 ? -1.0f : 1.0f;
        std::vector<std::vector<Token>> seen;
        for (const PagedSequence& part : parts) seen.push_back(as_read(part));
        AttentionIO io;
        io.q = q.data();
        io.out = out.data();
        io.q_token_stride = io.out_token_stride = width;
        io.q_head_stride = io.out_head_stride = case_.shape.head_dim;
        io.heads = static_cast<std::uint32_t>(heads);
        AttentionParams params;
        params.scale = scale;
        slopes_.clear();
        logits_.clear();
        if (below(2) == 0) {
            for (std::size_t h = 0; h < heads; ++h)
                slopes_.push_back(std::exp2(-static_cast<float>(h + 2)));
            params.alibi_slopes = slopes_.data();
        }
        if (below(2) == 0) {
            for (std::size_t h = 0; h < heads; ++h)
                logits_.push_back(static_cast<float>(below(5)) - 2);
            params.sink_logits = logits_.data();
        }
        layer_->attend(parts, io, params, workspace_, *threads_);
        for (std::size_t i = 0; i < parts.size(); ++i) check_output(parts[i], seen[i], q, out);
        pack_full(parts);
    }

    std::vector<Token> as_read(const PagedSequence& part) {
        std::vector<Token> tokens;
        for (std::uint32_t p = 0; p * page_tokens < part.cells; ++p) {
            const ModelPage& page = model_[static_cast<std::size_t>(part.pages[p])];
            std::vector<Token> its = page.exact    ? page.tokens
                                     : page.packed ? decoded(page.bytes)
                                                   : std::vector<Token>();
            if (!page.exact && p == 0 && !page.sinks.empty()) {
                std::ranges::copy(page.sinks, its.begin());
                ++sinks_read_;
            }
            its.resize(page_tokens);  // of a page out of sight; of one that isn't full
            tokens.insert(tokens.end(), its.begin(), its.end());
        }
        return tokens;
    }

    // Some of the queries, in double precision.
    void check_output(const PagedSequence& part, const std::vector<Token>& tokens,
                      const std::vector<float>& q, const std::vector<float>& out) {
        const std::size_t dim = case_.shape.head_dim, heads = case_.shape.kv_heads * heads_per_kv;
        for (std::uint32_t t = 0; t < part.queries;
             t += 1 + static_cast<std::uint32_t>(below(60))) {
            const std::size_t head = below(heads), channel = head / heads_per_kv * dim;
            const std::size_t at = ((part.first_query + t) * heads + head) * dim;
            const std::size_t end = part.cells - part.queries + t + 1;
            const std::size_t first =
                case_.sliding > 0 && end > case_.sliding ? end - case_.sliding : 0;
            std::vector<double> sum(dim);
            double total = logits_.empty() ? 0 : std::exp(double{logits_[head]}), largest = 0;
            for (std::size_t cell = first; cell < end; ++cell) {
                REQUIRE(tokens[cell].key.size() == channels());
                double score = 0;
                for (std::size_t c = 0; c < dim; ++c)
                    score += double{q[at + c]} * double{tokens[cell].key[channel + c]};
                const double bias =
                    slopes_.empty() ? 0
                                    : double{slopes_[head]} * static_cast<double>(end - 1 - cell);
                const double weight = std::exp(score * double{scale} - bias);
                total += weight;
                for (std::size_t c = 0; c < dim; ++c)
                    sum[c] += weight * double{tokens[cell].value[channel + c]};
            }
            for (std::size_t c = 0; c < dim; ++c)
                largest = std::max(largest, std::abs(sum[c] / total));
            for (std::size_t c = 0; c < dim; ++c)
                CHECK(std::abs(double{out[at + c]} - sum[c] / total) <= 6e-3 * (largest + 0.5));
        }
    }

    // What the layer must have done after a step.
    void pack_full(const std::vector<PagedSequence>& parts) {
        if (in_place()) return;
        std::vector<std::int32_t> read, seen;
        for (const PagedSequence& part : parts) {
            const std::uint32_t before = part.cells - part.queries;
            const std::uint32_t hidden =
                case_.sliding == 0 || before + 1 <= case_.sliding ? 0 : before + 1 - case_.sliding;
            for (std::uint32_t p = hidden / page_tokens; p * page_tokens < part.cells; ++p) {
                const std::int32_t number = part.pages[p];
                ModelPage& page = model_[static_cast<std::size_t>(number)];
                read.push_back(number);
                if ((p + 1) * page_tokens + retention_.window > part.cells) seen.push_back(number);
                if (page.exact && !page.packed) page.first = p == 0 && sinks() > 0;
                if (page.exact && !page.packed && page.tokens.size() == page_tokens) {
                    const bool follows = p > hidden / page_tokens;
                    pack(page,
                         follows ? &model_[static_cast<std::size_t>(part.pages[p - 1])] : nullptr);
                    if (page.first || case_.whole) keep_sinks(page);
                }
            }
        }
        for (const std::int32_t number : read) {
            ModelPage& page = model_[static_cast<std::size_t>(number)];
            page.used = now_;
            if (page.packed && !page.first && std::ranges::find(seen, number) == seen.end())
                page.exact = false;
        }
        evict(seen);
    }

    void evict(const std::vector<std::int32_t>& seen) {
        std::vector<std::tuple<bool, std::uint64_t, std::size_t>> idle;
        for (std::size_t i = 0; i < pages; ++i) {
            const ModelPage& page = model_[i];
            if (!page.exact) continue;
            if (page.used != now_)
                idle.emplace_back(!page.packed, page.used + 64, i);
            else if (page.packed && std::ranges::find(seen, i) == seen.end())
                idle.emplace_back(true, page.used, i);
        }
        std::ranges::sort(idle);
        for (std::size_t i = 0; i + case_.spare < idle.size(); ++i) {
            ModelPage& page = model_[std::get<2>(idle[i])];
            if (!page.packed) {
                while (page.tokens.size() < page_tokens) page.tokens.push_back(page.tokens.back());
                pack(page, nullptr);
                if (case_.whole || page.first) keep_sinks(page);
                ++evicted_;
            }
            page.exact = false;
        }
    }

    void keep_sinks(ModelPage& page) const {
        page.sinks.assign(page.tokens.begin(), page.tokens.begin() + sinks());
    }

    // The codec itself, block by block; a page's statistics are those of the page before it, if
    // that leads.
    void pack(ModelPage& page, const ModelPage* before) {
        Device& device = *cpu_device();
        const std::uint32_t tokens = plan_->block_tokens();
        page.bytes.assign(PagedLayer::page_bytes(*plan_, page_tokens), std::byte{});
        DeviceMemory exact(device, plan_->exact_bytes()), packed(device, plan_->packed_bytes());
        DeviceMemory stats_from(device, plan_->packed_bytes());
        if (before != nullptr && !cache::leads(*plan_, before->bytes.data())) before = nullptr;
        if (before != nullptr)
            std::copy_n(before->bytes.data(), plan_->packed_bytes(), stats_from.data());
        for (std::uint32_t b = 0; b < page_tokens / tokens; ++b) {
            for (std::uint32_t t = 0; t < tokens; ++t) {
                const Token& token = page.tokens[b * tokens + t];
                const auto rows = [&](const Row& row) {
                    return Rows{row.data(), RowType::f32, case_.shape.head_dim, channels()};
                };
                const std::array to{BlockRows<std::byte>{exact.data(), t, 1}};
                Executor& executor = serial_executor();
                device.write_rows(*plan_, Part::keys, to, rows(token.key), executor);
                device.write_rows(*plan_, Part::values, to, rows(token.value), executor);
            }
            const BlockCopy copy{exact.data(), packed.data(),
                                 before != nullptr ? stats_from.data() : nullptr};
            device.encode(*plan_, std::span(&copy, 1), serial_executor());
            if (b == 0 && before == nullptr && plan_->has_statistics() &&
                !cache::is_varied(device, *plan_, exact.data()))
                cache::mark_uniform(device, *plan_, packed.data());
            std::copy_n(packed.data(), plan_->packed_bytes(),
                        page.bytes.data() + b * plan_->packed_bytes());
        }
        page.packed = true;
        ++packed_;
    }

    std::vector<Token> decoded(const std::vector<std::byte>& bytes) {
        Device& device = *cpu_device();
        const std::uint32_t tokens = plan_->block_tokens();
        std::vector<Token> out(page_tokens);
        DeviceMemory packed(device, plan_->packed_bytes()), exact(device, plan_->exact_bytes());
        const auto f32 = batch_test::make_plan(case_.scheme, case_.shape, RowType::f32);
        DeviceMemory floats(device, f32->exact_bytes());
        for (std::uint32_t b = 0; b < page_tokens / tokens; ++b) {
            std::copy_n(bytes.data() + b * plan_->packed_bytes(), plan_->packed_bytes(),
                        packed.data());
            const BlockCopy copy{packed.data(), floats.data(), nullptr};
            device.decode(*f32, std::span(&copy, 1), serial_executor());
            for (std::uint32_t t = 0; t < tokens; ++t) {
                Token& token = out[b * tokens + t];
                token.key.resize(channels());
                token.value.resize(channels());
                const RowsOut k{token.key.data(), case_.shape.head_dim, channels()};
                const RowsOut v{token.value.data(), case_.shape.head_dim, channels()};
                const std::array from{BlockRows<const std::byte>{floats.data(), t, 1}};
                device.read_rows(*f32, Part::keys, from, k, serial_executor());
                device.read_rows(*f32, Part::values, from, v, serial_executor());
            }
        }
        return out;
    }

    void check_books() {
        const PagedStats stats = layer_->stats();
        std::size_t exact = 0, sink_bytes = 0;
        std::vector<std::byte> bytes(PagedLayer::page_bytes(*plan_, page_tokens));
        for (std::size_t i = 0; i < pages; ++i) {
            const ModelPage& page = model_[i];
            if (page.exact && !in_place()) ++exact;
            if (!case_.whole)
                sink_bytes += 2 * page.sinks.size() * channels() * element_bytes(case_.rows);
            if (!page.packed) continue;
            store_->device().copy_out(bytes.data(), address(static_cast<std::int32_t>(i)),
                                      bytes.size());
            CHECK(bytes == page.bytes);
        }
        CHECK(stats.exact_pages == exact);
        CHECK(stats.sink_bytes == sink_bytes);
        CHECK(stats.packed == packed_);
        CHECK(stats.reopened == reopened_);
        CHECK(stats.evicted == evicted_);
        CHECK(stats.replaced == replaced_);
        CHECK(store_->stats().exact_blocks == exact);
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
};

}  // namespace

TEST_CASE("random steps leave what a simple model says") {
    Happened happened;
    for (const Case& c : cases) {
        CAPTURE(c.scheme);
        for (unsigned seed = 0; seed < 2; ++seed) {
            if (!lowkv::test::in_sample(seed)) continue;
            CAPTURE(seed);
            Fuzz(c, seed).run(60, happened);
        }
    }
    CHECK(happened.packed > 0);
    CHECK(happened.reopened > 0);
    CHECK(happened.evicted > 0);
    CHECK(happened.sinks > 0);
    CHECK(happened.carried > happened.replaced);
    CHECK(happened.replaced > 0);
}
