#pragma once
// A quantizer is one way of storing rows, whole: what lies where in a packed block, how rows get in
// and out, and how attention reads them. A plan chooses one for a layer's keys and one for its
// values, once; nothing below it asks which.
//
// The library's own quantizers are in src/quantizers/. One from outside derives from Quantizer and
// PackedPart and is named by Codec::quantizer: examples/codec.cpp.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "lowkv/part.h"
#include "lowkv/scheme.h"

namespace lowkv {

namespace codec {
class Rotation;  // rotation.h
class Rotations;

// Writes what a head's section of sorted keys says of its queries' mean squares, [channel]; null:
// they are not known, nothing is damped. For devices that encode such keys.
void write_damping(const lowkv_sorted& part, const float* queries, std::byte* section) noexcept;
}  // namespace codec
namespace kernels {
struct Table;
}
struct PartCalibration;
struct Rope;
class PackedPart;

// The cache of one layer: kv_heads heads of head_dim channels.
struct Shape {
    std::uint32_t kv_heads = 0;
    std::uint32_t head_dim = 0;  // a multiple of 16, at most 576 (256 by row)
    // Above 0: multi-head latent attention. There is one head, its values are the first value_dim
    // channels of its keys, and they have no rows of their own.
    std::uint32_t value_dim = 0;
    std::uint32_t channels() const noexcept { return kv_heads * head_dim; }
    bool latent() const noexcept { return value_dim != 0; }
    // Numbers that a token stores.
    std::uint32_t numbers() const noexcept { return latent() ? channels() : 2 * channels(); }
    // Channels of a head's value, and of what attention makes of it.
    std::uint32_t out_dim() const noexcept { return latent() ? value_dim : head_dim; }
    friend bool operator==(const Shape&, const Shape&) = default;
};

// A block's keys or values. A head of either is a matrix, as attention multiplies it: `steps` rows
// of `lanes` numbers. Keys: a lane is a token, a step a channel. Values: the other way round.
struct PartShape {
    Shape layer;
    Part part = Part::keys;
    std::uint32_t tokens = 0;  // of a block: 32, 64 or 128

    std::uint32_t lanes() const noexcept { return part == Part::keys ? tokens : layer.head_dim; }
    std::uint32_t steps() const noexcept { return part == Part::keys ? layer.head_dim : tokens; }
    // In an exact part: f16 elements from one step to the next, and to a head's first.
    std::size_t exact_stride() const noexcept {
        return part == Part::keys ? tokens : layer.channels();
    }
    std::size_t exact_offset(std::uint32_t head) const noexcept {
        const std::size_t first = std::size_t{head} * layer.head_dim;
        return part == Part::keys ? first * tokens : first;
    }
    std::size_t exact_bytes() const noexcept { return std::size_t{2} * layer.channels() * tokens; }
};

// One head of a packed block.
struct PackedHead {
    const PackedPart* part = nullptr;
    const std::byte* section = nullptr;  // the head's
    const std::byte* shared = nullptr;   // what all heads share: the part's first bytes
    std::uint32_t head = 0;
    std::uint32_t lane_count = 0, step_count = 0;
};

// What a kernel knows of four rows' weights from one call to the next, as long as they are the
// same: of a task's queries. Before the first call its first 64 bytes are zeros.
struct alignas(64) ProductMemory {
    std::byte bytes[7040];
    void clear() noexcept {
        for (unsigned i = 0; i < 64; ++i) bytes[i] = std::byte{0};
    }
};

// `ahead` is what will be needed next, to be fetched meanwhile.
struct Product {
    PackedHead x;
    const float* w = nullptr;
    float* y = nullptr;
    const std::byte* ahead = nullptr;
    std::size_t ahead_bytes = 0;
    const std::uint8_t* levels = nullptr;  // a kernel's own: what x's codes stand for, a byte each
    ProductMemory* memory = nullptr;       // one for each four rows; null: there is none
};

// What a packed block may be made of besides its rows.
struct EncodeHints {
    // An earlier packed block of the sequence, whose statistics it takes over (of encode_head():
    // the same part of it). Null: it makes its own.
    const std::byte* stats_from = nullptr;
    // Of a block that makes its own, where wants_queries(): the mean squares of the layer's
    // queries, [kv_head][channel]. Null: they are not known.
    const float* queries = nullptr;
};

// How attention reads a quantizer's heads. Scratch memory is the kernel's own stack.
struct PartKernels {
    std::string_view name;
    // y[row][lane] += sum over steps of w[row][step] * x[lane][step], for `count` blocks of a span
    // together and `rows` rows, 1 to most_rows. Null: a tile is expanded and multiplied.
    void (*multiply)(const Product* products, unsigned count, unsigned rows, std::size_t w_stride,
                     std::size_t y_stride) noexcept = nullptr;
    // tile[step][lane] of 32 tokens from first_token on, all channels, as attention sees them.
    void (*expand)(const PackedHead& x, unsigned first_token, float* tile) noexcept = nullptr;
    unsigned most_rows = 4;  // at least 4
};
inline constexpr std::uint32_t tile_tokens = 32;

// A codec compiled for one shape: the keys' or the values' half of packed blocks. It is one section
// that all heads share, which may be empty, then a section for each head, so that a head is read
// front to back. Every section is a multiple of 64 bytes.
class PackedPart {
  public:
    virtual ~PackedPart() = default;
    PackedPart(const PackedPart&) = delete;
    PackedPart& operator=(const PackedPart&) = delete;

