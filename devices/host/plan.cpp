#include "plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>

#include "lowkv/codebook.h"
#include "lowkv/error.h"
#include "lowkv/quantizer.h"
#include "lowkv/rotation.h"

namespace lowkv::devices {
namespace {

constexpr std::uint32_t round_up_64(std::uint32_t bytes) { return (bytes + 63) / 64 * 64; }

template <class Enum>
constexpr std::uint32_t number(Enum value) {
    return static_cast<std::uint32_t>(value);
}
static_assert(number(RowType::f32) == LOWKV_ROWS_F32 && number(RowType::f16) == LOWKV_ROWS_F16 &&
              number(RowType::bf16) == LOWKV_ROWS_BF16);

// A head's means, and its y.
std::uint32_t scratch_y(const lowkv_part& part) noexcept {
    return round_up_64(4 * (part.tokens * part.head_dim + std::max(part.tokens, part.head_dim)));
}

// Where a head's numbers lie while it is encoded.
void lay_out_scratch(lowkv_part& part, bool sorted) noexcept {
    const std::uint32_t numbers = part.tokens * part.head_dim;
    part.scratch_mean = round_up_64(2 * 4 * part.group_rows * part.row_entries);
    part.scratch_codes = part.scratch_mean + (sorted || part.by_token != 0 ? scratch_y(part) : 0);
    part.scratch_bytes = part.scratch_codes + round_up_64(sorted ? numbers + 4 : numbers);
}

constexpr std::uint32_t sorted_words = sizeof(lowkv_sorted) / sizeof(std::uint32_t);

constexpr std::uint32_t levels_words = sizeof(lowkv_path_costs) / sizeof(std::uint32_t);

// Where normal levels part, or what a trellis' paths cost.
std::array<std::uint32_t, levels_words> levels_table(const lowkv_part& part) {
    if (part.levels == LOWKV_TRELLIS_LEVELS)
        return std::bit_cast<std::array<std::uint32_t, levels_words>>(
            codec::path_costs(lowkv_own_bits(part.width) + lowkv_linked_bits(part.width)));
    std::array<float, levels_words> table{};
    if (part.levels == LOWKV_NORMAL_LEVELS)
        std::ranges::copy(codec::normal_codebook(static_cast<std::uint32_t>(part.top) + 1).boundary,
                          table.begin());
    return std::bit_cast<std::array<std::uint32_t, levels_words>>(table);
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
    if (plan.shape().latent())
        throw Error(ErrorCode::unsupported, device,
                    " has no kernels for multi-head latent attention");
    for (const Part part : {Part::keys, Part::values}) {
        if (plan.part(part).on_devices()) continue;
        const Codec& codec = part == Part::keys ? plan.scheme().key : plan.scheme().value;
        throw Error(ErrorCode::unsupported, device, " has no kernels for ",
                    part == Part::keys ? "keys" : "values", " of the quantizer '",
                    quantizer_of(codec).name(),
                    "'; it serves 'exact', 'grouped', 'sorted': choose a scheme of those, "
                    "such as 'kivi2', or keep the store on the CPU");
    }
}

Description describe(const Plan& plan) noexcept {
    Description description{};
    std::uint32_t tables = sizeof description / sizeof(std::uint32_t);
    for (const Part which : {Part::keys, Part::values}) {
        const bool keys = which == Part::keys;
        const PackedPart& from = plan.part(which);
        lowkv_part& part = description.parts[keys ? 0 : 1];
        if (from.plain() != nullptr) part = *from.plain();
        part.keys = keys ? 1 : 0;
        part.exact = from.exact() ? 1 : 0;
        part.tokens = plan.block_tokens();
        part.head_dim = plan.shape().head_dim;
        part.kv_heads = plan.shape().kv_heads;
        part.rows = number(plan.rows());
        part.exact_at = keys ? 0 : static_cast<std::uint32_t>(plan.exact_part_bytes());
        part.packed_at = keys ? 0 : static_cast<std::uint32_t>(plan.keys().bytes());
        part.head_bytes = static_cast<std::uint32_t>(from.head_bytes());
        const bool sorted = from.sorted_table() != nullptr;
        if (from.plain() != nullptr) lay_out_scratch(part, sorted);
        if (sorted) {
            part.sorted_at = tables;
            tables += sorted_words;
        }
        if (part.by_token == 0) continue;
        part.levels_at = tables;
        tables += levels_words;
        part.rotation_at = tables;
        tables += rotation_words(from);
    }
    description.tensor = describe_tensor(plan, description.parts, tables);
    return description;
}

std::vector<std::uint32_t> words_of(const Plan& plan, const Description& description) {
    std::vector<std::uint32_t> words(sizeof description / sizeof(std::uint32_t));
    std::memcpy(words.data(), &description, sizeof description);
    for (const Part which : {Part::keys, Part::values}) {
        const lowkv_part& part = description.parts[which == Part::keys ? 0 : 1];
        if (part.sorted_at != 0) {
            const auto table = std::bit_cast<std::array<std::uint32_t, sorted_words>>(
                *plan.part(which).sorted_table());
            words.insert(words.end(), table.begin(), table.end());
        }
        if (part.by_token == 0) continue;
        const auto levels = levels_table(part);
        words.insert(words.end(), levels.begin(), levels.end());
        if (const codec::Rotation* rotation = plan.part(which).rotation()) {
            add(words, rotation->scaled_signs());
            add(words, rotation->matrix());
            add(words, rotation->transposed());
        }
    }
    const std::vector<std::uint32_t> pairs =
        tensor_tables(plan, description.parts, description.tensor);
    words.insert(words.end(), pairs.begin(), pairs.end());
    return words;
}

}  // namespace lowkv::devices
