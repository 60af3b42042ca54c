// What the sources in kernels/body begin with when they are compiled for NEON with products of
// bytes: which CPUs have them, their target region and namespace, which the sources end, and the
// vocabulary: NEON's but for those products.

#include <arm_neon.h>
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "kernels/kernel.h"

namespace lowkv::kernels::neon_i8mm {

constexpr std::string_view needs = "64-bit ARM with I8MM";
inline bool supported() noexcept {
#if defined(__APPLE__)
    int has = 0;
    std::size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) == 0 && has != 0;
#else
    return (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#endif
}

}  // namespace lowkv::kernels::neon_i8mm

#define LOWKV_LEVELS "kernels/body/levels_of_16.h"
#define LOWKV_REGION_END LOWKV_TARGET_END
LOWKV_TARGET_BEGIN("arch=armv8.2-a+i8mm")
namespace lowkv::kernels::neon_i8mm {

#include "kernels/neon/vocabulary.h"
//
#include "kernels/neon_i8mm/products.h"
//
#include "kernels/body/parts.h"
