#include "scheme_words.h"

namespace lowkv::cli {

namespace {

constexpr std::size_t columns = 100;

bool normal(const Codec& codec) { return codec.levels == Levels::normal; }

std::string stored_bits(const Codec& codec) {
    return codec.metadata == Metadata::fp16 ? "16 bits" : "8 bits";
}

// What happens to a token before its codes are taken: "after ..., ", or nothing.
std::string preparation(const Codec& codec) {
    std::string text;
    const auto add = [&](std::string_view step) {
        text += text.empty() ? "after " : " and ";
        text += step;
    };
    if (codec.stage == Stage::pre) add("undoing RoPE");
    if (codec.centred) add("subtracting the block's mean per channel");
    switch (codec.rotation) {
        case Rotate::none: break;
        case Rotate::hadamard: add("a Hadamard rotation"); break;
        case Rotate::random: add("the layer's random rotation"); break;
    }
    return text.empty() ? text : text + ", ";
}

std::string percent(std::uint8_t thousandths) {
    const std::string whole = std::to_string(thousandths / 10);
    return whole + (thousandths % 10 != 0 ? "." + std::to_string(thousandths % 10) : "") + " %";
}

// The numbers that share one scale.
std::string group_of(const Codec& codec) {
    const std::string size = std::to_string(row_of(codec.group).size);
    if (codec.reordered) {
        return "a group of about " + size +
               " alike channels of one token, of all heads, which a "
               "calibration has found,";
    }
    if (codec.group == Group::row) return "one token, all heads,";
    if (codec.group == Group::calibrated) return "one channel";
    if (codec.axis == Axis::channel) return "one channel over " + size + " consecutive tokens";
    if (codec.group == Group::head) return "one token's head";
    return size + " consecutive channels of one token's head";
}

std::string normal_levels(const Codec& codec) {
    const std::string unit = codec.fit == Fit::norm ? "the norm" : "a scale";
    std::string text = unit + " of " + group_of(codec) + " (" + stored_bits(codec) +
                       ") times one of " + std::to_string(codec.level_count()) +
                       " normal (Lloyd-Max) levels";
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

std::string in_words(const Codec& codec) {
    if (codec.exact()) return "exact: f16, as they come";
    const std::string bits =
        std::string(row_of(codec.width).word) + " bits a number: " + preparation(codec);
    if (normal(codec)) return bits + normal_levels(codec);
    const bool ranged = codec.group == Group::calibrated;
    std::string text = bits + "the numbers of " + group_of(codec) + " share a ";
    text +=
        ranged ? "range from a calibration" : "scale and a zero (" + stored_bits(codec) + " each)";
    if (codec.levels == Levels::learned) {
        text += ", cut at " + std::to_string(codec.level_count()) +
                " levels that a calibration has learned";
    }
    if (codec.clip == Clip::calibrated) {
        text += ", over the share of their range that the calibration gives the group";
    }
    if (codec.clip == Clip::search) {
        text += ", over the share of their range with the least squared error";
    }
    if (codec.balanced) {
        text += std::string("; a factor (16 bits) of each ") +
                (codec.axis == Axis::channel ? "token" : "channel") +
                " brings a block's tokens and channels to one variance";
    }
    if (codec.outliers > 0) {
        text += "; what lies furthest outside, up to " + percent(codec.outliers) +
                " of a token's numbers, is kept in f16 beside";
    }
    return text;
}

Formulas formulas(const Codec& codec, Half half) {
    if (codec.exact()) return {};
    const bool rotated = codec.rotation != Rotate::none, centred = codec.centred;
    const std::string original = half == Half::keys ? "k" : "v";
    Formulas result;
    std::string y = original;  // what the codes are taken of
    if (rotated || centred) {
        y = "y";
        result.store =
            "y = " + original + (rotated ? " R" : "") + (centred ? " - mean" : "") + ", ";
    }
    const bool pre = codec.stage == Stage::pre;
    if (pre) {
        y = "y";
        result.store = "y = k turned back by its position, ";
    }
    std::string value = "code * scale + zero";
    if (codec.levels == Levels::learned) {
        result.store +=
            std::string("zero and scale = centre and half of ") +
            (codec.group == Group::calibrated ? "the channel's range" : "the range of " + y) +
            ", code = boundaries below (" + y + " - zero) / scale";
        value = "level[code] * scale + zero";
    } else if (normal(codec)) {
        result.store += "level = the one nearest to " + y + " / rms(" + y +
                        "), scale = " + scale_formula(codec, y);
        value = "level * scale";
    } else {
        if (codec.balanced) {
            result.store += "x = " + y + " / factor, ";
            y = "x";
        }
        const std::string steps = std::to_string(codec.level_count() - 1);
        const std::string range = "max(" + y + ") - min(" + y + ")";
        if (codec.clip != Clip::none) {
            result.store += "range = " + range + ", zero = min(" + y +
                            ") + range (1 - share) / 2, scale = share range / " + steps;
        } else {
            result.store += "zero = min(" + y + "), scale = (max(" + y + ") - zero) / " + steps;
        }
        result.store += ", code = round((" + y + " - zero) / scale)";
        if (codec.balanced) value = "factor (" + value + ")";
    }
    if (codec.outliers > 0) value += " + what is kept beside";
    if (centred) value += " + mean";
    if (pre) value = "(" + value + ") turned to its position";
    if (rotated) value = "(" + value + ") R^T";
    result.read = original + " = " + value;
    if (rotated) {
        result.read += half == Half::keys ? "; attention rotates the query instead"
                                          : "; attention rotates its output instead";
    }
    return result;
}

std::string wrapped(std::string_view first, std::string_view text, std::size_t indent) {
    std::string out(first);
    std::size_t used = first.size();
    bool fresh = true;  // at the start of a line
    while (!text.empty()) {
        const std::size_t end = text.find(' ');
        const std::string_view word = text.substr(0, end);
        if (!fresh && used + 1 + word.size() > columns) {
            out.append("\n").append(indent, ' ');
            used = indent;
            fresh = true;
        }
        if (!fresh) out += ' ';
        used += word.size() + (fresh ? 0 : 1);
        out += word;
        fresh = false;
        text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
    }
    return out + "\n";
}

}  // namespace lowkv::cli
