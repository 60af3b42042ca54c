// What begin.h of x86's implementations goes on with, once it has said LOWKV_NEEDS, in words,
// LOWKV_FEATURES, by the compilers' names, and LOWKV_LEVELS: which CPUs have them, the target
// region and the namespace, which the sources end.

#include <immintrin.h>

#include "kernels/kernel.h"

// GCC 12 takes the undefined pass-through operand in AVX-512's own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#ifndef LOWKV_SYSTEM_LETS
#define LOWKV_SYSTEM_LETS true
#endif
// Each level of x86 is the one before and more.
#define LOWKV_AVX2(first, next) first("avx2") next("fma") next("f16c")
#define LOWKV_AVX512_F(first, next) LOWKV_AVX2(first, next) next("avx512f") next("avx512bw")
#define LOWKV_AVX512_DQ(first, next) LOWKV_AVX512_F(first, next) next("avx512dq") next("avx512vl")
#define LOWKV_AVX512(first, next) LOWKV_AVX512_DQ(first, next) next("avx512vnni")
#define LOWKV_VBMI(first, next) LOWKV_AVX512(first, next) next("avx512vbmi") next("avx512vbmi2")

#define LOWKV_SAME(feature) feature
#define LOWKV_AFTER_COMMA(feature) "," feature
#define LOWKV_REGION_END LOWKV_TARGET_END

namespace lowkv::kernels::LOWKV_IMPLEMENTATION {

constexpr std::string_view needs = LOWKV_NEEDS;
inline bool supported() noexcept {
    return LOWKV_FEATURES(__builtin_cpu_supports, &&__builtin_cpu_supports) && LOWKV_SYSTEM_LETS;
}

}  // namespace lowkv::kernels::LOWKV_IMPLEMENTATION

LOWKV_TARGET_BEGIN(LOWKV_FEATURES(LOWKV_SAME, LOWKV_AFTER_COMMA))
namespace lowkv::kernels::LOWKV_IMPLEMENTATION {
