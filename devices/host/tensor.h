#pragma once
// What of a plan the kernels on tensor cores serve (devices/tensor/), and their tables.

#include <cstdint>
#include <vector>

#include "devices/tensor/plan.h"
#include "lowkv/codec.h"
#include "queue.h"

namespace lowkv::devices {

// Whether, and how. Its tables lie one after the other from word `first` on; what follows them is
// told there. `parts`: the plan's.
lowkv_tensor describe_tensor(const Plan& plan, const lowkv_part (&parts)[2],
                             std::uint32_t& first) noexcept;

// The tables' words: pairs of levels, as two f16.
std::vector<std::uint32_t> tensor_tables(const Plan& plan, const lowkv_part (&parts)[2],
                                         const lowkv_tensor& tensor);

// The kernel that attends, and of how many warps its groups are.
struct TensorKernel {
    Kernel kernel;
    std::uint32_t warps;
};
TensorKernel tensor_kernel(const lowkv_tensor& tensor, std::uint32_t head_dim, bool wide) noexcept;

}  // namespace lowkv::devices
