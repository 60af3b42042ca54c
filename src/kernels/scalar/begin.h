// What the sources in kernels/body begin with when they are compiled for any CPU. They end the
// namespace, and the target region where there is one.

#include "kernels/kernel.h"

namespace lowkv::kernels::scalar {

constexpr std::string_view needs = "plain C++ for any CPU";
inline bool supported() noexcept { return true; }

#define LOWKV_LEVELS "kernels/body/levels_of_16.h"
#define LOWKV_REGION_END

#include "kernels/scalar/vocabulary.h"
//
#include "kernels/body/parts.h"
