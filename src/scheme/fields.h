#pragma once
// What can be written in a scheme, as tables: parsing, printing and validation all walk them, so
// that a new field of the codec space is a new row here and nothing else.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "lowkv/scheme.h"

namespace lowkv::scheme {

inline constexpr std::string_view exact_word = "exact";
inline constexpr std::uint32_t max_layers = 4096;

struct Choice {
    std::string_view word;
    std::uint32_t value;
    std::string_view meaning = "";  // what help and documents say; none: the word is never written
    bool listed = true;             // one like it speaks for it there
};

// One "-" separated word of a codec's text, in the order of the rows.
struct CodecField {
    std::string_view name;
    std::span<const Choice> choices;
    bool optional;  // may be left out, and is not printed: it then has its first choice
    std::uint32_t (*get)(const Codec&);
    void (*set)(Codec&, std::uint32_t);
};
std::span<const CodecField> codec_fields() noexcept;

// An option with a codec as its value.
struct CodecOption {
    std::string_view word, name;
    Part part;
    Codec LayerScheme::* codec;
    std::string_view meaning;
};
std::span<const CodecOption> codec_options() noexcept;

// An option with a number as its value.
struct RetentionField {
    std::string_view name;
    std::uint32_t Retention::* number;
    std::uint32_t max;
    std::uint32_t multiple_of;
    std::string_view unit;  // follows the number
    std::string_view meaning;

    bool legal(std::uint64_t value) const noexcept {
        return value <= max && value % multiple_of == 0;
    }
};
std::span<const RetentionField> retention_fields() noexcept;

// The option "filter", whose value is a word.
inline constexpr std::string_view filter_name = "filter";
inline constexpr std::string_view layer_prefix = "layer.";
std::span<const Choice> filter_choices() noexcept;

// "2, 3, 4, 8"
std::string legal_words(std::span<const Choice> choices);
// "a number from 0 to 65536"
std::string legal_numbers(const RetentionField& field);

// Empty, or what to use instead of a word that earlier versions had.
std::string_view instead_of_removed(std::string_view word) noexcept;

// What is wrong with a codec, and what would be right; empty: nothing. Each quantizer checks its
// own words, whichever quantizer stores the codec.
std::string_view restriction(const Codec& codec, Part part) noexcept;

// presets(), and those of guests that this build lacks: they are refused by name.
std::span<const Preset> all_presets();
const Preset* find_preset(std::string_view name) noexcept;
std::string preset_names();

}  // namespace lowkv::scheme
