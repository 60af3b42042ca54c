// A block of f16 rows <-> a packed block: loops over parts and heads. What happens to a head is its
// quantizer's.

#include <cstring>

#include "lowkv/codec.h"

namespace lowkv {
namespace {

// Where a part begins in a block of f16 rows and in a packed block.
std::size_t f16_offset(const Plan& plan, Part part) noexcept {
    return part == Part::keys ? 0 : plan.f16_part_bytes();
}
std::size_t packed_offset(const Plan& plan, Part part) noexcept {
    return part == Part::keys ? 0 : plan.keys().bytes();
}

const std::uint16_t* f16_rows(const Plan& plan, Part part, const std::byte* f16) noexcept {
    return reinterpret_cast<const std::uint16_t*>(f16 + f16_offset(plan, part));
}

}  // namespace

void encode_shared(const Plan& plan, const std::byte* f16, std::byte* packed,
                   std::optional<Part> only) noexcept {
    const auto* positions =
        reinterpret_cast<const std::int32_t*>(f16 + plan.f16_positions_offset());
    for (const Part part : plan.stored_parts())
        if (!only || *only == part)
            plan.part(part).encode_shared(f16_rows(plan, part, f16),
                                          plan.has_positions() ? positions : nullptr,
                                          packed + packed_offset(plan, part));
}

void encode_block(const Plan& plan, const std::byte* f16, std::byte* packed,
                  std::uint32_t first_head, std::uint32_t last_head, const EncodeHints& hints,
                  std::optional<Part> only) noexcept {
    for (const Part part : plan.stored_parts()) {
        if (only && *only != part) continue;
        EncodeHints its_hints = hints;
        if (its_hints.stats_from != nullptr) its_hints.stats_from += packed_offset(plan, part);
        for (std::uint32_t head = first_head; head < last_head; ++head)
            plan.part(part).encode_head(f16_rows(plan, part, f16), head,
                                        packed + packed_offset(plan, part), its_hints);
    }
}

void decode_block(const Plan& plan, const std::byte* packed, std::byte* f16) noexcept {
    for (const Part part : plan.stored_parts()) {
        auto* rows = reinterpret_cast<std::uint16_t*>(f16 + f16_offset(plan, part));
        for (std::uint32_t head = 0; head < plan.shape().kv_heads; ++head) {
            plan.part(part).decode_head(packed + packed_offset(plan, part), head, rows);
        }
    }
    if (!plan.has_positions()) return;
    std::memcpy(f16 + plan.f16_positions_offset(), packed + plan.keys().positions_offset(),
                sizeof(std::int32_t) * plan.block_tokens());
}

}  // namespace lowkv
