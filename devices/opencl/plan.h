#pragma once
// A plan in the kernels' words.

#include <cstdint>
#include <vector>

#include "devices/kernels/part.h"
#include "lowkv/codec.h"

namespace lowkv::opencl {

struct Description {
    lowkv_part parts[2];  // keys, values

    // It is numbers of 32 bits without padding.
    bool same(const Description& other) const noexcept;
};

// Throws Error(unsupported) where the plan has a family that there are no kernels for.
void check_served(const Plan& plan);

// Of a plan that is served.
Description describe(const Plan& plan) noexcept;
// The description, and the tables that it refers to.
std::vector<std::uint32_t> words_of(const Plan& plan, const Description& description);

}  // namespace lowkv::opencl
