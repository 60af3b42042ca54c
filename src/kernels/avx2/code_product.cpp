// Products of codes, avx2.

#include "kernels/kernel.h"

LOWKV_TARGET_BEGIN("avx2,fma,f16c")
namespace lowkv::kernels::avx2 {

#include "kernels/avx2/vocabulary.h"
//
#include "kernels/body/parts.h"
//
#include "kernels/body/math.h"
//
#include "kernels/body/codes.h"
//
#include "kernels/body/code_product.h"
//
#include "kernels/body/code_tile.h"

}  // namespace lowkv::kernels::avx2
LOWKV_TARGET_END
