#pragma once
// Codes whose levels a trellis chooses (codec/trellis.h), as windows (lowkv/format.h): a byte holds
// a code and, above it, what of those that follow it in its word chooses its level. Packing takes
// the code.

#include <array>
#include <cstdint>

#include "isa/table.h"
#include "quantizers/codes_part.h"
#include "quantizers/packing.h"

namespace lowkv::codec {

inline constexpr std::uint32_t trellis_tokens = LOWKV_UNIT_LANES;  // that words lie in

class TrellisCodes {
  public:
    TrellisCodes() = default;
    // `layout` has its levels.
    TrellisCodes(const kernels::Table& table, const CodesPart& layout) noexcept;

    // The windows of trellis_tokens tokens, rows of `channels` numbers that are close to N(0, 1).
    void encode(Part part, const float (*y)[max_lanes], std::uint32_t channels,
                std::uint8_t (*windows)[max_lanes]) const noexcept;

  private:
    kernels::EncodeTrellis encode_ = nullptr;
    std::array<float, LOWKV_WINDOWS> levels_{};
};

// Codes to windows.
void open_windows(CodeTile& tile, Width width, std::uint32_t lanes) noexcept;

}  // namespace lowkv::codec
