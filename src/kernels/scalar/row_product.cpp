// Products of row codecs, scalar.

#include "kernels/scalar/begin.h"
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

}  // namespace lowkv::kernels::scalar
