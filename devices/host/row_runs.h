#pragma once
// Rows of many blocks, cut into launches: as many runs of tokens as a kernel takes and, of rows in
// the host's memory, as many rows as the staging memory holds side by side.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "lowkv/device.h"
#include "numbers.h"

namespace lowkv::devices {

struct RowRuns {
    lowkv_runs runs;
    std::array<std::size_t, LOWKV_RUNS> at;  // where the caller has a run's first row, in elements
    std::size_t count, tokens, longest;      // runs, tokens of all, tokens of the longest

    // Calls f(first token, tokens, at) for each run; its tokens follow those of the one before it.
    template <class F>
    void each(F f) const {
        std::uint32_t first = 0;
        for (std::size_t i = 0; i < count; first += runs.run[i++].count)
            f(first, runs.run[i].count, at[i]);
    }
};

// Calls f(RowRuns). `staged`: tokens that the staging memory holds; 0: kernels reach the caller's
// rows themselves.
template <class Byte, class F>
void each_launch(const Memory& memory, const Plan& plan, std::span<const BlockRows<Byte>> blocks,
                 std::size_t token_stride, std::size_t staged, F f) noexcept {
    const std::size_t most = staged > 0 ? staged : std::numeric_limits<std::size_t>::max();
    RowRuns out{};
    const auto give = [&] {
        f(out);
        out.count = out.tokens = out.longest = 0;
    };
    for (const auto& [block, first, count, at] : blocks) {
        const std::uint32_t address = memory.address(block);
        // A launch has no order: a token's later row comes in a later one.
        if (std::any_of(out.runs.run, out.runs.run + out.count,
                        [address, first = first, end = first + count](const lowkv_run& other) {
                            return other.block == address && other.first < end &&
                                   first < std::uint32_t{other.first} + other.count;
                        }))
            give();
        for (std::uint32_t done = 0; done < count;) {
            const auto n =
                static_cast<std::uint32_t>(std::min<std::size_t>(count - done, most - out.tokens));
            const std::size_t there = at + done * token_stride;
            const std::size_t element = staged > 0 ? out.tokens * plan.shape().channels() : there;
            out.runs.run[out.count] = {address, static_cast<std::uint16_t>(first + done),
                                       static_cast<std::uint16_t>(n), wide(std::uint64_t{element})};
            out.at[out.count++] = there;
            out.tokens += n;
            out.longest = std::max<std::size_t>(out.longest, n);
            done += n;
            if (out.count == LOWKV_RUNS || out.tokens == most) give();
        }
    }
    if (out.count > 0) give();
}

}  // namespace lowkv::devices
