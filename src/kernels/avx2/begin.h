// What each of the implementation's sources begins with: its target region and namespace, which the
// source ends.

#include "kernels/kernel.h"

LOWKV_TARGET_BEGIN("avx2,fma,f16c")
namespace lowkv::kernels::avx2 {

#include "kernels/avx2/vocabulary.h"
//
#include "kernels/body/parts.h"
