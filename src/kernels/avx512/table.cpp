// The avx512 implementation: AVX-512 F, BW, DQ, VL, VNNI.

#include "kernels/avx512/begin.h"
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

}  // namespace lowkv::kernels::avx512
LOWKV_TARGET_END

namespace lowkv::kernels {

const Table avx512_table = {
    "avx512",
    "AVX-512 F, BW, DQ, VL, VNNI",
    []() noexcept -> bool {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
    },
    avx512::decode,
    avx512::prefill,
    avx512::weigh,
    avx512::code_kernels,
    avx512::row_kernels,
};

}  // namespace lowkv::kernels
