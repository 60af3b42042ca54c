#include "quantizers/words.h"
#include "codec/trellis.h"

namespace lowkv::codec {
namespace {

// Of which codes a trellis' window is.
std::string neighbours(const Codec& codec) {
    switch (codec.width) {
        case Width::one: return "six neighbouring codes";
        case Width::two: return "three neighbouring codes";
        default: return "a code and the third bits of the next three";
    }
}

std::string normal_levels(const Codec& codec) {
    std::string text = (codec.fit == Fit::norm ? "the norm of " : "a scale of ") +
                       group_words(codec) + " (" + std::string(metadata_bits(codec)) + ") times ";
    text += codec.levels == Levels::trellis
                ? "a level that " + neighbours(codec) + " choose (a trellis)"
                : "one of " + std::to_string(codec.level_count()) + " normal (Lloyd-Max) levels";
    switch (codec.fit) {
        case Fit::norm: break;
        case Fit::unbiased:
            return text + "; the scale keeps the product with the original unbiased";
        case Fit::least: return text + "; the scale is the one of the least squared error";
    }
    return text;
}

std::string scale_formula(const Codec& codec, const std::string& y) {
    switch (codec.fit) {
        case Fit::norm: break;
        case Fit::unbiased: return "|" + y + "|^2 / <" + y + ", level>";
        case Fit::least: return "<" + y + ", level> / |level|^2";
    }
    return "|" + y + "| / |level|";
}

}  // namespace

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

CodecWords grouped_words(const Codec& codec, Part part) {
    std::string sentence =
        width_words(codec, codec.centred ? "subtracting the block's mean per channel" : "",
                    rotation_words(codec));
    const std::string y = subject(codec, part);
    if (codec.levels != Levels::uniform) {
        return rotated_back(codec, part, sentence + normal_levels(codec),
                            (codec.levels == Levels::trellis ? "levels = the path nearest to "
                                                             : "level = the one nearest to ") +
                                y + " / rms(" + y + "), scale = " + scale_formula(codec, y),
                            "level * scale");
    }
    sentence += scale_and_zero(codec, group_words(codec));
    if (codec.clip == Clip::search) sentence += searched;
    return rotated_back(codec, part, sentence, even_steps(codec, y), std::string(even_value));
}

}  // namespace lowkv::codec
