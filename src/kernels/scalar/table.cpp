// The scalar implementation: plain C++ for any CPU.

#include "kernels/scalar/begin.h"
//
#include "kernels/body/math.h"
//
#include "kernels/body/tile.h"
//
#include "kernels/body/gemm.h"
//
#include "kernels/body/softmax.h"
//
#include "kernels/body/attend.h"
//
#include "kernels/body/mass.h"

}  // namespace lowkv::kernels::scalar

namespace lowkv::kernels {

const Table scalar_table = {
    "scalar",
    "plain C++ for any CPU",
    []() noexcept -> bool { return true; },
    scalar::decode,
    scalar::prefill,
    scalar::weigh,
    scalar::code_kernels,
    scalar::row_kernels,
};

}  // namespace lowkv::kernels
