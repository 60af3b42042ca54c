#pragma once
// Images: the packed blocks and exact rows of one layer as bytes, for files, states and network
// chunks. docs/images.md has every byte.
//
//   save_sequence(), load_sequence()  a Sequence at once; a Batch has save() and load()
//   lay_out(), seal_image()           for hosts with rows of their own: fill the parts, then seal
//   read_image(), check_image()       whether bytes are an image, and one that the host can use
//
// Nothing in an image is trusted: what read_image() gave holds together and lies within the bytes.
// What packed blocks hold is the codec's, whose decoder stays within its block whatever that is.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lowkv/cache.h"
#include "lowkv/codec.h"
#include "lowkv/scheme.h"

namespace lowkv {

class Sequence;  // batch.h

// Raised when the bytes of an image, or those that a codec packs, change their meaning.
inline constexpr std::uint32_t image_version = 4;
// Read, too: it has no query energies, all else is the same. There was no version 3: its number is
// one flipped bit from 2, and no checksum is over the version.
inline constexpr std::uint32_t oldest_image_version = 2;

// What an image's bytes mean: those of equal identities are interchangeable.
struct ImageIdentity {
    std::string scheme;        // layer_text()
    Shape shape;               // of the layer
    std::uint32_t layer = 0;   // its number in the model
    std::uint64_t inputs = 0;  // Plan::inputs_hash(): the calibration and the rope, 0 for none
    std::uint32_t block_tokens = 0;  // 0 where nothing is ever packed
    std::uint64_t packed_bytes = 0;  // of one block, likewise
    RowType rows = RowType::f16;
    bool positions = false;  // exact rows have their keys' positions

    friend bool operator==(const ImageIdentity&, const ImageIdentity&) = default;
};

// A layer's codecs and retention, spelled out: a preset may come to mean something else.
std::string layer_text(const LayerScheme& layer, const Retention& retention);

ImageIdentity image_identity(const Plan& plan, const Retention& retention);

// Cells [first, first + tokens). Packed ones are whole blocks.
struct ImageSpan {
    std::uint32_t first = 0, tokens = 0;
    bool packed = false;

    friend bool operator==(const ImageSpan&, const ImageSpan&) = default;
};

struct ImageHeader {
    ImageIdentity identity;
    std::uint32_t batch = 1;   // sequences, with the same spans
    std::uint32_t tokens = 0;  // one past the highest cell
    // One behind the other, up to `tokens`; the last packed block may go past it. Cells before the
    // first are dropped ones.
    std::vector<ImageSpan> spans;
    // Behind the parts: what the sequences have seen of their queries (query_energy.h).
    bool queries = false;

    friend bool operator==(const ImageHeader&, const ImageHeader&) = default;
};

// Where a span's bytes lie, counted from the image's first.
struct ImagePart {
    // Packed: [batch][block][packed_bytes]. Exact: keys, [batch][token][kv_head][channel]
    std::size_t begin = 0;
    std::size_t values = 0;     // exact: values, likewise
    std::size_t positions = 0;  // exact, if the identity says so: i32 [batch][token]
    std::size_t end = 0;
};

// A sequence's QueryState, before its values.
struct QueryRecord {
    std::uint32_t tokens = 0, heads = 0;
    std::uint32_t kind = 0;  // 0: no values (zeros follow), 1: sums, 2: means that are kept
    std::uint32_t zero = 0;
};

struct ImageLayout {
    std::size_t header_bytes = 0;
    std::vector<ImagePart> parts;  // of the spans
    // [batch] of a QueryRecord and f32 [kv_head][channel]; where the parts end if there are none.
    std::size_t queries = 0;
    std::size_t bytes = 0;  // of the image, a multiple of 64
};

// Throws Error(invalid_image) for what can't be an image: counts, sizes or spans that don't hold
// together.
ImageLayout lay_out(const ImageHeader& header);

// Makes `image`, lay_out().bytes long, whose parts are filled, an image: writes its header, its
// padding and its checksum.
void seal_image(const ImageHeader& header, std::span<std::byte> image);

// Throws Error(invalid_image) for what is no image, of another version, cut off, damaged, or does
// not hold together. More bytes may follow: lay_out().bytes says where the image ends.
ImageHeader read_image(std::span<const std::byte> bytes);

// XXH64, seed 0: the checksum of images, for hosts that keep packed bytes in a form of their own.
std::uint64_t image_checksum(std::span<const std::byte> bytes) noexcept;

// Throws Error(invalid_image) where the image means something else, saying what.
void check_image(const ImageHeader& header, const ImageIdentity& wanted);

// A sequence whose tokens were appended and packed in order, from 0 on. Throws
// Error(invalid_argument) where one lacks its key or its value: save between steps.
std::vector<std::byte> save_sequence(const Sequence& sequence);

// The sequence again, which goes on as the saved one would have, bit for bit. Throws as
// read_image(), check_image() and Sequence do. Beside the rows themselves, what is allocated for
// sequences and their lists of blocks is at most the image's size and 1 MiB: batches of more empty
// sequences or dropped tokens are refused, and are not saved.
Sequence load_sequence(std::span<const std::byte> image, const std::shared_ptr<Store>& store,
                       const std::shared_ptr<const Plan>& plan, const Retention& retention);

}  // namespace lowkv
