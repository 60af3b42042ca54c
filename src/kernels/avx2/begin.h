// What the sources in kernels/body begin with when they are compiled for AVX2: which CPUs have it,
// its target region and namespace, which the sources end, and its vocabulary.

#include <immintrin.h>

#include "kernels/kernel.h"

namespace lowkv::kernels::avx2 {

constexpr std::string_view needs = "AVX2, FMA, F16C";
inline bool supported() noexcept {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

}  // namespace lowkv::kernels::avx2

#define LOWKV_LEVELS "kernels/body/levels_of_16.h"
#define LOWKV_REGION_END LOWKV_TARGET_END
LOWKV_TARGET_BEGIN("avx2,fma,f16c")
namespace lowkv::kernels::avx2 {

#include "kernels/avx2/vocabulary.h"
//
#include "kernels/avx2/products.h"
//
#include "kernels/body/parts.h"
