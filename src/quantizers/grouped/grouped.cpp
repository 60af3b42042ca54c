#include "quantizers/grouped/grouped.h"

#include "lowkv/codebook.h"
#include "quantizers/packing.h"
#include "quantizers/rules.h"

namespace lowkv::codec {
namespace {

bool by_token(const Codec& codec) noexcept {
    return codec.levels == Levels::normal || codec.levels == Levels::trellis ||
           codec.rotation != Rotate::none || codec.centred;
}

class GroupedQuantizer final : public Quantizer {
    std::string_view name() const noexcept override { return "grouped"; }
    std::uint32_t block_tokens(const Codec& codec) const noexcept override {
        if (codec.centred) return max_block_tokens;
        return codec.axis == Axis::channel ? row_of(codec.group).size : 0;
    }
    std::shared_ptr<const PackedPart> compile(const Codec& codec, const PartShape& shape,
                                              const PartInputs& inputs) const override {
        return by_token(codec) ? make_by_token(codec, shape, inputs)
                               : make_uniform(codec, shape, inputs);
    }
    std::string_view restriction(const Codec& codec, Part part) const noexcept override {
        const bool trellis = codec.levels == Levels::trellis, channel = codec.axis == Axis::channel;
        const bool normal = codec.levels == Levels::normal || trellis;
        return first_broken(
            {{channel && (normal || codec.centred),
              "normal, trellis and mean need a scale per token: token-..."},
             {channel && codec.rotation != Rotate::none,
              "hadamard and random need a scale per token: token-..."},
             {normal && codec.width == Width::eight, "normal levels have 1.5, 2, 3 or 4 bits"},
             {!normal && codec.fit != Fit::norm,
              "unbiased and lsq choose the scale of normal levels: add normal or trellis"},
             {trellis && codec.axis == Axis::token &&
                  (trellis_bits(codec.width) == 0 || codec.group != Group::head),
              "a trellis has 1, 2 or 3 bits and one scale for a token's head: "
              "token-2-head-trellis"},
             {!trellis && codec.width == Width::one, "1 bit needs a trellis: token-1-head-trellis"},
             {!normal && codec.metadata == Metadata::fp8_e5m3,
              "e5m3 has no sign: it is for the norms of normal and trellis levels"},
             {codec.centred && part == Part::values,
              "mean is for keys; values have no common offset that a softmax ignores"},
             {channel && (codec.group == Group::head || codec.group == Group::row),
              "a group of one channel is a number of tokens (g32, g64 or g128) or static"},
             {codec.clip != Clip::none &&
                  (codec.levels != Levels::uniform || codec.group == Group::calibrated),
              "clip and search shorten the range of a uniform group"}});
    }
};

}  // namespace

const Quantizer& grouped_quantizer() noexcept {
    static const GroupedQuantizer quantizer;
    return quantizer;
}

}  // namespace lowkv::codec
