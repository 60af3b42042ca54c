#include "families/words.h"

namespace lowkv::codec {

std::string_view balanced_restriction(const Codec& codec, Part part) noexcept {
    if (!codec.balanced) return {};
    const bool channel = codec.axis == Axis::channel;
    return first_broken(
        {{codec.levels != Levels::uniform || codec.centred || codec.by_row() ||
              codec.rotation == Rotate::random ||
              codec.group != (channel ? Group::g128 : Group::head),
          "varnorm needs uniform levels and channel-...-g128 or token-...-head"},
         {codec.clip != Clip::none, "varnorm can't be clipped"},
         {codec.width == Width::senary, senary_rule},
         // So that both parts keep a scale for each step of a product and a factor for each lane.
         {part == Part::keys && !channel,
          "varnorm gives keys a scale per channel: channel-...-g128"},
         {part == Part::values && channel,
          "varnorm gives values a scale per token: token-...-head"}});
}

CodecWords balanced_words(const Codec& codec, Part part) {
    const std::string sentence =
        width_words(codec, rotation_words(codec)) + scale_and_zero(codec, group_words(codec)) +
        "; a factor (16 bits) of each " + (codec.axis == Axis::channel ? "token" : "channel") +
        " brings a block's tokens and channels to one variance";
    return rotated_back(codec, part, sentence,
                        "x = " + subject(codec, part) + " / factor, " + even_steps(codec, "x"),
                        "factor (" + std::string(even_value) + ")");
}

}  // namespace lowkv::codec
