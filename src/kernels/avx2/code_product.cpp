// Products of codes, avx2.

#include "kernels/avx2/begin.h"
//
#include "kernels/body/metadata.h"
//
#include "kernels/body/codes.h"
//
#include "kernels/body/code_product.h"
//
#include "kernels/body/code_tile.h"

}  // namespace lowkv::kernels::avx2
LOWKV_TARGET_END
