#pragma once
// A plan is a layer's codecs compiled for one shape: sizes, offsets and the kernels to call. Made
// once; nothing below it asks "which method?" again.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "lowkv/scheme.h"

namespace lowkv {

namespace kernels {
struct Table;
}
namespace codec {
class Rotation;
struct RowTables;
}  // namespace codec
struct LayerCalibration;
struct Rope;

// The cache of one layer: kv_heads heads of head_dim channels.
struct Shape {
    std::uint32_t kv_heads = 0;
    std::uint32_t head_dim = 0;  // a multiple of 16, at most 576 (256 by row)
    std::uint32_t channels() const noexcept { return kv_heads * head_dim; }
    friend bool operator==(const Shape&, const Shape&) = default;
};

// Where things lie in the keys' or the values' half of a packed block. Each head is one section:
// [header][metadata][mean][factors][codes], so that a head is read front to back and copied alone.
//   header    fp8 only: two f32 multipliers, for scales and for zeros (powers of two)
//   metadata  per group row: all scales, then all zeros (uniform levels only). Axis::channel: a
//             row is one group of tokens, an entry one channel. Axis::token: a row is one group
//             of channels, an entry one token.
//   mean      Centre::block only: f16, one per channel, after the rotation
//   factors   balanced only: f16, one per token of keys or per channel of values; a code stands for
//             factor * (code * scale + zero)
//   codes     16x16 units, see src/kernels/units.h. Exact parts: f16, as in an exact block.
// Codecs whose row of all heads shares its metadata (Codec::by_row) begin with a section of that;
// the heads' sections have codes only.
//   header    as above
//   metadata  keys, and values of one group: a row is one group of channels, an entry one token.
//             Other values: the other way round, as attention reads them. Static ranges: none.
//   outliers  by head, its tokens in order, so that a head's are contiguous: where each head's
//             begin and the last one's end, as u16; their channel within the head and their token,
//             a byte each; what is missing there, as f16
//   positions keys before RoPE: of each token, as i32
//
// A code stands for level(code) * scale + zero. Levels that are not uniform are kept in 8 bits, so
// that kernels multiply integers: level(code) = levels[code] * level_step + level_zero.
struct PartLayout {
    Codec codec;
    // Uniform levels: the codes.
    std::array<std::uint8_t, 16> levels{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float level_step = 1.0f;
    float level_zero = 0.0f;
    std::shared_ptr<const codec::RowTables> row;  // null: no row codec
    std::size_t row_bytes = 0;                    // the row's section
    std::size_t outliers_offset = 0;              // where each head's begin
    std::size_t places_offset = 0;
    std::size_t residuals_offset = 0;
    std::size_t positions_offset = 0;
    std::shared_ptr<const codec::Rotation> rotation;  // null: none
    std::uint32_t group = 0;        // effective group: codec.group, at most head_dim along channels
    std::uint32_t group_rows = 0;   // metadata rows per head
    std::uint32_t row_entries = 0;  // scales per row
    std::size_t metadata_offset = 0;  // within a head's section
    std::size_t mean_offset = 0;      // within a head's section
    std::size_t factors_offset = 0;   // within a head's section
    std::size_t codes_offset = 0;     // within a head's section
    std::size_t head_bytes = 0;       // a multiple of 64
    std::size_t bytes = 0;            // all heads

    bool has_zeros() const noexcept { return codec.levels != Levels::normal; }
};

// What some codecs need to know about a layer; both are copied.
struct LayerInputs {
    const LayerCalibration* calibration = nullptr;  // Codec::needs_calibration()
    const Rope* rope =
        nullptr;  // Stage::pre; null: the model has none, keys are stored as they come
};

class Plan {
  public:
    // Throws Error(invalid_argument) for a shape that the kernels can't serve,
    // Error(invalid_scheme) for an illegal codec, Error(invalid_calibration) for a calibration that
    // is missing or doesn't fit. `implementation` names a kernel set; empty: the one that
    // LOWKV_IMPLEMENTATION forces, or the best this CPU runs. `layer` seeds a random rotation.
    Plan(const LayerScheme& scheme, const Shape& shape, std::string_view implementation = {},
         std::uint32_t layer = 0, const LayerInputs& inputs = {});

