#include <algorithm>
#include <charconv>
#include <utility>
#include <vector>

#include "lowkv/error.h"
#include "lowkv/scheme.h"
#include "scheme/fields.h"

namespace lowkv {
namespace {

using scheme::layer_prefix;
constexpr std::string_view codec_form =
    "exact, or axis-bits-group and options, such as channel-2-g32 or token-3-head-normal-hadamard";

std::string quoted(std::string_view word) { return concat("\"", word, "\""); }

std::string_view trimmed(std::string_view word) {
    constexpr std::string_view space = " \t\r\n";
    const std::size_t first = word.find_first_not_of(space);
    // Keeps its place in the text even when nothing is left: an error still names the position.
    if (first == std::string_view::npos) return word.substr(word.size());
    return word.substr(first, word.find_last_not_of(space) - first + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
    std::vector<std::string_view> words;
    for (;;) {
        const std::size_t end = text.find(separator);
        words.push_back(text.substr(0, end));
        if (end == std::string_view::npos) return words;
        text.remove_prefix(end + 1);
    }
}

class Parser {
  public:
    Parser(std::string_view text, const Retention* unnamed) : text_(text), unnamed_(unnamed) {
        if (unnamed_ != nullptr) scheme_.retention = *unnamed_;
    }

    Scheme parse() {
        if (trimmed(text_).empty()) {
            throw Error(ErrorCode::invalid_scheme, "the scheme is empty; name a preset (",
                        scheme::preset_names(), ") or spell it out: ", spelled_out());
        }
        bool first = true;
        for (const std::string_view part : split(text_, ',')) {
            const std::string_view word = trimmed(part);
            if (word.empty()) reject(word, "is empty", "a preset or an option between commas");
            const std::size_t equals = word.find('=');
            if (equals != std::string_view::npos) {
                option(word.substr(0, equals), word.substr(equals + 1));
            } else if (first) {
                scheme_ = preset(word).scheme;
                if (unnamed_ != nullptr) scheme_.retention = *unnamed_;
                from_preset_ = true;
            } else {
                reject(word, "is not an option", "options are name=value; a preset comes first");
            }
            first = false;
        }
        if (!from_preset_) require_both_codecs();
        validate(scheme_);
        return std::move(scheme_);
    }

  private:
    std::string_view text_;
    const Retention* unnamed_;
    Scheme scheme_;
    bool from_preset_ = false;
    std::vector<std::string_view> given_;

    static std::string spelled_out() { return "k=channel-2-g32,v=token-2-g32"; }

    // `word` is a part of the text: its place is known from its address.
    std::string place_of(std::string_view word) const {
        return concat("scheme ", quoted(text_), ": ", quoted(word), " at position ",
                      word.data() - text_.data() + 1, " ");
    }

    // A word that earlier versions had.
    void refuse_removed(std::string_view word) const {
        const std::string_view instead = scheme::instead_of_removed(word);
        if (instead.empty()) return;
        throw Error(ErrorCode::invalid_scheme, place_of(word), "is no longer in lowkv: ", instead);
    }

    [[noreturn]] void reject(std::string_view word, const std::string& problem,
                             const std::string& legal) const {
        throw Error(ErrorCode::invalid_scheme, place_of(word), problem, "; legal: ", legal);
    }

    const Preset& preset(std::string_view word) const {
        if (const Preset* found = scheme::find_preset(word)) return *found;
        refuse_removed(word);
        reject(word, "is not a preset",
               scheme::preset_names() + ", or spelled out as " + spelled_out());
    }

    void option(std::string_view name, std::string_view value) {
        if (name.starts_with(layer_prefix)) return layers(name, value);
        if (std::ranges::find(given_, name) != given_.end()) {
            reject(name, "is given twice", "each option once");
        }
        given_.push_back(name);
        for (const scheme::CodecOption& candidate : scheme::codec_options()) {
            if (candidate.word == name) {
                scheme_.base.*candidate.codec = codec(value);
                return;
            }
        }
        for (const scheme::RetentionField& candidate : scheme::retention_fields()) {
            if (candidate.name == name) {
                scheme_.retention.*candidate.number = retention_number(value, candidate);
                return;
            }
        }
        if (name == scheme::filter_name) {
            scheme_.retention.filter = filter(value);
            return;
        }
        unknown_option(name);
    }

    [[noreturn]] void unknown_option(std::string_view name) const {
        refuse_removed(name);
        std::string list;
        const auto add = [&](std::string_view word) { list += concat(word, "=, "); };
        for (const auto& candidate : scheme::codec_options()) add(candidate.word);
        for (const auto& candidate : scheme::retention_fields()) add(candidate.name);
        add(scheme::filter_name);
        reject(name, "is not an option", list + "layer.N= or layer.A-B=");
    }

    void require_both_codecs() const {
        for (const scheme::CodecOption& needed : scheme::codec_options()) {
            if (std::ranges::find(given_, needed.word) != given_.end()) continue;
            // Not exact by default: a forgotten codec would be a cache of five times the size.
            throw Error(ErrorCode::invalid_scheme, "scheme ", quoted(text_), " names no ",
                        needed.name, ": start with a preset (", scheme::preset_names(), ") or add ",
                        needed.word, "=, such as ", spelled_out());
        }
    }

    Codec codec(std::string_view text) const {
        if (text == scheme::exact_word) return {};
        Codec result;
        const std::vector<std::string_view> words = split(text, '-');
        std::size_t next = 0;
        for (const scheme::CodecField& field : scheme::codec_fields()) {
            const std::string_view word = next < words.size() ? words[next] : std::string_view{};
            const auto choice = std::ranges::find(field.choices, word, &scheme::Choice::word);
            if (choice != field.choices.end()) {
                field.set(result, choice->value);
                ++next;
            } else if (field.optional) {
                field.set(result, field.choices.front().value);
            } else if (next == words.size()) {
                reject(text, concat("lacks its ", field.name), legal_codec_words(field));
            } else {
                refuse_removed(word);
                reject(word, concat("is not a legal ", field.name), legal_codec_words(field));
            }
        }
        if (next < words.size()) misplaced_codec_word(words[next]);
        return result;
    }

    [[noreturn]] void misplaced_codec_word(std::string_view word) const {
        refuse_removed(word);
        bool known = false;
        std::string order;
        for (const scheme::CodecField& field : scheme::codec_fields()) {
            if (!field.optional) continue;
            for (const scheme::Choice& choice : field.choices.subspan(1)) {
                known |= choice.word == word;
                order += concat(order.empty() ? "" : ", ", choice.word);
            }
        }
        reject(word, known ? "stands in the wrong place" : "does not belong to a codec",
               "axis-bits-group, then any of these in this order: " + order);
    }

    static std::string legal_codec_words(const scheme::CodecField& field) {
        return concat(scheme::legal_words(field.choices), " (a codec is ", codec_form, ")");
    }

    void layers(std::string_view name, std::string_view value) {
        const std::string legal = concat("layer.N= or layer.A-B=, A <= B < ", scheme::max_layers);
        const std::vector<std::string_view> range = split(name.substr(layer_prefix.size()), '-');
        LayerOverride result;
        result.first = layer_number(range.front(), name, legal);
        result.last = layer_number(range.back(), name, legal);
        if (range.size() > 2 || result.first > result.last) {
            reject(name, "is not a range of layers", legal);
        }
        result.scheme = layer_scheme(value);
        scheme_.overrides.push_back(result);
    }

    std::uint32_t layer_number(std::string_view word, std::string_view name,
                               const std::string& legal) const {
        std::uint32_t value = 0;
        if (!number(word, value) || value >= scheme::max_layers) {
            reject(name, "is not a range of layers", legal);
        }
        return value;
    }

    LayerScheme layer_scheme(std::string_view value) const {
        const std::size_t slash = value.find('/');
        if (slash == std::string_view::npos) return preset(value).scheme.base;
        return {.key = codec(value.substr(0, slash)), .value = codec(value.substr(slash + 1))};
    }

    std::uint32_t retention_number(std::string_view word,
                                   const scheme::RetentionField& field) const {
        std::uint32_t value = 0;
        const std::string_view digits = word.substr(0, word.size() - field.unit.size());
        if (!word.ends_with(field.unit) || !number(digits, value) || !field.legal(value)) {
            reject(word, concat("is not a legal ", field.name), scheme::legal_numbers(field));
        }
        return value;
    }

    Filter filter(std::string_view word) const {
        const auto choices = scheme::filter_choices();
        const auto choice = std::ranges::find(choices, word, &scheme::Choice::word);
        if (choice != choices.end()) return static_cast<Filter>(choice->value);
        reject(word, "is not a filter", scheme::legal_words(choices));
    }

    // The whole word is a number that fits.
    static bool number(std::string_view word, std::uint32_t& value) {
        const char* end = word.data() + word.size();
        const auto [stopped, error] = std::from_chars(word.data(), end, value);
        return error == std::errc{} && stopped == end;
    }
};

}  // namespace

Scheme parse_scheme(std::string_view text, const Retention* unnamed) {
    return Parser(text, unnamed).parse();
}

}  // namespace lowkv
