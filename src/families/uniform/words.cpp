#include "families/words.h"

namespace lowkv::codec {

std::string_view uniform_restriction(const Codec& codec) noexcept {
    return first_broken(
        {{codec.axis == Axis::channel && (codec.group == Group::head || codec.group == Group::row),
          "a group of one channel is a number of tokens (g32, g64 or g128) or static"},
         {codec.clip != Clip::none &&
              (codec.levels != Levels::uniform || codec.group == Group::calibrated),
          "clip and search shorten the range of a uniform group"}});
}

CodecWords uniform_words(const Codec& codec, Part part) {
    std::string sentence = width_words(codec) + scale_and_zero(codec, group_words(codec));
    if (codec.clip == Clip::search) sentence += searched;
    return rotated_back(codec, part, sentence, even_steps(codec, subject(codec, part)),
                        std::string(even_value));
}

}  // namespace lowkv::codec
