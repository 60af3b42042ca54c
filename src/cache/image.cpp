// Images: their header, one writer and one reader. docs/images.md has every byte.

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "lowkv/error.h"
#include "lowkv/serial.h"
#include "xxh64.h"

namespace lowkv {
namespace {

static_assert(std::endian::native == std::endian::little, "packed blocks are as they lie here");

constexpr std::array<char, 8> magic{'L', 'O', 'W', 'K', 'V', 'I', 'M', 'G'};
constexpr std::size_t alignment = 64;
constexpr std::size_t most_text = 1024;

// The fixed part of a header, as it lies in memory.
struct Fixed {
    std::array<char, 8> magic;
    std::uint32_t version;
    std::uint32_t header_bytes;
    std::uint64_t bytes;
    std::uint64_t checksum;  // of all that follows
    std::uint64_t inputs;
    std::uint64_t packed_bytes;
    std::uint32_t block_tokens;
    std::uint32_t kv_heads, head_dim;
    std::uint32_t layer;
    std::uint32_t batch;
    std::uint32_t tokens;
    std::uint32_t rows;
    std::uint32_t flags;
    std::uint32_t spans;
    std::uint32_t text;
};
struct FixedSpan {
    std::uint32_t first, tokens, packed;
};
constexpr std::size_t checked_from = offsetof(Fixed, inputs);
constexpr std::uint32_t has_positions = 1, has_queries = 2;  // flags
constexpr unsigned value_dim_shift = 16;                     // behind them: Shape::value_dim
static_assert(sizeof(QueryRecord) == 16);
static_assert(sizeof(Fixed) == 88 && checked_from == 32 && sizeof(FixedSpan) == 12);

template <class... Parts>
[[noreturn]] void refuse(const Parts&... what) {
    throw Error(ErrorCode::invalid_image, "image: ", what...);
}

[[noreturn]] void refuse_size() { refuse("its counts make more bytes than there can be"); }

std::size_t times(std::size_t a, std::size_t b) {
    std::size_t product = 0;
    if (__builtin_mul_overflow(a, b, &product)) refuse_size();
    return product;
}

std::size_t plus(std::size_t a, std::size_t b) {
    std::size_t sum = 0;
    if (__builtin_add_overflow(a, b, &sum)) refuse_size();
    return sum;
}

std::size_t aligned(std::size_t bytes) {
    return plus(bytes, alignment - 1) / alignment * alignment;
}

std::string span_text(const ImageSpan& span) {
    return concat(span.packed ? "packed" : "exact", " cells [", span.first, ", ",
                  std::uint64_t{span.first} + span.tokens, ")");
}

void check_spans(const ImageHeader& header) {
    const ImageIdentity& identity = header.identity;
    if (header.tokens > Blocks::max_cells)
        refuse(header.tokens, " tokens; legal: up to ", Blocks::max_cells);
    if (header.spans.empty()) return;
    std::uint64_t end = header.spans.front().first;
    for (const ImageSpan& span : header.spans) {
        if (span.tokens == 0 || span.first != end)
            refuse(span_text(span), " after those before ", end,
                   "; an image has its cells in order, without gaps");
        if (span.packed && (identity.block_tokens == 0 || span.tokens % identity.block_tokens != 0))
            refuse(span_text(span), " are no whole blocks of ", identity.block_tokens);
        end = std::uint64_t{span.first} + span.tokens;
    }
    const std::uint64_t room = header.spans.back().packed ? identity.block_tokens - 1 : 0;
    if (end < header.tokens || end > header.tokens + room)
        refuse("its rows end at ", end, ", its tokens at ", header.tokens);
}

void check_zeros(std::span<const std::byte> bytes, std::size_t begin, std::size_t end) {
    if (std::ranges::any_of(bytes.subspan(begin, end - begin),
                            [](auto b) { return b != std::byte{0}; }))
        refuse("its padding at byte ", begin, " is not zero");
}

// The bytes of one sequence's query statistics.
std::size_t query_bytes(const ImageHeader& header) {
    const Shape& shape = header.identity.shape;
    return plus(sizeof(QueryRecord), times(times(shape.kv_heads, shape.head_dim), sizeof(float)));
}

// Calls f(begin, end) for each piece of padding.
template <class F>
void each_padding(const ImageHeader& header, const ImageLayout& layout, F f) {
    f(sizeof(Fixed) + sizeof(FixedSpan) * header.spans.size() + header.identity.scheme.size(),
      layout.header_bytes);
    for (std::size_t i = 0; i < layout.parts.size(); ++i)
        f(layout.parts[i].end,
          i + 1 < layout.parts.size() ? layout.parts[i + 1].begin : layout.queries);
    if (header.queries) f(layout.queries + header.batch * query_bytes(header), layout.bytes);
}

Fixed fixed_of(std::span<const std::byte> bytes) {
    Fixed fixed{};
    if (bytes.size() < sizeof fixed) refuse(bytes.size(), " bytes are too few for one");
    std::memcpy(&fixed, bytes.data(), sizeof fixed);
    if (fixed.magic != magic) refuse("this is none: it does not begin as one");
    if (fixed.version != oldest_image_version && fixed.version != image_version)
        refuse("version ", fixed.version, "; this lowkv reads versions ", oldest_image_version,
               " and ", image_version);
    if (fixed.bytes > bytes.size() || fixed.bytes < sizeof fixed)
        refuse("it says that it has ", fixed.bytes, " bytes, and there are ", bytes.size(),
               ": cut off or damaged");
    return fixed;
}

}  // namespace

std::string layer_text(const LayerScheme& layer, const Retention& retention) {
    return concat("k=", to_string(layer.key), ",v=", to_string(layer.value),
                  ",window=", retention.window, ",sinks=", retention.sinks,
                  ",flush=", retention.flush);
}

ImageIdentity image_identity(const Plan& plan, const Retention& retention) {
    const bool packs = !plan.scheme().exact();
    return {.scheme = layer_text(plan.scheme(), retention),
            .shape = plan.shape(),
            .layer = plan.layer(),
            .inputs = plan.inputs_hash(),
            .block_tokens = packs ? plan.block_tokens() : 0,
            .packed_bytes = packs ? plan.packed_bytes() : 0,
            .rows = plan.rows(),
            .positions = plan.has_positions()};
}

ImageLayout lay_out(const ImageHeader& header) {
    const ImageIdentity& identity = header.identity;
    const auto printable = [](char c) { return c >= ' ' && c <= '~'; };
    if (identity.scheme.empty() || identity.scheme.size() > most_text ||
        !std::ranges::all_of(identity.scheme, printable))
        refuse("its scheme is no text of 1 to ", most_text, " printable letters");
    if (identity.shape.kv_heads == 0 || identity.shape.head_dim == 0 || header.batch == 0)
        refuse("a batch of ", header.batch, " with ", identity.shape.kv_heads, " kv heads of ",
               identity.shape.head_dim, " channels; each is at least 1");
    if ((identity.block_tokens == 0) != (identity.packed_bytes == 0))
        refuse("blocks of ", identity.block_tokens, " tokens in ", identity.packed_bytes, " bytes");
    if (identity.rows != RowType::f32 && identity.rows != RowType::f16 &&
        identity.rows != RowType::bf16)
        refuse("rows of type ", static_cast<std::uint32_t>(identity.rows),
               "; legal: 1 (f32), 2 (f16), 3 (bf16)");
    check_spans(header);

    const std::size_t row = times(times(identity.shape.kv_heads, identity.shape.head_dim),
                                  element_bytes(identity.rows));
    ImageLayout layout;
    layout.header_bytes =
        aligned(sizeof(Fixed) + sizeof(FixedSpan) * header.spans.size() + identity.scheme.size());
    layout.bytes = layout.header_bytes;
    layout.parts.reserve(header.spans.size());
    for (const ImageSpan& span : header.spans) {
        ImagePart part;
        part.begin = layout.bytes;
        if (span.packed) {
            const std::size_t blocks = times(header.batch, span.tokens / identity.block_tokens);
            part.end = plus(part.begin, times(blocks, identity.packed_bytes));
        } else {
            const std::size_t tokens = times(header.batch, span.tokens);
            part.values = plus(part.begin, times(tokens, row));
            const std::size_t values = identity.shape.latent() ? 0 : times(tokens, row);
            part.end = part.positions = plus(part.values, values);
            if (identity.positions) part.end = plus(part.end, times(tokens, sizeof(std::int32_t)));
        }
        layout.bytes = aligned(part.end);
        layout.parts.push_back(part);
    }
    layout.queries = layout.bytes;
    if (header.queries)
        layout.bytes = aligned(plus(layout.queries, times(header.batch, query_bytes(header))));
    return layout;
}

void seal_image(const ImageHeader& header, std::span<std::byte> image) {
    const ImageLayout layout = lay_out(header);
    if (image.size() != layout.bytes)
        throw Error(ErrorCode::invalid_argument, "an image of ", layout.bytes,
                    " bytes does not fit into ", image.size());
    const ImageIdentity& identity = header.identity;
    Fixed fixed{.magic = magic,
                .version = image_version,
                .header_bytes = static_cast<std::uint32_t>(layout.header_bytes),
                .bytes = layout.bytes,
                .checksum = 0,
                .inputs = identity.inputs,
                .packed_bytes = identity.packed_bytes,
                .block_tokens = identity.block_tokens,
                .kv_heads = identity.shape.kv_heads,
                .head_dim = identity.shape.head_dim,
                .layer = identity.layer,
                .batch = header.batch,
                .tokens = header.tokens,
                .rows = static_cast<std::uint32_t>(identity.rows),
                .flags = (identity.positions ? has_positions : 0) |
                         (header.queries ? has_queries : 0) |
                         identity.shape.value_dim << value_dim_shift,
                .spans = static_cast<std::uint32_t>(header.spans.size()),
                .text = static_cast<std::uint32_t>(identity.scheme.size())};
    each_padding(header, layout, [&](std::size_t begin, std::size_t end) {
        std::ranges::fill(image.subspan(begin, end - begin), std::byte{0});
    });
    std::byte* at = image.data() + sizeof fixed;
    for (const ImageSpan& span : header.spans) {
        const FixedSpan stored{span.first, span.tokens, span.packed ? 1u : 0u};
        std::memcpy(at, &stored, sizeof stored);
        at += sizeof stored;
    }
    std::memcpy(at, identity.scheme.data(), identity.scheme.size());
    std::memcpy(image.data(), &fixed, sizeof fixed);
    fixed.checksum = xxh64(image.subspan(checked_from));
    std::memcpy(image.data() + offsetof(Fixed, checksum), &fixed.checksum, sizeof fixed.checksum);
}

ImageHeader read_image(std::span<const std::byte> bytes) {
    const Fixed fixed = fixed_of(bytes);
    bytes = bytes.first(fixed.bytes);
    if (xxh64(bytes.subspan(checked_from)) != fixed.checksum)
        refuse("it is damaged: its bytes do not match their checksum");

    // The checksum shows damage, not mistakes.
    const std::uint32_t legal =
        fixed.version == oldest_image_version ? has_positions : has_positions | has_queries;
    const std::uint32_t value_dim = fixed.flags >> value_dim_shift;
    if ((fixed.flags & ~legal) != value_dim << value_dim_shift ||
        (value_dim > 0 && fixed.version == oldest_image_version) || value_dim > fixed.head_dim)
        refuse("flags: ", fixed.flags, "; legal: 0 to ", legal);
    // A span has a part of its own, so it takes `alignment` bytes or more beside its entry.
    const std::size_t spans_bytes = times(fixed.spans, sizeof(FixedSpan) + alignment);
    if (plus(plus(sizeof fixed, spans_bytes), fixed.text) > bytes.size())
        refuse(fixed.spans, " spans and a scheme of ", fixed.text, " letters do not fit into it");
    ImageHeader header;
    header.identity = {.scheme = std::string(fixed.text, ' '),
                       .shape = {fixed.kv_heads, fixed.head_dim, value_dim},
                       .layer = fixed.layer,
                       .inputs = fixed.inputs,
                       .block_tokens = fixed.block_tokens,
                       .packed_bytes = fixed.packed_bytes,
                       .rows = static_cast<RowType>(fixed.rows),
                       .positions = (fixed.flags & has_positions) != 0};
    header.batch = fixed.batch;
    header.tokens = fixed.tokens;
    header.queries = (fixed.flags & has_queries) != 0;
    header.spans.reserve(fixed.spans);
    const std::byte* at = bytes.data() + sizeof fixed;
    for (std::uint32_t i = 0; i < fixed.spans; ++i) {
        FixedSpan span{};
        std::memcpy(&span, at, sizeof span);
        at += sizeof span;
        if (span.packed > 1) refuse("a span is neither exact (0) nor packed (1)");
        header.spans.push_back({span.first, span.tokens, span.packed == 1});
    }
    std::memcpy(header.identity.scheme.data(), at, fixed.text);
    const ImageLayout layout = lay_out(header);
    if (layout.header_bytes != fixed.header_bytes || layout.bytes != bytes.size())
        refuse("what it says it holds takes ", layout.header_bytes, " and ",
               layout.bytes - layout.header_bytes, " bytes, not ", fixed.header_bytes, " of ",
               bytes.size());
    each_padding(header, layout,
                 [&](std::size_t begin, std::size_t end) { check_zeros(bytes, begin, end); });
    return header;
}

std::uint64_t image_checksum(std::span<const std::byte> bytes) noexcept { return xxh64(bytes); }

void check_image(const ImageHeader& header, const ImageIdentity& wanted) {
    const ImageIdentity& found = header.identity;
    const auto same = [](std::string_view what, const auto& got, const auto& other) {
        if (got != other) refuse(what, " ", got, ", not ", other);
    };
    try {
        if (found.scheme != wanted.scheme) parse_scheme(found.scheme);
    } catch (const Error& error) {  // a word may be no longer in lowkv
        refuse("it was made for a scheme that can't be read: ", error.what());
    }
    same("it was made for the scheme", found.scheme, wanted.scheme);
    same("it is of layer", found.layer, wanted.layer);
    same("kv heads:", found.shape.kv_heads, wanted.shape.kv_heads);
    same("head_dim:", found.shape.head_dim, wanted.shape.head_dim);
    const auto type = [](RowType rows) {
        return std::string(rows == RowType::f32 ? "f32" : rows == RowType::f16 ? "f16" : "bf16");
    };
    same("values in the keys, channels:", found.shape.value_dim, wanted.shape.value_dim);
    same("its exact rows are", type(found.rows), type(wanted.rows));
    if (found.inputs != wanted.inputs)
        refuse("it was packed with another calibration or another rope");
    same("tokens of a block:", found.block_tokens, wanted.block_tokens);
    same("bytes of a packed block:", found.packed_bytes, wanted.packed_bytes);
    same("keys' positions:", found.positions, wanted.positions);
}

}  // namespace lowkv
