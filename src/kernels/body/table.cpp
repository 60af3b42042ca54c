// Attention by one implementation, and its table.

#include "begin.h"
//
#include "kernels/body/head_part.h"
//
#include "kernels/body/exact_rows.h"
//
#include "kernels/body/tile.h"
//
#include "kernels/body/gemm.h"
//
#include "kernels/body/latent.h"
//
#include "kernels/body/softmax.h"
//
#ifdef LOWKV_MATRICES
#include LOWKV_MATRICES
#else
constexpr bool multiplies_matrices = false;
constexpr unsigned prefill_rows = 96, rows_at_once = prefill_rows;

struct SpanMatrices {
    void store(const auto&...) {}
    void multiply(const auto&...) const {}
};
#endif
//
#include "kernels/body/attend.h"
//
#include "kernels/body/mass.h"

extern const Table table;  // known to select.cpp

}  // namespace lowkv::kernels::LOWKV_IMPLEMENTATION
LOWKV_REGION_END

#define LOWKV_STRING(name) #name
#define LOWKV_NAME(name) LOWKV_STRING(name)

namespace lowkv::kernels {

const Table LOWKV_IMPLEMENTATION::table = {
    LOWKV_NAME(LOWKV_IMPLEMENTATION),    LOWKV_IMPLEMENTATION::needs,
    LOWKV_IMPLEMENTATION::supported,     LOWKV_IMPLEMENTATION::decode,
    LOWKV_IMPLEMENTATION::prefill,       LOWKV_IMPLEMENTATION::weigh,
    LOWKV_IMPLEMENTATION::code_kernels,  LOWKV_IMPLEMENTATION::sorted_kernels,
    LOWKV_IMPLEMENTATION::to_f16,        LOWKV_IMPLEMENTATION::from_f16,
    LOWKV_IMPLEMENTATION::find_windows,  LOWKV_IMPLEMENTATION::encode_sorted,
    LOWKV_IMPLEMENTATION::decode_sorted, LOWKV_IMPLEMENTATION::prefill_rows,
};

}  // namespace lowkv::kernels
