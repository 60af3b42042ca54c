// What the sources in kernels/body begin with when they are compiled for AVX-512 with VBMI:
// AVX-512, but levels.h looks up otherwise.

#define LOWKV_NEEDS "AVX-512 F, BW, DQ, VL, VNNI, VBMI, VBMI2"
#define LOWKV_FEATURES(first, next) LOWKV_VBMI(first, next)
#define LOWKV_LEVELS "kernels/avx512_vbmi/levels.h"
#include "kernels/x86.h"
//
#include "kernels/avx512/vocabulary.h"
//
#include "kernels/body/parts.h"
