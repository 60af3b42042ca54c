#pragma once
// A scheme says what is stored: a key codec, a value codec, a retention policy and per-layer
// overrides. It has a text form both ways: parse_scheme(to_string(s)) == s.
//
//   scheme  := preset ("," option)*  |  option ("," option)*
//   option  := "k=" codec | "v=" codec | "window=" N | "sinks=" N | "flush=" N | "young=" N
//            | "filter=" ("none" | "heavy" | "random") | "keep=" P "%" | "evict=" P "%"
//            | "layer." A ["-" B] "=" (preset | codec "/" codec)
//   codec   := "exact" | axis "-" bits "-" group ("-" word)*
//
// grammar.h has the words, docs/reference/words.md, "The words of a scheme" shows them.
//
// Examples: "lowkv2.8", "kivi2", "kivi2,sinks=0",
// "k=channel-2-g32,v=token-2-g32,window=128,sinks=5",
// "kivi2,layer.0-1=kivi4,layer.29=exact/token-8-g64", "kivi2,filter=heavy,keep=5%,evict=50%".

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lowkv {

enum class Part : std::uint8_t { keys, values };

// What the elements of one group (one scale and one zero) have in common.
enum class Axis : std::uint8_t {
    channel,  // one channel, `group` consecutive tokens
    token,    // one token, `group` consecutive channels of one head
    sorted,   // one token's head, its channels sorted and 16 of them coded alike: keys only
};

// How scale and zero are stored (docs/methods/bytes.md, "Metadata"); E5M3 has norms only.
enum class Metadata : std::uint8_t { fp16, fp8_e4m3, fp8_e5m3 };

// What a code means (docs/methods.md).
enum class Levels : std::uint8_t {
    uniform,  // code * scale + zero
    normal,   // scale * level[code], the levels being the best ones for N(0,1) (Lloyd-Max)
    trellis,  // scale * level[code and what follows it]: a trellis code for N(0,1)
    learned,  // level[code] * scale + zero, the levels from a calibration (KVQuant's nuq)
};

// What a head's channels are multiplied by before quantization: see rotation.h.
enum class Rotate : std::uint8_t { none, hadamard, random };

// How the scale of normal levels is chosen, y being the group and l its levels
// (docs/methods/rotated.md, "The scale").
enum class Fit : std::uint8_t {
    norm,      // |scale l| = |y|: what is read is as long as what was stored
    unbiased,  // <y, scale l> = |y|^2
    least,     // the least |y - scale l|^2
};

// How a uniform group's range is shortened, about its centre, before it is cut into steps.
enum class Clip : std::uint8_t {
    none,
    calibrated,  // by the group's share from a calibration (SKVQ)
    search,      // by the share with the least squared error in the group itself
};

// Keys: as attention sees them, or as they were before the rotary embedding.
enum class Stage : std::uint8_t { post, pre };

// How wide a code is. 1.5 bits are three levels, 8/5 bits a code.
enum class Width : std::uint8_t { one, ternary, two, three, four, eight, exact };

struct WidthRow {
    std::string_view word;  // in a scheme
    std::uint32_t levels;   // codes are 0 to levels - 1; how they lie: format.h
    std::string_view meaning;
};
inline constexpr WidthRow width_table[] = {
    {"1", 2, "two levels, with trellis only"},
    {"1.5", 3, "three levels, five codes to a byte: 1.6 bits"},
    {"2", 4, "four levels"},
    {"3", 8, "eight levels"},
    {"4", 16, "16 levels"},
    {"8", 256, "256 levels"}};
constexpr const WidthRow& row_of(Width width) noexcept {  // not of Width::exact
    return width_table[static_cast<std::size_t>(width)];
}
// Of sorted keys: that of their first quarter, whose fifth bit lies apart from the other four.
constexpr Width sorted_width(std::uint8_t first_quarter_bits) noexcept {
    return first_quarter_bits == 2   ? Width::two
           : first_quarter_bits == 3 ? Width::three
                                     : Width::four;
}

// How much shares one scale and one zero.
enum class Group : std::uint8_t {
    g32,  // elements. Along channels it ends at the head: the last group of a head may be shorter,
    g64,  // and none is longer than head_dim
    g128,
    head,        // of a token, all channels of one head
    row,         // of a token, all channels of all heads
    calibrated,  // of a channel, all tokens: its range comes from a calibration
};

struct GroupRow {
    std::string_view word;  // in a scheme
    std::uint32_t size;     // elements, 0: as many as there are
    std::string_view meaning;
};
inline constexpr GroupRow group_table[] = {
    {"g32", 32, "32 of them"},
    {"g64", 64, "64"},
    {"g128", 128, "128"},
    {"head", 0, "token: all channels of a head"},
    {"row", 0, "token: the channels of all kv heads"},
    {"static", 0, "channel: the range comes from a calibration (KVQuant)"}};
constexpr const GroupRow& row_of(Group group) noexcept {
    return group_table[static_cast<std::size_t>(group)];
}

class Quantizer;

// How keys or values are stored once their block is packed.
struct Codec {
    Width width = Width::exact;  // exact: f16
    Axis axis = Axis::token;
    Group group = Group::g32;
    // Axis::sorted: the bits of each quarter of the sorted channels, 5 to 0, descending; `width` is
    // the first one's, at most four. All zeros: not sorted.
    std::array<std::uint8_t, 4> quarter_bits{};
    // Axis::sorted: so many tokens of each block and head have their error beside, in 8 bits.
    std::uint8_t exact_rows = 0;
    // Axis::sorted: channels count for more where queries are large.
    bool weighted = false;
    // The groups are sets of channels of all heads, from a calibration, `group` long on average.
    bool reordered = false;
    // The rest needs Axis::token, whose groups stay whole when channels are mixed; sorted keys may
    // have a trellis for their groups of 1 to 3 bits.
    Levels levels = Levels::uniform;  // normal: up to 16, trellis: 2, 4 or 8
    Rotate rotation = Rotate::none;
    // Keys only: less their block's mean, channel by channel, which is stored in it.
    bool centred = false;
    Fit fit = Fit::norm;  // normal and trellis levels only
    Clip clip = Clip::none;
    // Thousandths of each token's row that are kept in f16 beside their codes (KVQuant).
    std::uint8_t outliers = 0;
    Stage stage = Stage::post;
    Metadata metadata = Metadata::fp16;
    // Not one of the library's (quantizer.h): it has no text, so schemes with it are made in code.
    const Quantizer* quantizer = nullptr;

    bool exact() const noexcept { return width == Width::exact && quantizer == nullptr; }
    // A row of all heads shares its metadata.
    bool by_row() const noexcept {
        return group == Group::row || group == Group::calibrated || reordered;
    }
    bool needs_calibration() const noexcept {
        return reordered || group == Group::calibrated || levels == Levels::learned ||
               clip == Clip::calibrated;
    }
    std::uint32_t level_count() const noexcept { return row_of(width).levels; }
    friend bool operator==(const Codec&, const Codec&) = default;
};

// Which rule decides on the tokens that leave the window (SKVQ, "Important KV Cache Filter"): see
// filter.h.
enum class Filter : std::uint8_t {
    none,    // all of them are packed
    heavy,   // heavy hitters: by the attention that they got while in the window
    random,  // a control: what a rule must beat
};

// Which tokens stay exact. Blocks are the unit: a block is packed when every token in it has left
// the window; a block that holds a sink is never packed. A filter decides token by token, and needs
// a FilteredSequence (filter.h): a Sequence refuses it.
struct Retention {
    std::uint32_t window = 128;  // newest tokens kept exact
    std::uint32_t sinks = 5;     // first tokens kept exact
    // 0: blocks leave the window one by one. N: they leave N tokens at a time (KIVI's sawtooth).
    std::uint32_t flush = 0;
    // 0: the whole window is exact, and sinks are with their block. N: the newest N tokens and the
    // sinks alone are; what is older waits in 4 bits until it is packed.
    std::uint32_t young = 0;
    // Of the tokens that leave the window, the percentage that the filter keeps exact, and the
    // percentage that it drops. The rest is packed. At most 100 together; 0 without a filter.
    Filter filter = Filter::none;
    std::uint32_t keep = 0;
    std::uint32_t evict = 0;

    friend bool operator==(const Retention&, const Retention&) = default;
};

// What leaves the window when, and what is held at most, is said here alone, for every cache and
// plug-in.

// How many of a sequence's tokens, from its first on, have left its window; with flush=, so many at
// a time.
std::uint64_t left_window(const Retention& retention, std::uint64_t tokens) noexcept;

// Tokens [first, end) of a Sequence or a Batch are packed: whole blocks, behind whole blocks of
// sinks.
struct PackedTokens {
    std::uint64_t first = 0, end = 0;
};
// The tokens that a sequence of this length has packed.
PackedTokens packed_tokens(const Retention& retention, std::uint32_t block_tokens,
                           std::uint64_t tokens) noexcept;
// The length at which a sequence's first block is packed.
std::uint64_t first_packed_length(const Retention& retention, std::uint32_t block_tokens) noexcept;
// The most blocks that conversations have between two steps of one token each, at any length up to
// `tokens` of all of them together. The last block of each may have but one token.
struct MostBlocks {
    std::uint64_t unquantized = 0, packed = 0;
};
MostBlocks most_blocks(const Retention& retention, std::uint32_t block_tokens,
                       std::uint64_t conversations, std::uint64_t tokens) noexcept;
// Rounds retention.sinks up to whole blocks.
Retention whole_sinks(Retention retention, std::uint32_t block_tokens) noexcept;

struct LayerScheme {
    Codec key;
    Codec value;
    bool exact() const noexcept { return key.exact() && value.exact(); }
    bool by_row() const noexcept { return key.by_row() || value.by_row(); }
    bool needs_calibration() const noexcept {
        return key.needs_calibration() || value.needs_calibration();
    }
    friend bool operator==(const LayerScheme&, const LayerScheme&) = default;
};

struct LayerOverride {
    std::uint32_t first = 0, last = 0;  // inclusive
    LayerScheme scheme;
    friend bool operator==(const LayerOverride&, const LayerOverride&) = default;
};

struct Scheme {
    LayerScheme base;
    Retention retention;
    std::vector<LayerOverride> overrides;  // the last one that names a layer wins

    const LayerScheme& layer(std::uint32_t index) const noexcept;
    // Whether `is` holds for any layer: the base or an override.
    template <class Predicate>
    bool any_layer(Predicate is) const {
        return std::invoke(is, base) || std::ranges::any_of(overrides, is, &LayerOverride::scheme);
    }
    bool needs_calibration() const { return any_layer(&LayerScheme::needs_calibration); }
    friend bool operator==(const Scheme&, const Scheme&) = default;
};

// The rungs of a ladder: what a budget of memory packs by before it packs by the scheme, the most
// bits first. Throws
// Error(unsupported), with the budget's name, for a scheme that no budget ends with.
std::vector<LayerScheme> rungs_before(const Scheme& scheme, std::string_view name);
// A block on the ladder that a budget packs by. Rung 0 is unquantized, the last one the scheme's.
struct LadderBlock {
    std::uint32_t rung = 0;
    std::uint32_t conversation = 0;
    std::uint32_t age = 0;  // among its conversation's, the oldest first
};
// Which blocks go down the ladder, a rung at a time, until `held` bytes fit into the budget, or all
// are on the last rung: those of the highest rung first; of these the oldest of the conversation
// that has most of them. Blocks of one conversation and age go together. `bytes`: a block's, by
// rung. Returns the bytes that are held then.
std::size_t descend(std::span<LadderBlock> blocks, std::span<const std::size_t> bytes,
                    std::size_t held, std::size_t budget);
// A number, its prefix applied: k or K, M, G, T of 1000, Ki, Mi, Gi, Ti of 1024.
struct Quantity {
    double value = 0;
    std::string_view unit;  // the text behind the prefix
    bool prefixed = false;

    bool in_bytes() const { return unit.empty() || unit == "B"; }
    bool bare() const { return unit.empty() && !prefixed; }
};
std::optional<Quantity> parse_quantity(std::string_view text);  // up to 1e18
// "24MiB", "1.5GiB", "2GB", "16G", "1000000" in bytes, at least 1. Throws Error(invalid_argument),
// with the size's name.
std::size_t parse_size(std::string_view text, std::string_view name);

struct Preset {
    std::string_view name;
    std::string_view summary;  // one line: what it is for
    std::string_view source;   // the paper, or what stands in for one
    bool recommended;          // one would use it; the others are there to compare with
    Scheme scheme;
    Codec latent;  // of rows that are key and value at once (latent_scheme())
};

// What to use when nothing is said (docs/quality.md).
inline constexpr std::string_view default_scheme = "lowkv2.8";

// Every preset, best known first is not implied: in the order that `lowkv schemes` lists them.
std::span<const Preset> presets();

// The one whose codecs these are; null: none.
const Preset* preset_of(const LayerScheme& codecs);

// How a layer of multi-head latent attention is stored: its rows by the codec that a preset has for
// such, else by the key codec. Nothing is stored by the value codec, which is exact.
LayerScheme latent_scheme(const LayerScheme& scheme);

// Throws Error(invalid_scheme) with the offending word, its place and the legal values. unnamed:
// the retention where the text names none; null: the preset's.
Scheme parse_scheme(std::string_view text, const Retention* unnamed = nullptr);

// Canonical text: a preset's name where the codecs are a preset's, then what differs from it.
std::string to_string(const Scheme& scheme);
std::string to_string(const Codec& codec);

// Throws Error(invalid_scheme) when a field is outside its legal values.
void validate(const Scheme& scheme);

// Who serves schemes. pages: a PagedLayer; model_cache: a KvCache and the C interface.
enum class Host : std::uint8_t { sequence, pages, model_cache, llama_cpp, python, vllm, lmcache };

// Why a host can't serve a scheme, and what to do instead; empty if it can.
std::string unserved(const Scheme& scheme, Host host);
// Throws Error(unsupported) with those words.
void require_served(const Scheme& scheme, Host host);

// Throws Error(invalid_scheme) when an override names a layer that a model of `layers` layers
// lacks.
void require_layers(const Scheme& scheme, std::uint32_t layers);

}  // namespace lowkv
