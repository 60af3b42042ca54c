#pragma once
// A plan is a layer's codecs compiled for one shape: sizes, offsets and the kernels to call. Made
// once; nothing below it asks "which method?" again.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "lowkv/quantizer.h"
#include "lowkv/scheme.h"

namespace lowkv {

// Of the elements of exact rows.
enum class RowType : std::uint32_t { f32 = 1, f16 = 2, bf16 = 3 };

// Throws Error(invalid_argument) for a type that there is not.
std::size_t element_bytes(RowType type);

// The rotary position embedding of a model's keys. Codecs that store keys before it (Stage::pre)
// undo it when a block is packed and apply it again when the block is attended to.
//
// Undoing and applying are inverse for any parameters and positions: wrong ones cost quality, never
// correctness.
struct Rope {
    enum class Pairs : std::uint8_t {
        halves,      // NeoX: channels i and i + frequencies.size()
        neighbours,  // channels 2i and 2i + 1
    };
    Pairs pairs = Pairs::halves;
    // Pair i of a token at position p is turned by p * frequencies[i] radians. Frequency factors,
    // linear scaling and YaRN's mix of both are in here. The channels of a head beyond
    // 2 * frequencies.size() pass unchanged (partial rotary).
    std::vector<float> frequencies;
    float magnitude = 1.0f;  // of what is turned, YaRN's attention factor

    friend bool operator==(const Rope&, const Rope&) = default;
};

// Of the keys or the values of a layer; channels count over all kv heads, head by head. Only what
// the codec asks for is filled.
struct PartCalibration {
    std::vector<std::uint16_t> group;  // reordered: [channels], the group of each, all in use
    std::vector<float> clip;           // Clip::calibrated: [groups], in (0, 1]
    // Group::calibrated: [channels], the inliers' range (before RoPE if the codec's stage is pre).
    std::vector<float> low, high;
    // Levels::learned: 2^bits (3 for 1.5 bits) ascending values, for a group scaled to [-1, 1], and
    // one boundary fewer: code = how many boundaries are <= the value.
    std::vector<float> levels, boundaries;

    friend bool operator==(const PartCalibration&, const PartCalibration&) = default;
};

struct LayerCalibration {
    PartCalibration key, value;
    friend bool operator==(const LayerCalibration&, const LayerCalibration&) = default;
};

// What some codecs need to know about a layer; calibration and rope are copied.
struct LayerInputs {
    const LayerCalibration* calibration = nullptr;  // Codec::needs_calibration()
    const Rope* rope =
        nullptr;  // Stage::pre; null: the model has none, keys are stored as they come
    // What rows are kept in while they are exact: the host's own, so that nothing is rounded.
    RowType rows = RowType::f16;
};

class Plan {
  public:
    // Throws Error(invalid_argument) for a shape that the kernels can't serve,
    // Error(invalid_scheme) for an illegal codec, Error(invalid_calibration) for a calibration that
    // is missing or doesn't fit. `implementation` names a kernel set; empty: the one that
    // LOWKV_IMPLEMENTATION forces, or the best this CPU runs. `layer` seeds a random rotation.
    // A latent shape's scheme is latent_scheme() of the given one.
    Plan(const LayerScheme& scheme, const Shape& shape, std::string_view implementation = {},
         std::uint32_t layer = 0, const LayerInputs& inputs = {});

    const LayerScheme& scheme() const noexcept { return scheme_; }
    const Shape& shape() const noexcept { return shape_; }
    std::uint32_t layer() const noexcept { return layer_; }
    // Above 0, and of this plan alone and its copies, in the process: devices know a plan by it.
    std::uint64_t number() const noexcept { return number_; }
    // Of the calibration and the rope, as far as packed bytes depend on them; 0: not at all.
    std::uint64_t inputs_hash() const noexcept { return inputs_hash_; }
    std::uint32_t block_tokens() const noexcept { return block_tokens_; }
    const PackedPart& part(Part part) const noexcept {
        return part == Part::keys ? *keys_ : *values_;
    }
    const PackedPart& keys() const noexcept { return *keys_; }
    const PackedPart& values() const noexcept { return *values_; }
    // The parts that a block stores: a latent layer's values are in its keys, and values() takes no
    // bytes.
    std::span<const Part> stored_parts() const noexcept {
        static constexpr Part parts[] = {Part::keys, Part::values};
        return std::span(parts).first(shape_.latent() ? 1 : 2);
    }

