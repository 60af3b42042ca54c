// Products of codes by one implementation.

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
#include "kernels/body/many_rows.h"
//
#include "kernels/body/code_product.h"
//
#include "kernels/body/code_tile.h"

}  // namespace lowkv::kernels::LOWKV_IMPLEMENTATION
LOWKV_REGION_END
