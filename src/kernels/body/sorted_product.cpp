// Products of sorted keys by one implementation.

#include "begin.h"
//
#include "kernels/body/unit_view.h"
//
#include LOWKV_LEVELS
//
#include "kernels/body/codes.h"
//
#include "kernels/body/many_rows.h"
//
#include "kernels/body/sorted_product.h"
//
#include "kernels/body/sorted_tile.h"

}  // namespace lowkv::kernels::LOWKV_IMPLEMENTATION
LOWKV_REGION_END
