// What the sources in kernels/body begin with when they are compiled for AMX: which CPUs have it,
// its target region and namespace, which the sources end, and its vocabulary: that of AVX-512 with
// VBMI; matrices.h multiplies the rows of prompts.

#include <immintrin.h>

#include "kernels/kernel.h"
#include "platform/system.h"

// GCC 12 takes the undefined pass-through operand in its own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace lowkv::kernels::amx {

constexpr std::string_view needs =
    "AVX-512 F, BW, DQ, VL, VNNI, VBMI, VBMI2, BF16, and AMX BF16 that the system lets programs "
    "use";
inline bool supported() noexcept {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bf16") &&
           platform::bf16_tiles();
}

}  // namespace lowkv::kernels::amx

#define LOWKV_LEVELS "kernels/avx512_vbmi/levels.h"
#define LOWKV_MATRICES "kernels/amx/matrices.h"
#define LOWKV_REGION_END LOWKV_TARGET_END
LOWKV_TARGET_BEGIN(
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2,avx512bf16,avx2,fma,f16c,"
    "amx-tile,amx-bf16")
namespace lowkv::kernels::amx {

#include "kernels/avx512/vocabulary.h"
//
#include "kernels/body/parts.h"
