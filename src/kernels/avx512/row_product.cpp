// Products of row codecs, avx512.

#include "kernels/avx512/begin.h"
//
#include "kernels/body/metadata.h"
//
#include "kernels/body/codes.h"
//
#include "kernels/body/row_tile.h"
//
#include "kernels/body/gemm.h"
//
#include "kernels/body/row_product.h"

}  // namespace lowkv::kernels::avx512
LOWKV_TARGET_END
