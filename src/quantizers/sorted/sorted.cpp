// Keys that spend bits where they are large (lowkv's own): channels sorted by their energy, in
// groups of 16 with bits of their own, and the shortest keys repaired.

#include <cstring>

#include "codec/small_floats.h"
#include "isa/table.h"
#include "quantizers/sorted/encoder.h"
#include "quantizers/words.h"

namespace lowkv::codec {
namespace {

static_assert(max_sorted_dim == kernels::max_head_dim);

constexpr std::uint32_t tokens = sorted_tokens;

class SortedKeys final : public SortedPart {
  public:
    SortedKeys(const Codec& codec, const PartShape& its_shape, const PartInputs& inputs)
        : SortedPart(codec, its_shape, *inputs.table) {
        set_kernels(kernels::find(*inputs.table, "sorted"));
        set_on_devices();
    }

    void encode_head(const std::uint16_t* exact, std::uint32_t h, std::byte* packed,
                     const EncodeHints& hints) const noexcept override;
    void decode_head(const std::byte* packed, std::uint32_t h,
                     std::uint16_t* exact) const noexcept override;
};

void SortedKeys::encode_head(const std::uint16_t* exact, std::uint32_t h, std::byte* packed,
                             const EncodeHints& hints) const noexcept {
    std::byte* its_section = packed + section_offset(h);
    std::memset(its_section, 0, head_bytes());
    const std::uint16_t* rows = exact + shape().exact_offset(h);
    SortedEncoder encoder(*this, rows);
    SortedStatistics statistics;
    if (take_carried(*this, rows, its_section)) {
        encoder.set_damping(its_section);
        read_statistics(*this, its_section, statistics);
        encoder.find_codes_again(statistics, its_section);
        encoder.write_codes(its_section);
        return;
    }
    const bool leads = hints.stats_from == nullptr;
    if (leads) {
        const float* queries = hints.queries;
        write_damping(*this, queries == nullptr ? nullptr : queries + h * head.head_dim,
                      its_section);
    } else {
        std::memcpy(its_section, hints.stats_from + section_offset(h), section.largest);
    }
    encoder.set_damping(its_section);
    encoder.set_rows(encoder.shortest());
    if (leads) {
        float energy[max_sorted_dim];
        encoder.find_energy(energy);
        write_statistics(*this, energy, its_section);
    }
    read_statistics(*this, its_section, statistics);
    encoder.find_codes(statistics);
    encoder.write_scales(its_section);
    encoder.write_means(statistics, its_section);
    encoder.write_rows(statistics, its_section);
    encoder.write_codes(its_section);
}

void SortedKeys::decode_head(const std::byte* packed, std::uint32_t h,
                             std::uint16_t* exact) const noexcept {
    const std::byte* its_section = packed + section_offset(h);
    const auto* codes = reinterpret_cast<const std::uint8_t*>(its_section + section.codes);
    std::uint16_t* out = exact + shape().exact_offset(h);
    SortedStatistics statistics;
    read_statistics(*this, its_section, statistics);
    float mean[max_sorted_dim];
    read_means(*this, its_section, mean);
    float scale[tokens];
    read_scales(*this, its_section, scale);
    for (std::uint32_t g = 0; g < section.groups; ++g) {
        float y[sorted_group][tokens] = {};
        CodeTile tile;
        if (g < coded_groups) {
            unpack_group(codes + lowkv_sorted_codes(head, g), bits(g), levels[bits(g)].trellis != 0,
                         tile);
            for (std::uint32_t i = 0; i < sorted_group; ++i) {
                read_levels(*this, statistics, g * sorted_group + i, tile.row[i], y[i]);
                for (std::uint32_t t = 0; t < tokens; ++t) y[i][t] *= scale[t];
            }
            hadamard_rows(y);
        }
        for (std::uint32_t i = 0; i < sorted_group; ++i) {
            const std::uint32_t p = g * sorted_group + i, c = statistics.order[p];
            for (std::uint32_t t = 0; t < tokens; ++t) y[i][t] = 0.25f * y[i][t] + mean[c];
            for (std::uint32_t r = 0; r < head.rows; ++r)
                y[i][row_token(*this, its_section, r)] += residual(*this, its_section, r, c);
            for (std::uint32_t t = 0; t < tokens; ++t)
                out[std::size_t{c} * tokens + t] = f32_to_f16(y[i][t] * statistics.factor[c]);
        }
    }
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
    CodecWords words(const Codec& codec, Part) const override { return sorted_words(codec); }
};

}  // namespace

const Quantizer& sorted_quantizer() noexcept {
    static const SortedQuantizer quantizer;
    return quantizer;
}

}  // namespace lowkv::codec
