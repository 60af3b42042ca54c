// The scalar implementation: plain C++ for any CPU.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/float16.h"
#include "codec/head.h"
#include "codec/row_tables.h"
#include "kernels/tables.h"
#include "kernels/target.h"
#include "kernels/units.h"

namespace lowkv::kernels::scalar {
namespace {

#include "kernels/scalar/vocabulary.h"
//
#include "kernels/body/math.h"
//
#include "kernels/body/codes.h"
#include "kernels/body/matrix.h"
//
#include "kernels/body/row_tile.h"
//
#include "kernels/body/tile.h"
//
#include "kernels/body/row_product.h"
//
#include "kernels/body/softmax.h"
//
#include "kernels/body/attend.h"
#include "kernels/body/mass.h"

}  // namespace
}  // namespace lowkv::kernels::scalar

namespace lowkv::kernels {

const Table scalar_table = {
    "scalar",       "plain C++ for any CPU", []() noexcept -> bool { return true; },
    scalar::decode, scalar::prefill,         scalar::weigh,
};

}  // namespace lowkv::kernels
