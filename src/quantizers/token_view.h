#pragma once
// A head as tokens of channels, whichever way its part lies, and parts that rotate them.

#include <algorithm>

#include "codec/small_floats.h"
#include "isa/table.h"
#include "lowkv/rotation.h"
#include "quantizers/codes_part.h"

namespace lowkv::codec {

class TokenView {
  public:
    TokenView(Part part, const HeadShape& head)
        : by_channel_(part == Part::keys),
          stride_(head.row_stride),
          tokens_(by_channel_ ? head.lanes : head.steps),
          channels_(by_channel_ ? head.steps : head.lanes) {}

    std::uint32_t tokens() const noexcept { return tokens_; }
    std::uint32_t channels() const noexcept { return channels_; }

    // Infinities end at +-65504; a NaN is stored as 0.
    void load(const std::uint16_t* rows, std::uint32_t token, float* x) const noexcept {
        for (std::uint32_t c = 0; c < channels_; ++c) {
            const float value = f16_to_f32(rows[place(token, c)]);
            x[c] = value == value ? std::clamp(value, -f16_max, f16_max) : 0.0f;
        }
    }
    // A token's channels where they lie side by side, else null.
    const std::uint16_t* row(const std::uint16_t* rows, std::uint32_t token) const noexcept {
        return by_channel_ ? nullptr : rows + place(token, 0);
    }
    void store(const float* x, std::uint32_t token, std::uint16_t* rows) const noexcept {
        for (std::uint32_t c = 0; c < channels_; ++c) rows[place(token, c)] = f32_to_f16(x[c]);
    }

  private:
    bool by_channel_;
    std::size_t stride_;
    std::uint32_t tokens_, channels_;

    std::size_t place(std::uint32_t token, std::uint32_t channel) const noexcept {
        return by_channel_ ? channel * stride_ + token : token * stride_ + channel;
    }
};

// A part that changes a token's channels before they are coded: first by its codec's rotation, if
// there is one.
class RotatedPart : public CodesPart {
  public:
    const Rotation* rotation() const noexcept override { return rotation_.get(); }

    void load_as_it_is(const TokenView& view, const std::uint16_t* from, std::uint32_t token,
                       float* x) const noexcept {
        if (const std::uint16_t* row = view.row(from, token))
            table_.from_f16(row, x, view.channels());
        else
            view.load(from, token, x);
    }
    // A token's channels, rotated.
    void load_token(const TokenView& view, const std::uint16_t* from, std::uint32_t token,
                    float* x) const noexcept {
        load_as_it_is(view, from, token, x);
        if (rotation_ != nullptr) rotation_->apply(x);
    }
    // The inverse; x is overwritten.
    void store_token(const TokenView& view, float* x, std::uint32_t token,
                     std::uint16_t* to) const noexcept {
        if (rotation_ != nullptr) rotation_->apply_inverse(x);
        view.store(x, token, to);
    }

  protected:
    RotatedPart(const Codec& its_codec, const PartShape& its_shape, const PartInputs& inputs)
        : CodesPart(its_codec, its_shape),
          table_(*inputs.table),
          rotation_(inputs.rotations->of(its_codec.rotation)) {
        by_token = 1;
    }

    const kernels::Table& table_;

  private:
    std::shared_ptr<const Rotation> rotation_;
};

}  // namespace lowkv::codec
