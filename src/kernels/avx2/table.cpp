// The avx2 implementation: AVX2, FMA, F16C.

#include "kernels/avx2/begin.h"
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

}  // namespace lowkv::kernels::avx2
LOWKV_TARGET_END

namespace lowkv::kernels {

const Table avx2_table = {
    "avx2",
    "AVX2, FMA, F16C",
    []() noexcept -> bool {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
    },
    avx2::decode,
    avx2::prefill,
    avx2::weigh,
    avx2::code_kernels,
    avx2::row_kernels,
};

}  // namespace lowkv::kernels
