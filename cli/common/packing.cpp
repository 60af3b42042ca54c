#include "common/packing.h"

namespace lowkv::cli {

std::uint64_t packed_blocks(const Retention& retention, std::uint32_t block_tokens,
                            std::uint64_t tokens) {
    std::uint64_t left = tokens > retention.window ? tokens - retention.window : 0;
    if (retention.flush > 0) left -= left % retention.flush;
    const std::uint64_t sinks = ceil_div(retention.sinks, block_tokens);
    return left / block_tokens > sinks ? left / block_tokens - sinks : 0;
}

std::uint64_t first_packed(const Retention& retention, std::uint32_t block_tokens) {
    const std::uint64_t left = round_up(retention.sinks, block_tokens) + block_tokens;
    return retention.window + (retention.flush > 0 ? round_up(left, retention.flush) : left);
}

}  // namespace lowkv::cli
