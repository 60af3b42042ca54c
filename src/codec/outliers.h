#pragma once
// A head's outliers in the section that all heads of a row codec's part share (codec.h).

#include <cstddef>
#include <cstdint>

#include "lowkv/codec.h"

namespace lowkv::codec {

struct OutlierPlace {
    std::uint8_t channel, token;  // the channel within the head
};

struct HeadOutliers {
    const OutlierPlace* places;
    const std::uint16_t* residuals;
    std::uint32_t count;
};

inline HeadOutliers head_outliers(const PartLayout& layout, const std::byte* section,
                                  std::uint32_t head) noexcept {
    const auto* begins = reinterpret_cast<const std::uint16_t*>(section + layout.outliers_offset);
    return {
        reinterpret_cast<const OutlierPlace*>(section + layout.places_offset) + begins[head],
        reinterpret_cast<const std::uint16_t*>(section + layout.residuals_offset) + begins[head],
        static_cast<std::uint32_t>(begins[head + 1] - begins[head])};
}

}  // namespace lowkv::codec
