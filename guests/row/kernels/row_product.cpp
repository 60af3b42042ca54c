// Products of row codecs by one implementation.

#include "row/outliers.h"
//
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
#include "row/kernels/row_tile.h"
//
#include "kernels/body/gemm.h"
//
#include "row/kernels/row_product.h"

}  // namespace lowkv::kernels::LOWKV_IMPLEMENTATION
LOWKV_REGION_END
