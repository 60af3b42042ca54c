#pragma once
// Which rotation a layer's keys and its values lose least by: each legal one is tried on a sample.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "calibration/samples.h"
#include "lowkv/scheme.h"

namespace lowkv::calibration {

inline constexpr std::array all_rotations{Rotate::none, Rotate::hadamard, Rotate::random};

// Relative squared errors of the attention output with this part alone read as stored, in the order
// of all_rotations; none where the codec can't have the rotation.
using RotationErrors = std::array<std::optional<double>, all_rotations.size()>;

struct RotationChoice {
    LayerScheme scheme;                        // with the rotations chosen
    std::optional<RotationErrors> key, value;  // of parts that rotate
};

// Of the root mean square error: what another rotation than the scheme's own must gain, on the
// first half of the queries and on the second. What a sample can't tell apart stays as it is.
inline constexpr double noticeable_gain = 0.05;

// A codec without a rotation keeps none: that is another codec. `layer` seeds random rotations.
// Blocks are packed as a Sequence packs them: whole, and not where they hold a sink.
RotationChoice choose_rotations(const LayerSamples& samples, const LayerScheme& scheme,
                                const Retention& retention, std::uint32_t layer);

// The first position whose query reads a whole packed block.
std::uint32_t first_packed_query(const LayerScheme& scheme, const Retention& retention) noexcept;

}  // namespace lowkv::calibration
