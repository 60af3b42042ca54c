// Which tokens a Sequence or a Batch has packed; `lowkv plan` and the sizes of images use it, too.

#include <algorithm>

#include "lowkv/scheme.h"
#include "round.h"

namespace lowkv {

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
    std::uint64_t end = tokens > retention.window ? tokens - retention.window : 0;
    if (retention.flush > 0) end -= end % retention.flush;
    end -= end % block_tokens;
    return {first, std::max(first, end)};
}

std::uint64_t first_packed_length(const Retention& retention, std::uint32_t block_tokens) noexcept {
    const std::uint64_t end =
        std::uint64_t{whole_sinks(retention, block_tokens).sinks} + block_tokens;
    return retention.window +
           (retention.flush > 0 ? round_up<std::uint64_t>(end, retention.flush) : end);
}

}  // namespace lowkv
