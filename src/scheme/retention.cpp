#include <algorithm>
#include <numeric>

#include "lowkv/scheme.h"
#include "round.h"

namespace lowkv {

std::uint64_t left_window(const Retention& retention, std::uint64_t tokens) noexcept {
    const std::uint64_t left = tokens > retention.window ? tokens - retention.window : 0;
    return retention.flush > 0 ? left - left % retention.flush : left;
}

Retention whole_sinks(Retention retention, std::uint32_t block_tokens) noexcept {
    // At most the last multiple: sinks beyond any sequence's length are legal.
    const std::uint32_t most = ~0u - ~0u % block_tokens;
    retention.sinks = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(round_up<std::uint64_t>(retention.sinks, block_tokens), most));
    return retention;
}

PackedTokens packed_tokens(const Retention& retention, std::uint32_t block_tokens,
                           std::uint64_t tokens) noexcept {
    const std::uint64_t first = whole_sinks(retention, block_tokens).sinks;
    const std::uint64_t left = left_window(retention, tokens);
    return {first, std::max(first, left - left % block_tokens)};
}

// With flush, the tokens that have not left the window begin with a multiple of it: in their block
// with a multiple of what divides both.
MostBlocks most_blocks(const Retention& retention, std::uint32_t block_tokens,
                       std::uint64_t conversations, std::uint64_t tokens) noexcept {
    conversations = std::min(conversations, tokens);
    if (conversations == 0) return {};
    const std::uint64_t every = std::max(retention.flush, 1u);
    const std::uint64_t each = ceil_div<std::uint64_t>(retention.sinks, block_tokens) +
                               (retention.window + every - 1 + block_tokens -
                                std::gcd(every, block_tokens) + block_tokens - 1) /
                                   block_tokens;
    const std::uint64_t blocks = (tokens - conversations) / block_tokens + conversations;
    const std::uint64_t unquantized = each > blocks / conversations ? blocks : each * conversations;
    return {unquantized, blocks - unquantized};
}

std::uint64_t first_packed_length(const Retention& retention, std::uint32_t block_tokens) noexcept {
    const std::uint64_t end =
        std::uint64_t{whole_sinks(retention, block_tokens).sinks} + block_tokens;
    return retention.window +
           (retention.flush > 0 ? round_up<std::uint64_t>(end, retention.flush) : end);
}

}  // namespace lowkv
