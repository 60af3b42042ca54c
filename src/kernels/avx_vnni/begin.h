// What the sources in kernels/body begin with when they are compiled for AVX2 with VNNI, as Intel's
// CPUs without AVX-512 have it since 2021: which those are, its target region and namespace, which
// the sources end, and its vocabulary: AVX2's but for products.

#include <immintrin.h>

#include "kernels/kernel.h"

namespace lowkv::kernels::avx_vnni {

constexpr std::string_view needs = "AVX2, FMA, F16C, AVX-VNNI";
inline bool supported() noexcept {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avxvnni");
}

}  // namespace lowkv::kernels::avx_vnni

#define LOWKV_LEVELS "kernels/body/levels_of_16.h"
#define LOWKV_REGION_END LOWKV_TARGET_END
LOWKV_TARGET_BEGIN("avx2,fma,f16c,avxvnni")
namespace lowkv::kernels::avx_vnni {

#include "kernels/avx2/vocabulary.h"
//
#include "kernels/avx_vnni/products.h"
//
#include "kernels/body/parts.h"
