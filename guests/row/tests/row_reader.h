#pragma once
// What tests read of a row codec's packed part beside its codes, by the documented layout
// (row/row_part.h). Heads, channels within the head and tokens say where.

#include <cstdint>
#include <optional>

#include "codec/small_floats.h"
#include "row/outliers.h"

namespace lowkv::test {

class RowReader {
  public:
    explicit RowReader(const PackedPart& part)
        : part_(dynamic_cast<const codec::RowPart*>(&part)) {}

    // Whether it is the part of a row codec.
    explicit operator bool() const { return part_ != nullptr; }
    const codec::RowPart& part() const { return *part_; }
    const codec::RowTables& tables() const { return *part_->row; }
    // Null: keys are stored as they come.
    const Rope* rope() const {
        return part_ != nullptr && tables().rope != nullptr ? &tables().rope->rope() : nullptr;
    }
    // What is kept of a channel beside its code. `data` is the part.
    std::optional<float> outlier(const std::byte* data, std::uint32_t head, std::uint32_t channel,
                                 std::uint32_t token) const {
        if (tables().outliers == 0) return std::nullopt;
        const codec::HeadOutliers all = codec::head_outliers(*part_, data, head);
        for (std::uint32_t i = 0; i < all.count; ++i) {
            if (all.places[i].token == token && all.places[i].channel == channel)
                return codec::f16_to_f32(all.residuals[i]);
        }
        return std::nullopt;
    }
    // The group's number; `channel` is one of all heads'.
    std::uint32_t group(std::uint32_t channel, std::uint32_t token) const {
        const auto g = static_cast<std::uint32_t>(tables().group[channel]);
        return part_->keys != 0 ? g * part_->tokens + token : token * tables().groups + g;
    }
    // Static: the scale (0) or the zero (1) of a channel of all heads'.
    std::optional<float> fixed(std::uint32_t channel, std::uint32_t kind) const {
        if (tables().groups > 0) return std::nullopt;
        return (kind == 0 ? tables().scale : tables().zero)[channel];
    }

  private:
    const codec::RowPart* part_;
};

}  // namespace lowkv::test
