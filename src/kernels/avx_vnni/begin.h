// What the sources in kernels/body begin with when they are compiled for AVX2 with VNNI, as Intel's
// CPUs without AVX-512 have it since 2021: AVX2 but for products.

#define LOWKV_NEEDS "AVX2, FMA, F16C, AVX-VNNI"
#define LOWKV_FEATURES(first, next) LOWKV_AVX2(first, next) next("avxvnni")
#define LOWKV_LEVELS "kernels/body/levels_of_16.h"
#include "kernels/x86.h"
//
#include "kernels/avx2/vocabulary.h"
//
#include "kernels/avx_vnni/products.h"
//
#include "kernels/body/parts.h"
