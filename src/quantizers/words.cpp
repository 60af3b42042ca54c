#include "quantizers/words.h"

#include <utility>

namespace lowkv::codec {

std::string_view metadata_bits(const Codec& codec) noexcept {
    return codec.metadata == Metadata::fp16 ? "16 bits" : "8 bits";
}

std::string group_words(const Codec& codec) {
    const std::string size = std::to_string(row_of(codec.group).size);
    if (codec.axis == Axis::channel) return "one channel over " + size + " consecutive tokens";
    if (codec.group == Group::head) return "one token's head";
    return size + " consecutive channels of one token's head";
}

std::string rotation_words(const Codec& codec) {
    switch (codec.rotation) {
        case Rotate::none: break;
        case Rotate::hadamard: return "a Hadamard rotation";
        case Rotate::random: return "the layer's random rotation";
    }
    return "";
}

std::string width_words(const Codec& codec, std::string_view first_step,
                        std::string_view second_step) {
    std::string text = std::string(row_of(codec.width).word) + " bits a number: ";
    if (first_step.empty()) first_step = std::exchange(second_step, {});
    if (first_step.empty()) return text;
    text.append("after ").append(first_step);
    if (!second_step.empty()) text.append(" and ").append(second_step);
    return text + ", ";
}

std::string scale_and_zero(const Codec& codec, const std::string& group) {
    return "the numbers of " + group + " share a scale and a zero (" +
           std::string(metadata_bits(codec)) + " each)";
}

std::string even_steps(const Codec& codec, const std::string& y) {
    const std::string steps = std::to_string(codec.level_count() - 1);
    const std::string code = ", code = round((" + y + " - zero) / scale)";
    if (codec.clip == Clip::none)
        return "zero = min(" + y + "), scale = (max(" + y + ") - zero) / " + steps + code;
    return "range = max(" + y + ") - min(" + y + "), zero = min(" + y +
           ") + range (1 - share) / 2, scale = share range / " + steps + code;
}

std::string subject(const Codec& codec, Part part) {
    if (codec.rotation != Rotate::none || codec.centred) return "y";
    return part == Part::keys ? "k" : "v";
}

CodecWords rotated_back(const Codec& codec, Part part, const std::string& sentence,
                        const std::string& store, std::string value) {
    const std::string original = part == Part::keys ? "k" : "v";
    const bool rotated = codec.rotation != Rotate::none;
    if (codec.centred) value += " + mean";
    if (!rotated && !codec.centred) return {sentence, store, original + " = " + value};
    CodecWords words{
        sentence,
        "y = " + original + (rotated ? " R" : "") + (codec.centred ? " - mean" : "") + ", " + store,
        original + " = " + (rotated ? "(" + value + ") R^T" : value)};
    if (rotated) {
        words.read += part == Part::keys ? "; attention rotates the query instead"
                                         : "; attention rotates its output instead";
    }
    return words;
}

}  // namespace lowkv::codec
