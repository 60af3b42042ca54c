#include "scheme/fields.h"

#include <algorithm>
#include <array>
#include <deque>
#include <type_traits>
#include <vector>

#include "lowkv/error.h"
#include "lowkv/quantizer.h"

namespace lowkv::scheme {
namespace {

template <class Enum>
constexpr std::uint32_t value_of(Enum value) {
    return static_cast<std::uint32_t>(value);
}

constexpr std::array axis_choices{
    Choice{"channel", value_of(Axis::channel), "GROUP tokens of one channel share a scale"},
    Choice{"token", value_of(Axis::token), "GROUP channels of one token share a scale"},
    Choice{"sorted", value_of(Axis::sorted),
           "keys, 4211 and the like, head: channels in the order of their energy, 16 of them coded "
           "together; each token's head has a scale"}};
// A row of the table each: its number is the value.
template <class Row, std::size_t N>
constexpr std::array<Choice, N> choices_of(const Row (&table)[N]) {
    std::array<Choice, N> choices;
    for (std::size_t i = 0; i < N; ++i) {
        choices[i] = {table[i].word, static_cast<std::uint32_t>(i), table[i].meaning};
    }
    return choices;
}

// The bits of four quarters, as hexadecimal digits of a number.
constexpr std::uint32_t number_of(const std::array<std::uint8_t, 4>& bits) {
    return std::uint32_t{bits[0]} << 12 | bits[1] << 8 | bits[2] << 4 | bits[3];
}
constexpr std::uint32_t digit(std::uint32_t number, unsigned quarter) {
    return number >> (12 - 4 * quarter) & 15;
}
constexpr std::uint32_t first_quarters = 0x2000, last_quarters = 0x5555, shown_quarters = 0x4211;
// The first digit is 5, 4, 3 or 2, the others are not above the one before.
constexpr bool is_quarters(std::uint32_t number) {
    bool legal = digit(number, 0) >= 2 && digit(number, 0) <= 5;
    for (unsigned q = 1; q < 4; ++q) legal = legal && digit(number, q) <= digit(number, q - 1);
    return legal;
}
std::span<const Choice> bits_choices() {
    // Never destroyed: hosts print schemes while they end.
    static auto& words = *new std::deque<std::string>;
    static const auto& all = *[] {
        constexpr std::array widths = choices_of(width_table);
        auto& choices = *new std::vector<Choice>(widths.begin(), widths.end());
        for (std::uint32_t n = first_quarters; n <= last_quarters; ++n) {
            if (!is_quarters(n)) continue;
            std::string& word = words.emplace_back();
            for (unsigned q = 0; q < 4; ++q) word += static_cast<char>('0' + digit(n, q));
            choices.push_back(
                {word, n,
                 "sorted: 4 bits for the first quarter of the channels, 2 for the second, and so "
                 "on: four digits from 5 to 0, the first above 1, none above the one before",
                 n == shown_quarters});
        }
        return &choices;
    }();
    return all;
}
constexpr std::uint32_t bits_of(const Codec& codec) {
    const std::uint32_t quarters = number_of(codec.quarter_bits);
    return quarters != 0 ? quarters : value_of(codec.width);
}
constexpr void set_bits(Codec& codec, std::uint32_t value) {
    codec.quarter_bits = {};
    if (value < first_quarters) {
        codec.width = static_cast<Width>(value);
        return;
    }
    for (unsigned q = 0; q < 4; ++q)
        codec.quarter_bits[q] = static_cast<std::uint8_t>(digit(value, q));
    codec.width = sorted_width(codec.quarter_bits[0]);
}
constexpr std::array group_choices = choices_of(group_table);
constexpr std::array order_choices{
    Choice{"inorder", 0},
    Choice{"reorder", 1,
           "token, g32 to g128: groups of like channels of all heads, calibrated (SKVQ)"}};
constexpr std::array levels_choices{
    Choice{"uniform", value_of(Levels::uniform)},
    Choice{"normal", value_of(Levels::normal),
           "token, g32 to head, up to 4 bits: normal (Lloyd-Max) levels times a norm, not a scale "
           "and a zero"},
    Choice{"trellis", value_of(Levels::trellis),
           "token-1-head to token-3-head, and sorted with groups of 1 to 3 bits: levels that "
           "neighbouring codes choose together, times a norm: a fifth (1 bit) to a third (3 bits) "
           "less error than normal"},
    Choice{"learned", value_of(Levels::learned),
           "row and static, 2 to 4 bits: levels learned from a text, calibrated (KVQuant)"}};
constexpr std::array rotation_choices{
    Choice{"plain", value_of(Rotate::none)},
    Choice{"hadamard", value_of(Rotate::hadamard),
           "token: a Hadamard rotation of each head comes first"},
    Choice{"random", value_of(Rotate::random),
           "token: a random orthogonal matrix comes first, another one in each layer"}};
constexpr std::array centre_choices{
    Choice{"raw", 0},
    Choice{"mean", 1, "keys, token: each block's mean per channel is subtracted and stored apart"}};
constexpr std::array fit_choices{
    Choice{"norm", value_of(Fit::norm)},
    Choice{"unbiased", value_of(Fit::unbiased),
           "normal, trellis: a scale that keeps products unbiased, not the norm"},
    Choice{"lsq", value_of(Fit::least), "normal, trellis: the scale of the least squared error"}};
constexpr std::array clip_choices{
    Choice{"unclipped", value_of(Clip::none)},
    Choice{"clip", value_of(Clip::calibrated),
           "reorder: a calibrated share of each group's range (SKVQ)"},
    Choice{"search", value_of(Clip::search),
           "uniform levels, not static: the share of each group's range with the least "
           "squared error"}};
constexpr std::string_view beside =
    "row and static: so many of a token's numbers are kept beside, in 16 bits (KVQuant)";
constexpr std::array outlier_choices{Choice{"0%", 0}, Choice{"0.5%", 5, beside},
                                     Choice{"1%", 10, beside}, Choice{"2%", 20, beside}};
constexpr std::string_view repaired =
    "sorted: so many tokens of each block and head, those of the shortest keys, have their error "
    "beside, in 8 bits";
constexpr std::array rows_choices{Choice{"0rows", 0}, Choice{"1row", 1, repaired},
                                  Choice{"2rows", 2, repaired}, Choice{"3rows", 3, repaired},
                                  Choice{"4rows", 4, repaired}};
constexpr std::array weight_choices{
    Choice{"unweighted", 0},
    Choice{"weighted", 1, "sorted: channels count for more where the layer's queries are large"}};
constexpr std::array stage_choices{
    Choice{"post", value_of(Stage::post)},
    Choice{"pre", value_of(Stage::pre),
           "keys; row, static and reorder: as they were before their rotary embedding"}};
constexpr std::array metadata_choices{
    Choice{"fp16", value_of(Metadata::fp16)},
    Choice{"fp8", value_of(Metadata::fp8_e4m3), "8-bit scales, zeros and norms; not with static"},
    Choice{"e5m3", value_of(Metadata::fp8_e5m3),
           "normal and trellis: 8-bit norms over f16's range, and nothing beside them"}};

constexpr std::array codecs{
    CodecOption{"k", "key codec", Part::keys, &LayerScheme::key, "how keys are stored once packed"},
    CodecOption{"v", "value codec", Part::values, &LayerScheme::value,
                "how values are stored once packed"}};

constexpr std::array numbers{
    RetentionField{"window", &Retention::window, 1u << 20, 1, "", "the newest N tokens stay exact"},
    RetentionField{"sinks", &Retention::sinks, 1u << 16, 1, "", "the first N tokens stay exact"},
    RetentionField{"flush", &Retention::flush, 1u << 20, 32, "",
                   "tokens leave the window N at a time (0: a block at a time)"},
    RetentionField{"young", &Retention::young, 1u << 20, 1, "",
                   "llama.cpp: only the newest N tokens and the sinks stay exact, without their "
                   "blocks; what is older waits in 4 bits until it is packed (0: all of them)"},
    RetentionField{"keep", &Retention::keep, 100, 1, "%",
                   "so many of the tokens that leave the window stay exact"},
    RetentionField{"evict", &Retention::evict, 100, 1, "%",
                   "so many of them are dropped. filter=, keep= and evict= are for the C++ library "
                   "only (lowkv/filter.h): llama.cpp and transformers decide themselves which "
                   "tokens they hold"}};

constexpr std::array filters{
    Choice{"none", value_of(Filter::none), "no filter decides"},
    Choice{"heavy", value_of(Filter::heavy),
           "which tokens stay or go is decided by the attention they got"},
    Choice{"random", value_of(Filter::random), "it is decided at random, a control"}};

// Of one member.
template <auto Member>
CodecField field(std::string_view name, std::span<const Choice> choices, bool optional = true) {
    return {name, choices, optional,
            [](const Codec& codec) { return static_cast<std::uint32_t>(codec.*Member); },
            [](Codec& codec, std::uint32_t value) {
                using Value = std::remove_reference_t<decltype(codec.*Member)>;
                codec.*Member = static_cast<Value>(value);
            }};
}

struct Removed {
    std::string_view word, instead;
};
constexpr std::string_view lowkv_loses_less =
    "lowkv2, lowkv2.8, lowkv3 and lowkv4 lose less in fewer bits";
constexpr std::array removed{
    Removed{"2.6", "2 bits, or 3 bits: what 2.6 lost lay on the line between them"},
    Removed{"kvarn2", lowkv_loses_less},
    Removed{"kvarn3", lowkv_loses_less},
    Removed{"kvarn4", lowkv_loses_less},
    Removed{"varnorm", lowkv_loses_less},
    Removed{"rows",
            "a budget of memory packs only the tokens that do not fit, and a smaller "
            "window= keeps fewer of them unquantized"}};

void append_to_list(std::string& list, std::string_view word) {
    if (!list.empty()) list += ", ";
    list += word;
}

}  // namespace

std::span<const CodecField> codec_fields() noexcept {
    static const std::array fields{
        field<&Codec::axis>("axis", axis_choices, false),
        CodecField{"number of bits", bits_choices(), false, bits_of, set_bits},
        field<&Codec::group>("group", group_choices, false),
        field<&Codec::reordered>("order of channels", order_choices),
        field<&Codec::levels>("kind of levels", levels_choices),
        field<&Codec::rotation>("rotation", rotation_choices),
        field<&Codec::centred>("centring", centre_choices),
        field<&Codec::fit>("fit of the scale", fit_choices),
        field<&Codec::clip>("clip", clip_choices),
        field<&Codec::outliers>("share of outliers", outlier_choices),
        field<&Codec::exact_rows>("exact rows", rows_choices),
        field<&Codec::weighted>("weight of channels", weight_choices),
        field<&Codec::stage>("stage", stage_choices),
        field<&Codec::metadata>("metadata type", metadata_choices),
    };
    return fields;
}
std::span<const CodecOption> codec_options() noexcept { return codecs; }
std::span<const RetentionField> retention_fields() noexcept { return numbers; }
std::span<const Choice> filter_choices() noexcept { return filters; }

std::string_view instead_of_removed(std::string_view word) noexcept {
    const auto found = std::ranges::find(removed, word, &Removed::word);
    return found == removed.end() ? std::string_view{} : found->instead;
}

std::string legal_words(std::span<const Choice> choices) {
    std::string list;
    for (const Choice& choice : choices) {
        if (choice.listed) append_to_list(list, choice.word);
    }
    return list;
}

std::string legal_numbers(const RetentionField& field) {
    const std::string unit(field.unit);
    const std::string range = concat("from 0", unit, " to ", field.max, unit);
    if (field.multiple_of == 1) return "a number " + range;
    return concat("a multiple of ", field.multiple_of, " ", range);
}

std::string_view restriction(const Codec& codec, Part part) noexcept {
#ifndef LOWKV_ROW_QUANTIZER  // guests/CMakeLists.txt
    constexpr std::string_view reason =
        "this lowkv was built without SKVQ and KVQuant, whose words are row, static, reorder, "
        "clip, learned, a percentage and pre; build it with LOWKV_GUESTS=ON";
    if (codec.by_row() || codec.needs_calibration() || codec.outliers > 0 ||
        codec.stage == Stage::pre)
        return reason;
#endif
    for (const Quantizer* quantizer : quantizers()) {
        const std::string_view wrong = quantizer->restriction(codec, part);
        if (!wrong.empty()) return wrong;
    }
    return {};
}

const Preset* find_preset(std::string_view name) noexcept {
    const auto found = std::ranges::find(all_presets(), name, &Preset::name);
    return found == all_presets().end() ? nullptr : &*found;
}

std::string preset_names() {
    std::string list;
    for (const Preset& preset : presets()) append_to_list(list, preset.name);
    return list;
}

}  // namespace lowkv::scheme
