#pragma once
// Attention to streams some of whose units were moved by a context shift (key_shift.h): such a unit
// meets queries that are turned back by its own distance. Units that lie side by side and moved
// alike are one part of a stream's attention, a sequence of its own to the core, and the softmaxes
// are joined in the end.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "layer_cache.h"
#include "lowkv/attention.h"

namespace lowkv::ggml {

class MovedAttention {
  public:
    void clear() noexcept { used_ = 0; }
    // `whole`: what a stream attends to, the blocks of `units` first. Takes those units away from
    // it that moved, and those before the last of these. Does nothing where none moved.
    void take(const LayerCache& layer, std::uint32_t stream, std::span<const std::uint32_t> units,
              SequenceAttention& whole);
    // Attends to the parts that were taken, and adds them to what the wholes' attention gave.
    void attend(const LayerCache& layer, AttentionParams params, AttentionWorkspace& workspace,
                Executor& executor);

  private:
    struct Part {
        bool remainder = false;  // what is left of a whole, behind its parts: only `lse` is used
        SequenceAttention attention;
        std::vector<float> queries, out, lse;
    };
    std::vector<Part> parts_;  // the first used_; kept for their memory
    std::size_t used_ = 0;
    std::vector<SequenceAttention> attended_;

    Part& next();
    void add(const LayerCache& layer, const SequenceAttention& whole, std::size_t first_row,
             std::size_t rows, std::int32_t distance);
    static void join(std::span<const Part> parts, const Part& remainder, std::size_t head_dim);
};

}  // namespace lowkv::ggml
