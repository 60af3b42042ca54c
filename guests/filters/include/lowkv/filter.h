#pragma once
// Filter rules: when a token leaves the window, a rule decides whether it is kept exact, packed or
// evicted. The interface that SKVQ leaves open ("Important KV Cache Filter"), with eviction as
// well, so that what is dropped and what is quantized save memory together.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lowkv/attention.h"
#include "lowkv/batch.h"

namespace lowkv {

enum class Fate : std::uint8_t {
    keep,  // exact for the rest of its life
    pack,
    evict,  // gone: no later query sees it, and its memory is free
};

// Tokens that leave the window together, oldest first. Sinks are not among them: they are kept.
struct LeavingTokens {
    std::span<const std::uint32_t> positions;
    // Softmax weights that each token got, summed over heads and reported query tokens, and how
    // many query tokens those were. Zeros where nothing was reported.
    std::span<const float> mass;
    std::span<const std::uint32_t> queries;
    std::uint32_t length = 0;  // of the sequence, evicted tokens included
    // How many to keep and to evict by Retention's percentages; over time they come out exactly.
    // A rule may decide otherwise.
    std::uint32_t keep = 0, evict = 0;
};

// Stateless, so that forks may share it: equal tokens get equal fates.
class FilterRule {
  public:
    FilterRule() = default;
    FilterRule(const FilterRule&) = delete;
    FilterRule& operator=(const FilterRule&) = delete;
    virtual ~FilterRule() = default;

    // One fate for each token; all are Fate::pack beforehand. What it throws leaves pack(), and
    // nothing is changed.
    virtual void decide(const LeavingTokens& tokens, std::span<Fate> fates) const = 0;
};

// heavy   keeps the tokens of the highest mean mass per query token, and evicts those of the lowest
//         (H2O ranks by the sum, which favours old tokens: more queries have seen them). Throws
//         Error(invalid_argument) for tokens without any reported query.
// random  ranks by a hash of seed and position.
// none    null: everything is packed.
std::shared_ptr<const FilterRule> make_rule(Filter filter, std::uint64_t seed = 0);

// A sequence that a rule filters. Its tokens have positions 0, 1, ... in the order of append();
// those that are left have one cell each in cells(), without gaps:
//
//   [full blocks, each all kept (exact) or all packed][kept, not a block yet][to be packed, not a
//   block yet][undecided: the window and what pack() has not looked at yet]
//
// So the memory of evicted tokens is really free, up to two blocks that are still filling. A sink
// keeps itself exact here, and not its whole block. All kv heads of the layer share a token's fate.
class FilteredSequence {
  public:
    // rule null: the one of retention.filter.
    FilteredSequence(const std::shared_ptr<Store>& store, const std::shared_ptr<const Plan>& plan,
                     Retention retention, std::shared_ptr<const FilterRule> rule = nullptr);
    FilteredSequence(FilteredSequence&&) noexcept = default;
    FilteredSequence& operator=(FilteredSequence&&) noexcept = default;

    // Tokens appended less those truncated, evicted ones included: the next token's position.
    std::uint32_t size() const noexcept { return size_; }
    const Sequence& cells() const noexcept { return sequence_; }
    // Of a cell below cells().size(). Ascending among the undecided tokens only.
    std::uint32_t position(std::uint32_t cell) const noexcept;
    // Tokens whose fate is open; they are the last cells, and the newest positions.
    std::uint32_t undecided() const noexcept {
        return sequence_.size() - static_cast<std::uint32_t>(decided_.size());
    }
    std::uint32_t evicted() const noexcept { return size_ - sequence_.size(); }

    // As Sequence::append().
    void append(const float* keys, const float* values, std::uint32_t tokens);

    // As Sequence::update_query_stats().
    void update_query_stats(const QueryRows& queries) { sequence_.update_query_stats(queries); }

    // mass[i] for undecided token i, from the newest `query_tokens` tokens as queries. Sums up
    // until the token leaves the window. add_attention_mass() below calls it.
    void add_mass(std::span<const float> mass, std::uint32_t query_tokens);

    // Asks the rule about all tokens that have left the window, in multiples of a block (or of
    // retention.flush tokens), and packs what fills a block. Call it after the step's attention.
    // Throws Error(over_budget) if a fork shares the undecided tokens' blocks and the budget has no
    // room for copies, and what the rule throws; nothing is changed then. (Out of memory while
    // packing: the tokens' fates are decided, and the next call packs them.)
    void pack(Executor& executor = serial_executor());

    // Shares all blocks. What was shared undecided is copied when either side packs.
    FilteredSequence fork() const { return FilteredSequence(*this); }

    // Drops every token at or above position `size`. Throws Error(invalid_argument) if one of them
    // has its fate already: a block of other tokens holds it.
    void truncate(std::uint32_t size);

  private:
    FilteredSequence(const FilteredSequence&) = default;

    Retention retention_;
    std::shared_ptr<const FilterRule> rule_;  // null: packs everything
    Sequence sequence_;
    std::uint32_t size_ = 0;
    std::vector<std::uint32_t> decided_;  // positions by cell
    std::uint32_t tail_ = 0;              // cell: full blocks end, rows that still move begin
    std::uint32_t kept_in_tail_ = 0;  // cells from tail_ on; up to decided_.size(): to be packed
    std::uint64_t judged_ = 0;        // tokens that the rule was asked about
    std::vector<std::uint32_t> due_;  // full blocks to be packed
    std::vector<float> mass_;         // by undecided token
    std::vector<std::uint32_t> queries_;  // by undecided token

    std::uint32_t first_undecided() const noexcept { return size_ - undecided(); }
    std::uint32_t leaving() const noexcept;
    std::vector<Fate> decide(std::uint32_t leaving) const;
    void rearrange(std::span<const Fate> fates, Executor& executor);
};

// Attention over the tokens that are left, by their true positions. io.n_cells must be size(), and
// the query tokens are the newest ones. What a mask means here:
//   none      all tokens that are left
//   causal    those at or before the query's own position; ALiBi's distances are between positions
//             (slopes above 0)
//   additive  one value per position, not per cell: rows of size() values, sliding windows included
// Throws Error(invalid_argument).
void attend(const FilteredSequence& sequence, const AttentionIO& io, const AttentionParams& params,
            AttentionWorkspace& workspace, Executor& executor = serial_executor());

// Reports the step's attention mass to the undecided tokens, after an attend() with the same io and
// params that left io.lse, before pack(). Costs attention_mass() over those tokens only:
// half of attend() for a prompt, and some percent for a decoded token, falling with the length. It
// may be left out of any step: a prompt's last tokens are often queries enough.
void add_attention_mass(FilteredSequence& sequence, const AttentionIO& io,
                        const AttentionParams& params, AttentionWorkspace& workspace,
                        Executor& executor = serial_executor());

}  // namespace lowkv
