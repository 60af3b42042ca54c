// What the sources in kernels/body begin with when they are compiled for AMX: AVX-512 with VBMI,
// but matrices.h multiplies the rows of prompts.

#include "platform/system.h"

#define LOWKV_MATRICES "kernels/amx/matrices.h"
#define LOWKV_SYSTEM_LETS platform::lets_use_tiles()
#define LOWKV_NEEDS "AVX-512 F, BW, DQ, VL, VNNI, VBMI, VBMI2, BF16, and AMX BF16 that is allowed"
#define LOWKV_TILES(first, next) LOWKV_VBMI(first, next) next("avx512bf16") next("amx-tile")
#define LOWKV_FEATURES(first, next) LOWKV_TILES(first, next) next("amx-bf16")
#define LOWKV_LEVELS "kernels/avx512_vbmi/levels.h"
#include "kernels/x86.h"
//
#include "kernels/avx512/vocabulary.h"
//
#include "kernels/body/parts.h"
