#pragma once
// What is read back of a token's row (all kv heads) that was stored under a calibrated codec, in
// plain floats: the solvers judge a calibration by it. Packing is not modelled, rounding is: codes,
// E4M3 or f16 metadata, and outliers up to the codec's cap.

#include <cstdint>
#include <span>
#include <vector>

#include "lowkv/calibration.h"

namespace lowkv::calibration {

// How many elements of a row are kept in f16: ceil(outliers / 1000 * channels)
// (docs/methods/row.md, "Outliers").
std::uint32_t outlier_cap(const Codec& codec, std::uint32_t channels) noexcept;

// The row's elements that are kept in f16 beside their codes, at most outlier_cap.
//   static: those beyond their channel's range, the farthest first
//   row:    the row's largest, and as many of its smallest (one fewer if the cap is odd)
std::vector<std::uint32_t> outliers_of(const Codec& codec, const PartCalibration& part,
                                       std::span<const float> row);

// A row's elements as fractions of their group: (x - centre) / half its range, in [-1, 1], less
// the outliers. For learned levels of groups `row` and `static`.
struct NormalisedRow {
    std::vector<float> value;
    std::vector<std::uint32_t> channel;
};
NormalisedRow normalised(const Codec& codec, const PartCalibration& part,
                         std::span<const float> row);

class RowModel {
  public:
    // `codec` needs a calibration (Codec::needs_calibration) and `part` is its own.
    RowModel(const Codec& codec, const PartCalibration& part);

    // row and out: [channels].
    void read_back(std::span<const float> row, std::span<float> out) const;
    // Only the channels of one group of a reordered codec, with another clip. rows and out:
    // [tokens][channels].
    void read_back_group(std::span<const float> rows, std::size_t group, float clip,
                         std::span<float> out) const;
    std::size_t groups() const noexcept { return members_.size(); }

  private:
    float read_element(float value, float scale, float zero) const;

    const Codec& codec_;
    const PartCalibration& part_;
    std::vector<std::vector<std::uint32_t>> members_;  // reordered: the channels of each group
};

}  // namespace lowkv::calibration
