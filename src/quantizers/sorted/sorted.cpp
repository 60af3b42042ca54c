// Keys that spend bits where they are large (lowkv's own): channels sorted by their energy, in
// groups of 16 with bits of their own, and the shortest keys repaired.

#include <algorithm>
#include <cstring>

#include "isa/table.h"
#include "quantizers/rules.h"
#include "quantizers/sorted/section.h"

namespace lowkv::codec {
namespace {

static_assert(max_sorted_dim == kernels::max_head_dim);

constexpr std::uint32_t tokens = kernels::max_block_tokens;

class SortedKeys final : public SortedPart {
  public:
    SortedKeys(const Codec& codec, const PartShape& its_shape, const PartInputs& inputs)
        : SortedPart(codec, its_shape), table_(*inputs.table) {
        set_kernels(kernels::find(*inputs.table, "sorted"));
        set_on_devices();
    }

    void encode_head(const std::uint16_t* exact, std::uint32_t h, std::byte* packed,
                     const EncodeHints& hints) const noexcept override;
    void decode_head(const std::byte* packed, std::uint32_t h,
                     std::uint16_t* exact) const noexcept override;

  private:
    const kernels::Table& table_;
};

void SortedKeys::encode_head(const std::uint16_t* exact, std::uint32_t h, std::byte* packed,
                             const EncodeHints& hints) const noexcept {
    std::byte* its_section = packed + section_offset(h);
    std::memset(its_section, 0, head_bytes());
    const std::uint16_t* rows = exact + shape().exact_offset(h);
    kernels::SortedSource source = kernels::SortedSource::carried;
    if (!take_carried(*this, rows, its_section)) {
        source = hints.stats_from == nullptr ? kernels::SortedSource::leads
                                             : kernels::SortedSource::follows;
        const float* queries = hints.queries;
        if (source == kernels::SortedSource::leads)
            write_damping(*this, queries == nullptr ? nullptr : queries + h * head.head_dim,
                          its_section);
        else
            std::memcpy(its_section, hints.stats_from + section_offset(h), section.largest);
    }
    table_.encode_sorted(*this, rows, source, its_section);
}

void SortedKeys::decode_head(const std::byte* packed, std::uint32_t h,
                             std::uint16_t* exact) const noexcept {
    const std::byte* its_section = packed + section_offset(h);
    std::uint16_t* out = exact + shape().exact_offset(h);
    table_.decode_sorted(*this, its_section, out);
    carry(*this, its_section, out);
}

// What follows from the axis alone stays as it is in a codec of the same axis, bits, levels and
// rows.
bool has_other_words(const Codec& codec) noexcept {
    Codec plain{.width = codec.width, .axis = codec.axis, .group = Group::head};
    plain.quarter_bits = codec.quarter_bits;
    plain.exact_rows = codec.exact_rows;
    plain.weighted = codec.weighted;
    if (codec.levels == Levels::trellis) plain.levels = codec.levels;
    return codec != plain;
}

// Whether groups have codes whose levels a trellis may choose.
bool has_few_bits(const Codec& codec) noexcept {
    return std::ranges::any_of(codec.quarter_bits,
                               [](std::uint8_t bits) { return bits > 0 && bits < 4; });
}

class SortedQuantizer final : public Quantizer {
    std::string_view name() const noexcept override { return "sorted"; }
    std::uint32_t block_tokens(const Codec&) const noexcept override { return tokens; }
    std::shared_ptr<const PackedPart> compile(const Codec& codec, const PartShape& shape,
                                              const PartInputs& inputs) const override {
        return std::make_shared<SortedKeys>(codec, shape, inputs);
    }
    std::string_view restriction(const Codec& codec, Part part) const noexcept override {
        const bool sorted = codec.axis == Axis::sorted, quartered = codec.quarter_bits[0] != 0;
        return first_broken(
            {{sorted && part == Part::values, "sorted is for keys"},
             {sorted && !quartered,
              "sorted needs bits of each quarter of the channels: sorted-4211-head"},
             {!sorted && quartered, "bits of quarters, such as 4211, are for sorted keys"},
             {!sorted && codec.exact_rows != 0,
              "exact rows are for sorted keys: sorted-4211-head-2rows"},
             {!sorted && codec.weighted,
              "weighted is for sorted keys: sorted-4211-head-2rows-weighted"},
             {sorted && codec.width != sorted_width(codec.quarter_bits[0]),
              "the width of sorted keys is that of their first quarter, at most 4"},
             {sorted && has_other_words(codec),
              "sorted keys have a group, a rotation, a mean and a scale of their own, and their "
              "levels "
              "are normal or trellis: sorted-4211-head-2rows or sorted-4211-head-trellis-2rows"},
             {sorted && codec.levels == Levels::trellis && !has_few_bits(codec),
              "a trellis is for groups of 1, 2 or 3 bits: sorted-4211-head-trellis"}});
    }
};

}  // namespace

const Quantizer& sorted_quantizer() noexcept {
    static const SortedQuantizer quantizer;
    return quantizer;
}

}  // namespace lowkv::codec
