// Products of codes, scalar.

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
#include "kernels/body/code_product.h"
//
#include "kernels/body/code_tile.h"

}  // namespace lowkv::kernels::scalar
