// What the sources in kernels/body begin with when they are compiled for AVX-512.

#define LOWKV_NEEDS "AVX-512 F, BW, DQ, VL, VNNI"
#define LOWKV_FEATURES(first, next) LOWKV_AVX512(first, next)
#define LOWKV_LEVELS "kernels/body/levels_of_16.h"
#include "kernels/x86.h"
//
#include "kernels/avx512/vocabulary.h"
//
#include "kernels/body/parts.h"
