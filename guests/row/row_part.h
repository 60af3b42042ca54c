#pragma once
// Codecs whose metadata belongs to a token's row of all heads (Codec::by_row): SKVQ's groups of
// reordered channels, KVQuant's static ranges, learned levels and outliers, keys before RoPE.
//
// A part begins with a section of what its heads share; the heads' sections have codes only.
//   header     as in codes_part.h
//   metadata   keys, and values of one group: a row is one group of channels, an entry one token.
//              Other values: the other way round, as attention reads them. Static ranges: none.
//   outliers   by head, its tokens in order, so that a head's are contiguous: where each head's
//              begin and the last one's end, as u16; their channel within the head and their token,
//              a byte each; what is missing there, as f16
//   positions  keys before RoPE: of each token, as i32

#include <memory>

#include "quantizers/codes_part.h"
#include "row/row_tables.h"

namespace lowkv::codec {

struct RowPart final : CodesPart {
    std::shared_ptr<const RowTables> row;
    std::size_t outliers_offset = 0;  // where each head's begin
    std::size_t places_offset = 0;
    std::size_t residuals_offset = 0;
    // Values of one group are multiplied as any other codes, outliers apart. Null: not these.
    const PartKernels* dense = nullptr;

    RowPart(const Codec& its_codec, const PartShape& its_shape, const PartInputs& inputs,
            const PartKernels& its_kernels);

    void encode_shared(const std::uint16_t* exact, const std::int32_t* positions,
                       std::byte* packed) const noexcept override;
    void encode_head(const std::uint16_t* exact, std::uint32_t h, std::byte* packed,
                     const EncodeHints&) const noexcept override;
    void decode_head(const std::byte* packed, std::uint32_t h,
                     std::uint16_t* exact) const noexcept override;
};

}  // namespace lowkv::codec
