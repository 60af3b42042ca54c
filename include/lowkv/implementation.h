#pragma once
// An implementation is one instruction set's kernels. The best one that the CPU runs is chosen at
// run time; the environment variable LOWKV_IMPLEMENTATION forces one by name.

#include <span>
#include <string_view>

namespace lowkv {

struct Implementation {
    std::string_view name;         // "avx512_vbmi", "avx2", "neon", "scalar", ...
    std::string_view description;  // the instructions it needs
    bool supported;                // by this CPU
};

// All that this build holds, best first.
std::span<const Implementation> implementations();

// The one that a Plan gets when it names none. Throws Error(unsupported) when
// LOWKV_IMPLEMENTATION names one that this build or this CPU lacks, with the list of right ones.
const Implementation& active_implementation();

}  // namespace lowkv
