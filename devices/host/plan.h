#pragma once
// A plan in the kernels' words.

#include <cstdint>
#include <string_view>
#include <vector>

#include "devices/kernels/call.h"
#include "devices/tensor/plan.h"
#include "lowkv/codec.h"

namespace lowkv::devices {

struct Description {
    lowkv_part parts[2];  // keys, values
    lowkv_tensor tensor;

    // It is numbers of 32 bits without padding.
    bool same(const Description& other) const noexcept;
};

// Throws Error(unsupported) where the plan has a quantizer that there are no kernels for; `device`:
// who says so.
void check_served(const Plan& plan, std::string_view device);

// Of a plan that is served.
Description describe(const Plan& plan) noexcept;
// The description, and the tables that it refers to.
std::vector<std::uint32_t> words_of(const Plan& plan, const Description& description);

}  // namespace lowkv::devices
