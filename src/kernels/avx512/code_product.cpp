// Products of codes, avx512.

#include "kernels/avx512/begin.h"
//
#include "kernels/body/metadata.h"
//
#include "kernels/body/codes.h"
//
#include "kernels/body/code_product.h"
//
#include "kernels/body/code_tile.h"

}  // namespace lowkv::kernels::avx512
LOWKV_TARGET_END
