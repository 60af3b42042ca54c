#include "kernels/tables.h"

namespace lowkv::kernels {

std::span<const Table* const> tables() noexcept {
    static const Table* const all[] = {
#if defined(__x86_64__)
        &avx512_table,
        &avx2_table,
#endif
        &scalar_table,
    };
    return all;
}

}  // namespace lowkv::kernels
