// Exact block <-> packed block: loops over parts and heads. What happens to a head is its family's.

#include <cstring>

#include "lowkv/codec.h"

namespace lowkv {
namespace {

constexpr Part parts[] = {Part::keys, Part::values};

// Where a part begins in an exact and in a packed block.
std::size_t exact_offset(const Plan& plan, Part part) noexcept {
    return part == Part::keys ? 0 : plan.exact_part_bytes();
}
std::size_t packed_offset(const Plan& plan, Part part) noexcept {
    return part == Part::keys ? 0 : plan.keys().bytes();
}

const std::uint16_t* exact_rows(const Plan& plan, Part part, const std::byte* exact) noexcept {
    return reinterpret_cast<const std::uint16_t*>(exact + exact_offset(plan, part));
}

}  // namespace

void encode_shared(const Plan& plan, const std::byte* exact, std::byte* packed) noexcept {
    const auto* positions =
        reinterpret_cast<const std::int32_t*>(exact + plan.exact_positions_offset());
    for (const Part part : parts) {
        plan.part(part).encode_shared(exact_rows(plan, part, exact),
                                      plan.has_positions() ? positions : nullptr,
                                      packed + packed_offset(plan, part));
    }
}

void encode_block(const Plan& plan, const std::byte* exact, std::byte* packed,
                  std::uint32_t first_head, std::uint32_t last_head) noexcept {
    for (const Part part : parts) {
        for (std::uint32_t head = first_head; head < last_head; ++head) {
            plan.part(part).encode_head(exact_rows(plan, part, exact), head,
                                        packed + packed_offset(plan, part));
        }
    }
}

void decode_block(const Plan& plan, const std::byte* packed, std::byte* exact) noexcept {
    for (const Part part : parts) {
        auto* rows = reinterpret_cast<std::uint16_t*>(exact + exact_offset(plan, part));
        for (std::uint32_t head = 0; head < plan.shape().kv_heads; ++head) {
            plan.part(part).decode_head(packed + packed_offset(plan, part), head, rows);
        }
    }
    if (!plan.has_positions()) return;
    std::memcpy(exact + plan.exact_positions_offset(), packed + plan.keys().positions_offset(),
                sizeof(std::int32_t) * plan.block_tokens());
}

}  // namespace lowkv