    // `exact` is the exact part (PartShape), `packed` the packed part; every byte of a section is
    // written. What heads share comes first, then the heads, in any order and on any thread.
    // `positions`, of the block's tokens, is null unless has_positions().
    virtual void encode_shared(const std::uint16_t* exact, const std::int32_t* positions,
                               std::byte* packed) const noexcept;
    virtual void encode_head(const std::uint16_t* exact, std::uint32_t head, std::byte* packed,
                             const EncodeHints& hints) const noexcept = 0;
    // The inverse, rounded to f16.
    virtual void decode_head(const std::byte* packed, std::uint32_t head,
                             std::uint16_t* exact) const noexcept = 0;
    // Packed rows x are stored as x R: queries are multiplied by R before they meet them, and what
    // packed values add up to by its inverse afterwards. Null: they are not rotated.
    virtual const codec::Rotation* rotation() const noexcept { return nullptr; }

    const PartShape& shape() const noexcept { return shape_; }
    const PartKernels& kernels() const noexcept { return kernels_; }
    // What the library's own kernels and devices read; null: a quantizer from outside, or exact.
    const lowkv_part* plain() const noexcept { return plain_; }
    const lowkv_sorted* sorted_table() const noexcept { return sorted_table_; }
    std::size_t shared_bytes() const noexcept { return shared_bytes_; }
    std::size_t head_bytes() const noexcept { return head_bytes_; }
    std::size_t bytes() const noexcept { return bytes_; }
    std::size_t section_offset(std::uint32_t head) const noexcept {
        return shared_bytes_ + head * head_bytes_;
    }
    // It is what an exact block holds, and is read as such.
    bool exact() const noexcept { return exact_; }
    // Keys before RoPE: the shared section holds their tokens' positions, i32 each.
    bool has_positions() const noexcept { return has_positions_; }
    // Blocks hold statistics that later ones of the sequence should take over
    // (EncodeHints::stats_from).
    bool has_statistics() const noexcept { return has_statistics_; }
    // Statistics are better for knowing the layer's queries (EncodeHints::queries).
    bool wants_queries() const noexcept { return wants_queries_; }
    // devices/kernels/ encodes and reads such blocks as this part does. An encoder that nobody has
    // written there leaves it false, and devices refuse it.
    bool on_devices() const noexcept { return on_devices_; }
    std::size_t positions_offset() const noexcept { return positions_offset_; }

  protected:
    explicit PackedPart(const PartShape& shape) noexcept : shape_(shape) {}
    // Rounded up to multiples of 64.
    void set_bytes(std::size_t head, std::size_t shared = 0) noexcept;
    void set_kernels(const PartKernels& kernels) noexcept { kernels_ = kernels; }
    // The part's own, for as long as it lives.
    void set_plain(const lowkv_part* plain, const lowkv_sorted* sorted = nullptr) noexcept {
        plain_ = plain;
        sorted_table_ = sorted;
    }
    void set_positions(std::size_t offset) noexcept {
        has_positions_ = true;
        positions_offset_ = offset;
    }
    void set_statistics(bool of_queries) noexcept {
        has_statistics_ = true;
        wants_queries_ = of_queries;
    }
    void set_on_devices() noexcept { on_devices_ = true; }
    void set_exact() noexcept {
        exact_ = on_devices_ = true;
        bytes_ = shape_.exact_bytes();
    }

  private:
    PartShape shape_;
    PartKernels kernels_;
    const lowkv_part* plain_ = nullptr;
    const lowkv_sorted* sorted_table_ = nullptr;
    std::size_t shared_bytes_ = 0, head_bytes_ = 0, bytes_ = 0;
    bool exact_ = false, has_positions_ = false, has_statistics_ = false, wants_queries_ = false;
    bool on_devices_ = false;
    std::size_t positions_offset_ = 0;
};

// What some codecs need to know about a layer.
struct PartInputs {
    const PartCalibration* calibration = nullptr;  // Codec::needs_calibration()
    const Rope* rope = nullptr;                    // keys before RoPE; null: the model has none
    const kernels::Table* table = nullptr;         // the implementation's kernels, never null
    codec::Rotations* rotations = nullptr;         // the layer's, never null
};

class Quantizer {
  public:
    virtual ~Quantizer() = default;
    // What a codec of it is called where it has no text of its own.
    virtual std::string_view name() const noexcept = 0;
    // Tokens that a block must have at least: up to 128.
    virtual std::uint32_t block_tokens(const Codec& codec) const noexcept = 0;
    // Throws Error where the codec can't be compiled for the shape or needs other inputs.
    virtual std::shared_ptr<const PackedPart> compile(const Codec& codec, const PartShape& shape,
                                                      const PartInputs& inputs) const = 0;
    // What is wrong with a codec that has any of this quantizer's words, whichever quantizer stores
    // it, and what would be right; empty: nothing.
    virtual std::string_view restriction(const Codec& codec, Part part) const noexcept;
    // Of a codec that needs a calibration: one that fits it and says nothing about a model.
    virtual PartCalibration neutral_calibration(const Codec& codec, const Shape& shape) const;
};

// The library's own.
std::span<const Quantizer* const> quantizers() noexcept;
// Whose a codec is: the one place that tells them apart.
const Quantizer& quantizer_of(const Codec& codec) noexcept;

}  // namespace lowkv
