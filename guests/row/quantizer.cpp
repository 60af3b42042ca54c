// The row quantizer, and its kernels by name and instruction set.

#include <span>
#include <string>

#include "isa/table.h"
#include "lowkv/codebook.h"
#include "lowkv/error.h"
#include "quantizers/rules.h"
#include "row/row_part.h"

namespace lowkv {

// LOWKV_IMPLEMENTATIONS is as in kernels/select.cpp.
#define X(set)                               \
    namespace kernels::set {                 \
    extern const PartKernels row_kernels[5]; \
    }
LOWKV_IMPLEMENTATIONS
#undef X

namespace codec {
namespace {

const PartKernels& kernels_of(const kernels::Table& table, Width width) {
    std::span<const PartKernels> all;
#define X(set) \
    if (table.name == #set) all = kernels::set::row_kernels;
    LOWKV_IMPLEMENTATIONS
#undef X
    const std::string name = concat("row-", row_of(width).word);
    for (const PartKernels& kernels : all)
        if (kernels.name == name) return kernels;
    throw Error(ErrorCode::unsupported, table.name, " has no kernels named ", name);
}

class RowQuantizer final : public Quantizer {
    std::string_view name() const noexcept override { return "row"; }
    std::uint32_t block_tokens(const Codec&) const noexcept override { return 0; }
    std::shared_ptr<const PackedPart> compile(const Codec& codec, const PartShape& shape,
                                              const PartInputs& inputs) const override {
        return std::make_shared<RowPart>(codec, shape, inputs,
                                         kernels_of(*inputs.table, codec.width));
    }
    std::string_view restriction(const Codec& codec, Part part) const noexcept override {
        const bool ranged = codec.group == Group::calibrated, channel = codec.axis == Axis::channel;
        const bool whole = codec.group == Group::row || ranged, by_row = codec.by_row();
        const bool learned = codec.levels == Levels::learned;
        return first_broken(
            {{!channel && ranged, "static is the range of a channel: channel-..."},
             {codec.reordered && (channel || row_of(codec.group).size == 0),
              "reorder makes groups of channels: token-...-g32, g64 or g128"},
             {by_row && (codec.levels == Levels::normal || codec.levels == Levels::trellis ||
                         codec.rotation != Rotate::none || codec.centred),
              "normal, hadamard, random and mean are for each head: not row, static or reorder"},
             {learned && !whole, "learned levels need the group row or static"},
             {learned && codec.width != Width::two && codec.width != Width::three &&
                  codec.width != Width::four,
              "learned levels have 2, 3 or 4 bits"},
             {codec.clip == Clip::calibrated && !codec.reordered,
              "clip has a share for each calibrated group: add reorder"},
             {codec.outliers > 0 && !whole,
              "outliers are a share of a whole row: they need the group row or static"},
             {codec.stage == Stage::pre && !by_row,
              "pre needs the group row or static, or reorder"},
             {ranged && codec.metadata != Metadata::fp16, "static has no metadata: drop fp8"},
             {ranged && part == Part::values,
              "static is for keys; values have no range of a channel"},
             {codec.stage == Stage::pre && part == Part::values,
              "pre is for keys; values have no rotary embedding"}});
    }
    PartCalibration neutral_calibration(const Codec& codec, const Shape& shape) const override {
        PartCalibration part;
        const std::uint32_t channels = shape.channels();
        if (codec.reordered) {
            const std::uint32_t groups = group_count(codec, shape);
            for (std::uint32_t c = 0; c < channels; ++c) {
                part.group.push_back(
                    static_cast<std::uint16_t>(std::uint64_t{c} * groups / channels));
            }
            if (codec.clip == Clip::calibrated) part.clip.assign(groups, 1.0f);
        }
        if (codec.group == Group::calibrated) {
            part.low.assign(channels, -4.0f);
            part.high.assign(channels, 4.0f);
        }
        if (codec.levels == Levels::learned) {
            const NormalCodebook& book = normal_codebook(codec.level_count());
            const float top = book.level[book.count - 1];
            for (std::uint32_t i = 0; i < book.count; ++i)
                part.levels.push_back(book.level[i] / top);
            for (std::uint32_t i = 0; i + 1 < book.count; ++i) {
                part.boundaries.push_back(book.boundary[i] / top);
            }
        }
        return part;
    }
};

}  // namespace

const Quantizer& row_quantizer() noexcept {
    static const RowQuantizer quantizer;
    return quantizer;
}

}  // namespace codec
}  // namespace lowkv
