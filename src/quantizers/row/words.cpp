#include "quantizers/words.h"

namespace lowkv::codec {

std::string_view row_restriction(const Codec& codec, Part part) noexcept {
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
         {codec.stage == Stage::pre && !by_row, "pre needs the group row or static, or reorder"},
         {ranged && codec.metadata != Metadata::fp16, "static has no metadata: drop fp8"},
         {ranged && part == Part::values, "static is for keys; values have no range of a channel"},
         {codec.stage == Stage::pre && part == Part::values,
          "pre is for keys; values have no rotary embedding"}});
}

}  // namespace lowkv::codec
