#pragma once
// The implementations in this build. To add one: a folder with its vocabulary and its table, and
// a line in tables().

#include <span>

#include "kernels/table.h"

namespace lowkv::kernels {

extern const Table scalar_table;
#if defined(__x86_64__)
extern const Table avx2_table;
extern const Table avx512_table;
#endif

// Best first.
std::span<const Table* const> tables() noexcept;

}  // namespace lowkv::kernels
