// Products of row codecs, scalar.

#include "kernels/kernel.h"

namespace lowkv::kernels::scalar {

#include "kernels/scalar/vocabulary.h"
//
#include "kernels/body/parts.h"
//
#include "kernels/body/math.h"
//
#include "kernels/body/codes.h"
//
#include "kernels/body/row_tile.h"
//
#include "kernels/body/gemm.h"
//
#include "kernels/body/row_product.h"

}  // namespace lowkv::kernels::scalar
