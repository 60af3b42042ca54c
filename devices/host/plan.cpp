#include "plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>
#include <string>

#include "codec/lloyd_max.h"
#include "codec/rotation.h"
#include "codec/units.h"
#include "lowkv/error.h"
#include "quantizers/codes_part.h"
#include "quantizers/sorted/sorted_part.h"

namespace lowkv::devices {
namespace {

constexpr std::array<std::string_view, 3> served{"exact", "grouped", "sorted"};

constexpr std::uint32_t round_up_64(std::uint32_t bytes) { return (bytes + 63) / 64 * 64; }

template <class Enum>
constexpr std::uint32_t number(Enum value) {
    return static_cast<std::uint32_t>(value);
}
static_assert(number(RowType::f32) == LOWKV_ROWS_F32 && number(RowType::f16) == LOWKV_ROWS_F16 &&
              number(RowType::bf16) == LOWKV_ROWS_BF16);
static_assert(number(Levels::uniform) == LOWKV_EVEN_LEVELS &&
              number(Levels::normal) == LOWKV_NORMAL_LEVELS &&
              number(Levels::trellis) == LOWKV_TRELLIS_LEVELS);
static_assert(number(Metadata::fp16) == LOWKV_F16 && number(Metadata::fp8_e4m3) == LOWKV_E4M3 &&
              number(Metadata::fp8_e5m3) == LOWKV_E5M3);
static_assert(number(Rotate::none) == LOWKV_NOT_ROTATED &&
              number(Rotate::hadamard) == LOWKV_HADAMARD && number(Fit::norm) == LOWKV_FIT_NORM &&
              number(Fit::unbiased) == LOWKV_FIT_UNBIASED && number(Fit::least) == LOWKV_FIT_LEAST);

// A head's means or factors, and its y.
std::uint32_t scratch_y(const lowkv_part& part) noexcept {
    return round_up_64(4 * (part.tokens * part.head_dim + std::max(part.tokens, part.head_dim)));
}

void describe_codes(const codec::CodesPart& codes, lowkv_part& part) noexcept {
    part.width = kernels::number_of(codes.codec.width);
    part.metadata = number(codes.codec.metadata);
    part.by_channel = codes.codec.axis == Axis::channel ? 1 : 0;
    part.group = codes.group;
    part.group_rows = codes.group_rows;
    part.row_entries = codes.row_entries;
    part.has_zeros = codes.has_zeros ? 1 : 0;
    part.has_mean = codes.has_mean ? 1 : 0;
    part.has_factors = codes.has_factors ? 1 : 0;
    part.by_token = codes.by_token ? 1 : 0;
    part.factors_at = static_cast<std::uint32_t>(codes.factors_offset);
    part.metadata_at = static_cast<std::uint32_t>(codes.metadata_offset);
    part.mean_at = static_cast<std::uint32_t>(codes.mean_offset);
    part.codes_at = static_cast<std::uint32_t>(codes.codes_offset);
    part.levels = number(codes.codec.levels);
    part.fit = number(codes.codec.fit);
    part.rotation = number(codes.codec.rotation);
    part.search = codes.codec.clip == Clip::search ? 1 : 0;
    part.top = codes.top();
    part.level_step = codes.level_step;
    part.level_zero = codes.level_zero;
    std::ranges::copy(codes.levels, part.level);
    const std::uint32_t groups = codes.group_rows * codes.row_entries;
    part.scratch_mean = round_up_64(2 * 4 * groups);
    part.scratch_codes = part.scratch_mean + (part.by_token != 0 ? scratch_y(part) : 0);
    part.scratch_bytes = part.scratch_codes + round_up_64(part.tokens * part.head_dim);
}

static_assert(LOWKV_SORTED_ROWS == codec::max_exact_rows &&
              LOWKV_SORTED_MIDDLE == codec::middle_level);
constexpr std::uint32_t sorted_words = sizeof(lowkv_sorted) / sizeof(std::uint32_t);

void describe_sorted(const codec::SortedPart& sorted, lowkv_part& part) noexcept {
    part.sorted = sorted.head;
    // What tells it from another plan's: all else follows from the head.
    const auto trellis = [](const codec::SortedLevels& levels) { return levels.trellis(); };
    part.levels =
        std::ranges::any_of(sorted.levels, trellis) ? LOWKV_TRELLIS_LEVELS : LOWKV_NORMAL_LEVELS;
    part.row_entries = part.tokens;
    part.group_rows = 1;
    part.scratch_mean = round_up_64(2 * 4 * part.tokens);
    part.scratch_codes = part.scratch_mean + scratch_y(part);
    part.scratch_bytes = part.scratch_codes + round_up_64(part.tokens * part.head_dim + 4);
}

lowkv_sorted_levels levels_of(const codec::SortedLevels& from, std::uint32_t bits) {
    const codec::NormalCodebook& book = codec::normal_codebook(1u << bits);
    lowkv_sorted_levels levels{};
    levels.trellis = from.trellis() ? 1 : 0;
    if (from.trellis()) {
        std::ranges::copy(from.level, levels.level);
    } else {
        for (std::uint32_t code = 0; code < book.count; ++code)
            levels.level[code] = from.number_of(code);
    }
    levels.step = from.step;
    levels.count = book.count;
    std::ranges::copy(book.level, levels.nearest);
    std::ranges::copy(book.boundary, levels.boundary);
    std::ranges::copy(from.path_level, levels.path);
    return levels;
}

void add_sorted(std::vector<std::uint32_t>& words, const codec::SortedPart& part) {
    lowkv_sorted sorted{};
    sorted.section = part.section;
    sorted.coded_groups = part.coded_groups;
    for (std::uint32_t bits = 1; bits < part.levels.size(); ++bits)
        sorted.levels[bits] = levels_of(part.levels[bits], bits);
    for (std::uint32_t g = 0; g < part.coded_groups; ++g)
        sorted.groups[g] = {part.bits(g), part.section.codes + lowkv_sorted_codes(part.head, g)};
    const auto its = std::bit_cast<std::array<std::uint32_t, sorted_words>>(sorted);
    words.insert(words.end(), its.begin(), its.end());
}

constexpr std::uint32_t levels_words = LOWKV_WINDOWS;

// Where normal levels part, or what a trellis' windows stand for.
std::array<float, levels_words> levels_table(const codec::CodesPart& codes) {
    std::array<float, levels_words> table{};
    if (codes.codec.levels == Levels::normal)
        std::ranges::copy(codec::normal_codebook(codes.codec.level_count()).boundary,
                          table.begin());
    for (std::uint32_t w = 0; codes.codec.levels == Levels::trellis && w < table.size(); ++w)
        table[w] = static_cast<float>(codes.level_of(w)) * codes.level_step + codes.level_zero;
    return table;
}

std::uint32_t rotation_words(const PackedPart& part) noexcept {
    const codec::Rotation* rotation = part.rotation();
    if (rotation == nullptr) return 0;
    return static_cast<std::uint32_t>(rotation->scaled_signs().size() + rotation->matrix().size() +
                                      rotation->transposed().size());
}

void add(std::vector<std::uint32_t>& words, std::span<const float> numbers) {
    for (const float x : numbers) words.push_back(std::bit_cast<std::uint32_t>(x));
}

}  // namespace

bool Description::same(const Description& other) const noexcept {
    using Words = std::array<std::uint32_t, sizeof(Description) / sizeof(std::uint32_t)>;
    return std::bit_cast<Words>(*this) == std::bit_cast<Words>(other);
}

void check_served(const Plan& plan, std::string_view device) {
    if (plan.byte_rows())
        throw Error(
            ErrorCode::unsupported,
            std::string(device) + " has no kernels for rows=8: leave it out, or write rows=0");
    for (const Part part : {Part::keys, Part::values}) {
        const Codec& codec = part == Part::keys ? plan.scheme().key : plan.scheme().value;
        const std::string_view quantizer = quantizer_of(codec).name();
        if (std::ranges::find(served, quantizer) != served.end()) continue;
        std::string quantizers;
        for (const std::string_view name : served)
            quantizers += (quantizers.empty() ? "'" : "', '") + std::string(name);
        throw Error(ErrorCode::unsupported,
                    std::string(device) + " has no kernels for " +
                        (part == Part::keys ? "keys" : "values") + " of the quantizer '" +
                        std::string(quantizer) + "'; it serves " + quantizers +
                        "': choose a scheme of those, such as 'kivi2', or keep the store on the "
                        "CPU");
    }
}

Description describe(const Plan& plan) noexcept {
    Description description{};
    std::uint32_t tables = sizeof description / sizeof(std::uint32_t);
    for (const Part which : {Part::keys, Part::values}) {
        const bool keys = which == Part::keys;
        const PackedPart& from = plan.part(which);
        lowkv_part& part = description.parts[keys ? 0 : 1];
        part.keys = keys ? 1 : 0;
        part.exact = from.exact() ? 1 : 0;
        part.tokens = plan.block_tokens();
        part.head_dim = plan.shape().head_dim;
        part.kv_heads = plan.shape().kv_heads;
        part.rows = number(plan.rows());
        part.exact_at = keys ? 0 : static_cast<std::uint32_t>(plan.exact_part_bytes());
        part.packed_at = keys ? 0 : static_cast<std::uint32_t>(plan.keys().bytes());
        part.head_bytes = static_cast<std::uint32_t>(from.head_bytes());
        if (const auto* codes = dynamic_cast<const codec::CodesPart*>(&from))
            describe_codes(*codes, part);
        if (const auto* sorted = dynamic_cast<const codec::SortedPart*>(&from)) {
            describe_sorted(*sorted, part);
            part.sorted_at = tables;
            tables += sorted_words;
        }
        if (part.by_token == 0) continue;
        part.levels_at = tables;
        tables += levels_words;
        part.rotation_at = tables;
        tables += rotation_words(from);
    }
    return description;
}

std::vector<std::uint32_t> words_of(const Plan& plan, const Description& description) {
    std::vector<std::uint32_t> words(sizeof description / sizeof(std::uint32_t));
    std::memcpy(words.data(), &description, sizeof description);
    for (const Part which : {Part::keys, Part::values}) {
        const lowkv_part& part = description.parts[which == Part::keys ? 0 : 1];
        if (part.sorted_at != 0)
            add_sorted(words, dynamic_cast<const codec::SortedPart&>(plan.part(which)));
        if (part.by_token == 0) continue;
        add(words, levels_table(dynamic_cast<const codec::CodesPart&>(plan.part(which))));
        if (const codec::Rotation* rotation = plan.part(which).rotation()) {
            add(words, rotation->scaled_signs());
            add(words, rotation->matrix());
            add(words, rotation->transposed());
        }
    }
    return words;
}

}  // namespace lowkv::devices
