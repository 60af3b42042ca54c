// Products of row codecs by one implementation.

#include "begin.h"
//
#include "kernels/body/metadata.h"
//
#include "kernels/body/unit_view.h"
//
#include LOWKV_LEVELS
//
#include "kernels/body/codes.h"
//
#include "kernels/body/row_tile.h"
//
#include "kernels/body/gemm.h"
//
#include "kernels/body/row_product.h"

}  // namespace lowkv::kernels::LOWKV_IMPLEMENTATION
LOWKV_REGION_END
