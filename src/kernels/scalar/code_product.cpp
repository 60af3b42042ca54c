// Products of codes, scalar.

#include "kernels/scalar/begin.h"
//
#include "kernels/body/metadata.h"
//
#include "kernels/body/codes.h"
//
#include "kernels/body/code_product.h"
//
#include "kernels/body/code_tile.h"

}  // namespace lowkv::kernels::scalar
