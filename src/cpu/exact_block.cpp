#include "cpu/exact_block.h"

#include <cstring>

namespace lowkv::cpu {
namespace {

using cache::convert;

std::size_t elements(const Plan& plan) noexcept {
    return std::size_t{plan.shape().numbers()} * plan.block_tokens();
}

std::size_t position_bytes(const Plan& plan) noexcept {
    return plan.exact_bytes() - plan.exact_positions_offset();
}

}  // namespace

void decode_exact(const Plan& plan, const std::byte* packed, std::byte* f16,
                  std::byte* exact) noexcept {
    if (is_f16(plan)) return decode_block(plan, packed, exact);
    decode_block(plan, packed, f16);
    convert(plan.kernels(), RowType::f16, f16, plan.rows(), exact, elements(plan));
    std::memcpy(exact + plan.exact_positions_offset(), f16 + plan.f16_positions_offset(),
                position_bytes(plan));
}

void round_to_f16(const Plan& plan, const std::byte* exact, std::byte* f16) noexcept {
    convert(plan.kernels(), plan.rows(), exact, RowType::f16, f16, elements(plan));
    std::memcpy(f16 + plan.f16_positions_offset(), exact + plan.exact_positions_offset(),
                position_bytes(plan));
}

}  // namespace lowkv::cpu
