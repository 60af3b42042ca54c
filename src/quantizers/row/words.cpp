#include "quantizers/words.h"

namespace lowkv::codec {
namespace {

std::string percent(std::uint8_t thousandths) {
    const std::string whole = std::to_string(thousandths / 10);
    return whole + (thousandths % 10 != 0 ? "." + std::to_string(thousandths % 10) : "") + " %";
}

std::string row_group(const Codec& codec) {
    if (codec.group == Group::row) return "one token, all heads,";
    return "a group of about " + std::to_string(row_of(codec.group).size) +
           " alike channels of one token, of all heads, which a calibration has found,";
}

}  // namespace

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

CodecWords row_words(const Codec& codec, Part part) {
    const bool ranged = codec.group == Group::calibrated, pre = codec.stage == Stage::pre;
    const std::string original = part == Part::keys ? "k" : "v", y = pre ? "y" : original;
    CodecWords words;
    words.sentence = width_words(codec, pre ? "undoing RoPE" : "") +
                     (ranged ? "the numbers of one channel share a range from a calibration"
                             : scale_and_zero(codec, row_group(codec)));
    if (pre) words.store = "y = k turned back by its position, ";
    std::string value(even_value);
    if (codec.levels == Levels::learned) {
        words.sentence += ", cut at " + std::to_string(codec.level_count()) +
                          " levels that a calibration has learned";
        words.store += "zero and scale = centre and half of " +
                       (ranged ? "the channel's range" : "the range of " + y) +
                       ", code = boundaries below (" + y + " - zero) / scale";
        value = "level[code] * scale + zero";
    } else {
        words.store += even_steps(codec, y);
    }
    if (codec.clip == Clip::calibrated)
        words.sentence += ", over the share of their range that the calibration gives the group";
    if (codec.clip == Clip::search) words.sentence += searched;
    if (codec.outliers > 0) {
        words.sentence += "; what lies furthest outside, up to " + percent(codec.outliers) +
                          " of a token's numbers, is kept in f16 beside";
        value += " + what is kept beside";
    }
    words.read = original + " = " + (pre ? "(" + value + ") turned to its position" : value);
    return words;
}

}  // namespace lowkv::codec
