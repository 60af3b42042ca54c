#pragma once
// What a row codec (Codec::by_row) knows beforehand, ready for use: its calibration, its rope.

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "lowkv/codec.h"
#include "lowkv/quantizer.h"
#include "row/rope_table.h"

namespace lowkv::codec {

inline constexpr std::uint32_t max_row_groups = 32;  // kernels hold a token's groups in registers
inline constexpr std::uint32_t max_row_channels = 8192;  // of all heads
inline constexpr std::uint32_t max_outliers = 164;       // of a row: 2 % of them, rounded up
// Of learned levels: Q-Norm moves the outer ones of a group scaled to +-1 a little beyond it.
inline constexpr float largest_level = 2.0f;

// Groups of channels, in a layer's keys or values: channels / the group's size to the nearest, at
// least 1. Throws Error(unsupported) for more than max_row_groups.
std::uint32_t group_count(const Codec& codec, const Shape& shape);

struct OutlierPlace {
    std::uint8_t channel, token;  // the channel within the head
};

struct RowTables {
    std::uint32_t groups = 0;         // scales per token; 0: static
    std::vector<std::int32_t> group;  // [channels], the group of each; static: empty
    std::vector<float> clip;          // [groups], the share of a group's range that is kept
    // Static: [channels]. x^ = level * scale + zero, and the range that is no outlier's.
    std::vector<float> scale, zero, low, high;
    std::vector<float> boundaries;  // learned levels
    // What a code stands for, before scale and zero; repeated to 16 entries.
    alignas(64) std::array<float, 16> level{};
    std::uint32_t outliers = 0;             // at most, per token
    std::shared_ptr<const RopeTable> rope;  // null: stored as they come
};

// Throws Error(invalid_calibration) if `calibration` is null where the codec needs one, or does not
// fit it; Error(unsupported) for too many groups or channels.
std::shared_ptr<RowTables> make_row_tables(const Codec& codec, const Shape& shape,
                                           const PartCalibration* calibration, const Rope* rope,
                                           const char* what);

}  // namespace lowkv::codec
