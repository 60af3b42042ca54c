#pragma once
// The range of a uniform group and its steps.

#include <cstdint>
#include <span>

namespace lowkv::codec {

// Code 0 is `zero`, code n is n * scale above it.
struct Grid {
    float scale = 0.0f;
    float zero = 0.0f;
};

// `top` steps over [low, high], shortened to `share` of its length about its centre
// (docs/methods.md, "Clipping": SKVQ's paper shortens it towards 0).
inline Grid clipped_grid(float low, float high, float share, float top) noexcept {
    if (!(low < high)) return {0.0f, low};
    const float half = 0.5f * (high - low);
    return {2.0f * half * share / top, low + half * (1.0f - share)};
}

}  // namespace lowkv::codec
