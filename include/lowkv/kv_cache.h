#pragma once
// A whole model's cache, for engines that have none of their own: a Sequence (batch.h) for each
// layer of each sequence, all in one store. Sequences have numbers; a number is free again once its
// sequence was removed. Layers take a step's rows one after the other, as a model's do; what acts
// on sequences acts on all layers.
//
// A step of a model is, for each layer, append() for each sequence, then attend() for all of them
// at once; then pack().
//
// The C interface (lowkv.h) is this one. Threads: one at a time. What throws leaves the cache as it
// was, but for a pack() that failed, which has packed some layers.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "lowkv/attention.h"
#include "lowkv/batch.h"
#include "lowkv/scheme.h"

namespace lowkv {

struct KvCacheConfig {
    Scheme scheme;
    Shape shape;  // of every layer
    std::uint32_t layers = 0;
    RowType rows = RowType::f16;   // what unquantized rows are kept in
    std::shared_ptr<Store> store;  // null: one without a budget, on the CPU
};

// What one sequence asks of attend(): its newest io.tokens tokens' queries. io.n_cells is filled
// in.
struct KvAttention {
    std::uint32_t sequence = 0;
    AttentionIO io;
    Mask mask;
};

class KvCache {
  public:
    // Throws what Plan and Sequence do, and Error(unsupported) for schemes that need a calibration,
    // the positions of keys, or a filter.
    explicit KvCache(const KvCacheConfig& config);

    const Scheme& scheme() const noexcept { return scheme_; }
    const Shape& shape() const noexcept { return plans_.front()->shape(); }
    std::uint32_t layers() const noexcept { return static_cast<std::uint32_t>(plans_.size()); }
    Store& store() const noexcept { return *store_; }

    // An empty sequence; one with another's tokens, whose blocks both share until one of them
    // writes.
    std::uint32_t add();
    std::uint32_t fork(std::uint32_t sequence);
    void remove(std::uint32_t sequence);
    // Drops all tokens from `tokens` on, in all layers or, where it throws, in none. Ends a step
    // that a layer is in.
    void truncate(std::uint32_t sequence, std::uint32_t tokens);

    // Throws Error(invalid_argument) if there is no such sequence or layer.
    Sequence& at(std::uint32_t sequence, std::uint32_t layer);
    const Sequence& at(std::uint32_t sequence, std::uint32_t layer) const;

    void append(std::uint32_t sequence, std::uint32_t layer, const Rows& keys, const Rows& values,
                std::uint32_t tokens) {
        at(sequence, layer).append(keys, values, tokens);
    }

    // params.mask is not used: each sequence has its own. A step allocates nothing here.
    void attend(std::uint32_t layer, std::span<const KvAttention> sequences,
                const AttentionParams& params, Executor& executor = serial_executor());

    // Packs what has left the windows, in all layers of all sequences.
    void pack(Executor& executor = serial_executor());

    // A sequence as bytes for a file or another process, and back in a cache of the same scheme and
    // shape, packed as it was: it goes on as the saved one would have. Throw as save_sequence() and
    // load_sequence() (serial.h); save() also where layers differ in length: not within a step.
    std::vector<std::byte> save(std::uint32_t sequence) const;
    std::uint32_t load(std::span<const std::byte> bytes);

  private:
    using Layers = std::vector<Sequence>;  // of a sequence

    const Layers& layers_of(std::uint32_t sequence) const;
    std::uint32_t keep(Layers layers);

    Scheme scheme_;
    std::shared_ptr<Store> store_;
    std::vector<std::shared_ptr<const Plan>> plans_;  // by layer
    std::vector<std::optional<Layers>> sequences_;    // by number; removed ones are empty
    AttentionWorkspace workspace_;
};

}  // namespace lowkv