    const LayerScheme& scheme() const noexcept { return scheme_; }
    const Shape& shape() const noexcept { return shape_; }
    std::uint32_t layer() const noexcept { return layer_; }
    // Of the calibration and the rope, as far as packed bytes depend on them; 0: not at all.
    std::uint64_t inputs_hash() const noexcept { return inputs_hash_; }
    std::uint32_t block_tokens() const noexcept { return block_tokens_; }
    const PartLayout& keys() const noexcept { return keys_; }
    const PartLayout& values() const noexcept { return values_; }

    // The heads of a packed part share a section, which encode_rows() writes.
    bool by_row() const noexcept { return keys_.row != nullptr || values_.row != nullptr; }

    // Packed keys are less their sequence's mean, which lies apart: encode_block(), decode_block()
    // and BlockView need what key_mean() makes.
    bool has_key_mean() const noexcept { return scheme_.key.centre == Centre::sequence; }
    std::size_t key_mean_bytes() const noexcept {
        return has_key_mean() ? std::size_t{2} * shape_.channels() : 0;
    }

    // A block's two states. Exact: keys f16 [channels][block_tokens], then values f16
    // [block_tokens][channels]: keys by channel and values by token, as attention reads them. Then
    // the tokens' positions as i32, if the keys are packed as they were before RoPE.
    bool has_positions() const noexcept { return scheme_.key.stage == Stage::pre; }
    std::size_t exact_positions_offset() const noexcept { return 2 * exact_part_bytes(); }
    std::size_t exact_bytes() const noexcept {
        return exact_positions_offset() + (has_positions() ? std::size_t{4} * block_tokens_ : 0);
    }
    std::size_t exact_part_bytes() const noexcept {
        return std::size_t{2} * shape_.channels() * block_tokens_;
    }
    // Packed: the keys' part, then the values' part.
    std::size_t packed_bytes() const noexcept { return keys_.bytes + values_.bytes; }

    // Bits per element of the packed part, all metadata and padding included.
    double key_bits() const noexcept;
    double value_bits() const noexcept;
    double bits_per_element() const noexcept { return (key_bits() + value_bits()) / 2; }

    std::string_view implementation() const noexcept;
    const kernels::Table& kernels() const noexcept { return *kernels_; }

  private:
    LayerScheme scheme_;
    Shape shape_;
    std::uint32_t block_tokens_ = 0;
    PartLayout keys_, values_;
    const kernels::Table* kernels_ = nullptr;
    std::uint32_t layer_ = 0;
    std::uint64_t inputs_hash_ = 0;
};

// Tokens per block of a layer: 32, or the longest group that runs over tokens; 128 to take a mean
// (Centre::block) or variances of.
std::uint32_t block_tokens(const LayerScheme& scheme) noexcept;

// `mean`, of keys as they are written, one per channel, as packed keys need it: rotated, f16.
std::vector<std::uint16_t> key_mean(const Plan& plan, std::span<const float> mean);

// Packs one exact block (layout above) into `packed` (plan.packed_bytes()): what the heads share
// first, then heads [first, last), in any order. `mean`: what key_mean() made, null unless
// plan.has_key_mean(). Throws Error(invalid_argument) where it is missing.
void encode_rows(const Plan& plan, const std::byte* exact, std::byte* packed) noexcept;
void encode_block(const Plan& plan, const std::byte* exact, std::byte* packed,
                  std::uint32_t first_head, std::uint32_t last_head,
                  const std::uint16_t* mean = nullptr);

// The inverse, rounded to f16. Used to reopen a block and to save state; attention never calls it.
void decode_block(const Plan& plan, const std::byte* packed, std::byte* exact,
                  const std::uint16_t* mean = nullptr);

}  // namespace lowkv
