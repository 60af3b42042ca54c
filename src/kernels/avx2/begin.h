// What the sources in kernels/body begin with when they are compiled for AVX2.

#define LOWKV_NEEDS "AVX2, FMA, F16C"
#define LOWKV_FEATURES(first, next) LOWKV_AVX2(first, next)
#define LOWKV_LEVELS "kernels/body/levels_of_16.h"
#include "kernels/x86.h"
//
#include "kernels/avx2/vocabulary.h"
//
#include "kernels/avx2/products.h"
//
#include "kernels/body/parts.h"
