// What the sources in kernels/body begin with when they are compiled for AVX-512: which CPUs have
// it, its target region and namespace, which the sources end, and its vocabulary.

#include <immintrin.h>

#include "kernels/kernel.h"

// GCC 12 takes the undefined pass-through operand in its own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace lowkv::kernels::avx512 {

constexpr std::string_view needs = "AVX-512 F, BW, DQ, VL, VNNI";
inline bool supported() noexcept {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

}  // namespace lowkv::kernels::avx512

#define LOWKV_LEVELS "kernels/body/levels_of_16.h"
#define LOWKV_REGION_END LOWKV_TARGET_END
LOWKV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
namespace lowkv::kernels::avx512 {

#include "kernels/avx512/vocabulary.h"
//
#include "kernels/body/parts.h"
