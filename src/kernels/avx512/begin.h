// What each of the implementation's sources begins with: its target region and namespace, which the
// source ends.

#include "kernels/kernel.h"

// GCC 12 takes the undefined pass-through operand in its own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

LOWKV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
namespace lowkv::kernels::avx512 {

#include "kernels/avx512/vocabulary.h"
//
#include "kernels/body/parts.h"
