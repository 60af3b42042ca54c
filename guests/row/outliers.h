#pragma once
// A head's outliers in the section that all heads of a row codec's part share (row_part.h).

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "row/row_part.h"

namespace lowkv::codec {

struct HeadOutliers {
    const OutlierPlace* places;
    const std::uint16_t* residuals;
    std::uint32_t count;
};

// Within the section whatever it holds: a packed block may come from a file.
inline HeadOutliers head_outliers(const RowPart& layout, const std::byte* section,
                                  std::uint32_t head) noexcept {
    const auto* begins = reinterpret_cast<const std::uint16_t*>(section + layout.outliers_offset);
    const auto most = static_cast<std::uint32_t>((layout.residuals_offset - layout.places_offset) /
                                                 sizeof(OutlierPlace));
    const std::uint32_t end = std::min<std::uint32_t>(begins[head + 1], most);
    const std::uint32_t begin = std::min<std::uint32_t>(begins[head], end);
    return {reinterpret_cast<const OutlierPlace*>(section + layout.places_offset) + begin,
            reinterpret_cast<const std::uint16_t*>(section + layout.residuals_offset) + begin,
            end - begin};
}

}  // namespace lowkv::codec
