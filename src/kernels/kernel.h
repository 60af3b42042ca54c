#pragma once
// What the bodies need, to be included before a target region begins (below).

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#include "codec/hadamard16.h"
#include "codec/small_floats.h"
#include "codec/sum.h"
#include "codec/units.h"
#include "isa/table.h"
#include "kernels/product.h"
#include "lowkv/codebook.h"
#include "quantizers/sorted/section.h"

// Compiles a region for an instruction set without per-file flags, so that nothing from a shared
// header is ever compiled for a CPU that the program may not run on. Include every other header
// before the region begins.

#define LOWKV_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define LOWKV_TARGET_BEGIN(features) \
    LOWKV_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define LOWKV_TARGET_END LOWKV_PRAGMA(clang attribute pop)
#else
#define LOWKV_TARGET_BEGIN(features) \
    LOWKV_PRAGMA(GCC push_options) LOWKV_PRAGMA(GCC target(features))
#define LOWKV_TARGET_END LOWKV_PRAGMA(GCC pop_options)
#endif

// Instrumented, everything inline and unrolled would take several times as long to compile as all
// the rest.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LOWKV_INLINE [[gnu::noinline, gnu::unused]] static
#define LOWKV_INLINE_LAMBDA
#define LOWKV_UNROLL(n)
#else
#define LOWKV_INLINE [[gnu::always_inline]] static inline
#define LOWKV_INLINE_LAMBDA __attribute__((always_inline))
#define LOWKV_UNROLL(n) LOWKV_PRAGMA(GCC unroll n)
#endif
