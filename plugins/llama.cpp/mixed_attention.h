#pragma once
// Attention to streams whose packed units are not all alike: some were moved by a context shift
// (key_shift.h) and meet queries that are turned back by their own distance, some lie in another
// tier (layer_cache.h). Units that lie side by side and are alike are one part of a stream's
// attention, a sequence of its own to the core, and the softmaxes are joined in the end.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "layer_cache.h"
#include "lowkv/attention.h"

namespace lowkv::ggml {

class MixedAttention {
  public:
    void clear() noexcept { used_ = 0; }
    // `whole`: what a stream attends to, the blocks of `units` first. Takes away every unit up to
    // the last that was moved or lies in a finer tier. If there is no such unit, `whole` stays.
    void take(const LayerCache& layer, std::uint32_t stream, std::span<const std::uint32_t> units,
              SequenceAttention& whole, Executor& executor);
    // Attends to the parts that were taken, and adds them to what the wholes' attention gave.
    void attend(const LayerCache& layer, AttentionParams params, AttentionWorkspace& workspace,
                Executor& executor);

  private:
    struct Kind {
        std::uint8_t tier = 0;
        std::int32_t moved = 0;
        friend bool operator==(const Kind&, const Kind&) = default;
    };
    struct Part {
        bool remainder = false;  // what is left of a whole, behind its parts: only `lse` is used
        std::uint8_t tier = 0;
        SequenceAttention attention;
        std::vector<float> queries, out, lse;
    };
    std::vector<Part> parts_;  // the first used_; kept for their memory
    std::size_t used_ = 0;
    std::vector<SequenceAttention> attended_;

    Part& next();
    void add(const LayerCache& layer, const SequenceAttention& whole, std::size_t first_row,
             std::size_t rows, Kind kind, Executor& executor);
    static void join(std::span<const Part> parts, const Part& remainder, const Shape& shape,
                     Executor& executor);
};

}  // namespace lowkv::ggml
