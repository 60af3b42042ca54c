// Keys that spend bits where they are large (lowkv's own): channels sorted by their energy, in
// groups of 16 with bits of their own, and the shortest keys repaired.

#include <cstring>

#include "isa/table.h"
#include "quantizers/sorted/section.h"
#include "quantizers/words.h"

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

class SortedQuantizer final : public Quantizer {
    std::string_view name() const noexcept override { return "sorted"; }
    std::uint32_t block_tokens(const Codec&) const noexcept override { return tokens; }
    std::shared_ptr<const PackedPart> compile(const Codec& codec, const PartShape& shape,
                                              const PartInputs& inputs) const override {
        return std::make_shared<SortedKeys>(codec, shape, inputs);
    }
    std::string_view restriction(const Codec& codec, Part part) const noexcept override {
        return sorted_restriction(codec, part);
    }
};

}  // namespace

const Quantizer& sorted_quantizer() noexcept {
    static const SortedQuantizer quantizer;
    return quantizer;
}

}  // namespace lowkv::codec
