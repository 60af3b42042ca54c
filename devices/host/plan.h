#pragma once
// A plan in the kernels' words.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "devices/kernels/call.h"
#include "devices/tensor/plan.h"
#include "lowkv/codec.h"
#include "queue.h"

namespace lowkv::devices {

struct State;

struct Description {
    lowkv_part parts[2];  // keys, values
    lowkv_tensor tensor;

    // It is numbers of 32 bits without padding.
    bool same(const Description& other) const noexcept;
};

// Throws Error(unsupported) where the plan has a quantizer that there are no kernels for; `device`:
// who says so.
void check_served(const Plan& plan, std::string_view device);

// The description of a plan that is served.
Description describe(const Plan& plan) noexcept;
// The description, and the tables that it refers to.
std::vector<std::uint32_t> words_of(const Plan& plan, const Description& description);

// ---- tensor cores (devices/tensor/) ----

// Whether, and how. Its tables lie one after the other from word `first` on; what follows them is
// told there. `parts`: the plan's.
lowkv_tensor describe_tensor(const Plan& plan, const lowkv_part (&parts)[2],
                             std::uint32_t& first) noexcept;

// The tables' words: pairs of levels, as two f16.
std::vector<std::uint32_t> tensor_tables(const Plan& plan, const lowkv_part (&parts)[2],
                                         const lowkv_tensor& tensor);

// The work of a call for at most so many groups, as evenly as tasks allow.
std::vector<lowkv_share> share_out(std::span<const lowkv_task> tasks,
                                   std::span<const lowkv_chunk> chunks, std::uint32_t kv_heads,
                                   std::size_t groups);

// Lays queries out and attends: the tasks of `chunks` in `shares`, which are on the device from
// word `first_share` on, as are all words and numbers, to `partial`. Throws Error(device_failed).
struct TensorCall {
    const lowkv_tensor& tensor;
    std::uint32_t head_dim, kv_heads, chunks, shares, first_share;
    Handle plan, words, numbers, partial;
};
void launch_tensor(State& state, const TensorCall& call);

}  // namespace lowkv::devices
