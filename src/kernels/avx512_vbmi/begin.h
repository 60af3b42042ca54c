// What the sources in kernels/body begin with when they are compiled for AVX-512 with VBMI: which
// CPUs have it, its target region and namespace, which the sources end, and its vocabulary: that of
// AVX-512; levels.h looks up otherwise.

#include <immintrin.h>

#include "kernels/kernel.h"

// GCC 12 takes the undefined pass-through operand in its own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace lowkv::kernels::avx512_vbmi {

constexpr std::string_view needs = "AVX-512 F, BW, DQ, VL, VNNI, VBMI, VBMI2";
inline bool supported() noexcept {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vbmi2");
}

}  // namespace lowkv::kernels::avx512_vbmi

#define LOWKV_LEVELS "kernels/avx512_vbmi/levels.h"
#define LOWKV_REGION_END LOWKV_TARGET_END
LOWKV_TARGET_BEGIN(
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2,avx2,fma,f16c")
namespace lowkv::kernels::avx512_vbmi {

#include "kernels/avx512/vocabulary.h"
//
#include "kernels/body/parts.h"
