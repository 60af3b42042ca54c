#include "quantizers/words.h"
#include "lowkv/codebook.h"

namespace lowkv::codec {

std::string_view grouped_restriction(const Codec& codec, Part part) noexcept {
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
          "a trellis has 1, 2 or 3 bits and one scale for a token's head: token-2-head-trellis"},
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

}  // namespace lowkv::codec