    // The heads of a packed part share a section, which encode_shared() writes.
    bool has_shared() const noexcept { return keys_->shared_bytes() + values_->shared_bytes() > 0; }

    // Blocks should take over statistics from earlier ones of their sequence
    // (EncodeHints::stats_from).
    bool has_statistics() const noexcept {
        return keys_->has_statistics() || values_->has_statistics();
    }
    // ... and those that make their own should know the layer's queries (EncodeHints::queries).
    bool wants_queries() const noexcept {
        return keys_->wants_queries() || values_->wants_queries();
    }

    // A block's two states. Exact: keys [channels][block_tokens], then values
    // [block_tokens][channels] if they are stored, in elements of rows(): keys by channel and
    // values by token, as attention reads them. Then the tokens' positions as i32, if the keys are
    // packed as they were before RoPE.
    RowType rows() const noexcept { return rows_; }
    bool has_positions() const noexcept { return keys_->has_positions(); }
    std::size_t exact_positions_offset() const noexcept {
        return stored_parts().size() * exact_part_bytes();
    }
    std::size_t exact_bytes() const noexcept { return exact_positions_offset() + position_bytes(); }
    std::size_t exact_part_bytes() const noexcept {
        return std::size_t{shape_.channels()} * block_tokens_ * element_bytes_;
    }
    // An exact block rounded to f16, which is what quantizers encode and decode, in the same order.
    std::size_t f16_part_bytes() const noexcept { return keys_->shape().exact_bytes(); }
    std::size_t f16_positions_offset() const noexcept {
        return stored_parts().size() * f16_part_bytes();
    }
    std::size_t f16_bytes() const noexcept { return f16_positions_offset() + position_bytes(); }
    // Packed: the keys' part, then the values' part.
    std::size_t packed_bytes() const noexcept { return keys_->bytes() + values_->bytes(); }

    // Bits per element of the packed part, all metadata and padding included.
    double key_bits() const noexcept;
    double value_bits() const noexcept;
    double bits_per_element() const noexcept {
        return (key_bits() + value_bits()) / static_cast<double>(stored_parts().size());
    }

    std::string_view implementation() const noexcept;
    const kernels::Table& kernels() const noexcept { return *kernels_; }

  private:
    LayerScheme scheme_;
    Shape shape_;
    std::uint32_t block_tokens_ = 0;
    std::shared_ptr<const PackedPart> keys_, values_;
    const kernels::Table* kernels_ = nullptr;
    std::uint32_t layer_ = 0;
    std::uint64_t number_ = 0, inputs_hash_ = 0;
    RowType rows_ = RowType::f16;
    std::size_t element_bytes_ = 2;

    std::size_t position_bytes() const noexcept {
        return has_positions() ? std::size_t{4} * block_tokens_ : 0;
    }
};

// What fits the scheme and says nothing about a model: groups of consecutive channels, no clip,
// ranges of +-4, the levels of N(0,1). For sizes, and to try kernels.
LayerCalibration neutral_calibration(const LayerScheme& scheme, const Shape& shape);

// A plan with it: right in its sizes and its speed, not in what it loses.
Plan neutral_plan(const LayerScheme& scheme, const Shape& shape, const Rope* rope = nullptr);

// Tokens per block of a layer: 32, or the longest group that runs over tokens; 128 to take a mean
// or variances of.
std::uint32_t block_tokens(const LayerScheme& scheme) noexcept;

// Packs one block of f16 rows (plan.f16_bytes(), layout above) into `packed`
// (plan.packed_bytes()): what the heads share first, then heads [first, last), in any order.
// `only`: one part; the other part's packed bytes stay as they are.
void encode_shared(const Plan& plan, const std::byte* f16, std::byte* packed,
                   std::optional<Part> only = std::nullopt) noexcept;
void encode_block(const Plan& plan, const std::byte* f16, std::byte* packed,
                  std::uint32_t first_head, std::uint32_t last_head, const EncodeHints& hints = {},
                  std::optional<Part> only = std::nullopt) noexcept;

// The inverse, rounded to f16. Used to reopen a block and to save state; attention never calls it.
void decode_block(const Plan& plan, const std::byte* packed, std::byte* f16) noexcept;

}  // namespace lowkv
