// What the sources in kernels/body begin with when they are compiled for NEON, which every 64-bit
// ARM CPU has: no target region, its namespace, which the sources end, and its vocabulary.

#include <arm_neon.h>

#include "kernels/kernel.h"

namespace lowkv::kernels::neon {

constexpr std::string_view needs = "64-bit ARM";
inline bool supported() noexcept { return true; }

#define LOWKV_LEVELS "kernels/body/levels_of_16.h"
#define LOWKV_REGION_END

#include "kernels/neon/vocabulary.h"
//
#include "kernels/neon/products.h"
//
#include "kernels/body/parts.h"
