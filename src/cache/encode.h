#pragma once
// How exact blocks become packed ones, for sequences and pages, and whose statistics a block takes
// over (Plan::has_statistics()). Values that follow their keys later have none, and go to the
// device as they are (Blocks::pack()).
//
// A block of padding, of one repeated token, or of a few rows repeated to fill it says little about
// the channels of the text that follows: with its statistics, keys are 2 to 116 times less exact.
// So only a block of enough different rows leads. Any other block makes statistics for itself, and
// a later block leads. So does a block later on, of enough different rows, whose channels are
// shared out so differently that statistics of its own halve its error.

#include <cstddef>
#include <optional>
#include <span>

#include "lowkv/codec.h"
#include "lowkv/executor.h"
#include "lowkv/query_energy.h"

namespace lowkv {
class Device;
}

namespace lowkv::cache {

// An exact block and what it becomes.
struct Encoding {
    static constexpr std::size_t none = ~std::size_t{0};

    const std::byte* exact = nullptr;
    std::byte* packed = nullptr;
    // Whose statistics the block takes over: those of the packed block `stats_from`, or else those
    // that the encoding number `before` (of the block before it in its sequence) makes or takes
    // over. With neither it makes its own, weighed by its sequence's `queries` if there are any.
    const std::byte* stats_from = nullptr;
    std::size_t before = none;
    QueryEnergy* queries = nullptr;
    // Set by encode_blocks(): whether other blocks may take its statistics over, and whether it
    // made them because those that it was to take over did not fit.
    bool leads = true, anew = false;
};

// Encodes all of them, or, with `only`, one part. Throws what Device::encode() does; then nothing
// but the packed blocks' bytes has changed. Some queries are kept, for the blocks that follow.
void encode_blocks(Device& device, const Plan& plan, std::span<Encoding> blocks, Executor& executor,
                   std::optional<Part> only = std::nullopt);

// Whether the keys of an unquantized block are varied enough for its statistics to lead. Keys that
// differ only by RoPE, or by less than 3 % of their squares in all parts of all heads, are equal.
bool is_varied(const Device& device, const Plan& plan, const std::byte* exact);

// Whether a packed block has no mark of one that made statistics for itself alone. The mark is in
// the block's bytes, so that it stays with pages and images. The first two are in the host's
// memory.
bool leads(const Plan& plan, const std::byte* packed) noexcept;
// Whether decoding a packed block's keys, in the host's memory, writes every channel: an order of
// channels from elsewhere may name one twice.
bool names_all_channels(const Plan& plan, const std::byte* packed) noexcept;

}  // namespace lowkv::cache
