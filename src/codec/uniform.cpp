#include "codec/uniform.h"

#include <algorithm>

namespace lowkv::codec {
Steps full_steps(const float* x, std::uint32_t count, float top) noexcept {
    const auto [low, high] = std::minmax_element(x, x + count);
    // A zero of either sign may come out of a rotation; a scale of -0 must not.
    return {*low < *high ? (*high - *low) / top : 0.0f, *low};
}

void quantize_uniform(const float* x, std::uint32_t count, const Steps& steps, float top,
                      std::uint8_t* codes) noexcept {
    const float by = divisor(steps.scale);
    for (std::uint32_t i = 0; i < count; ++i) codes[i] = uniform_code(x[i], steps.zero, by, top);
}

}  // namespace lowkv::codec
