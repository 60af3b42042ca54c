// Rows as they come: a packed block holds what an exact one does.

#include <cstring>

#include "lowkv/quantizer.h"

namespace lowkv::codec {
namespace {

class ExactPart final : public PackedPart {
  public:
    explicit ExactPart(const PartShape& its_shape) : PackedPart(its_shape) { set_exact(); }

    void encode_head(const std::uint16_t* exact, std::uint32_t head, std::byte* packed,
                     const EncodeHints&) const noexcept override {
        copy(exact, head, reinterpret_cast<std::uint16_t*>(packed));
    }
    void decode_head(const std::byte* packed, std::uint32_t head,
                     std::uint16_t* exact) const noexcept override {
        copy(reinterpret_cast<const std::uint16_t*>(packed), head, exact);
    }

  private:
    void copy(const std::uint16_t* from, std::uint32_t head, std::uint16_t* to) const noexcept {
        std::size_t at = shape().exact_offset(head);
        for (std::uint32_t step = 0; step < shape().steps(); ++step) {
            std::memcpy(to + at, from + at, sizeof *to * shape().lanes());
            at += shape().exact_stride();
        }
    }
};

class ExactQuantizer final : public Quantizer {
    std::string_view name() const noexcept override { return "exact"; }
    std::uint32_t block_tokens(const Codec&) const noexcept override { return 0; }
    std::shared_ptr<const PackedPart> compile(const Codec&, const PartShape& shape,
                                              const PartInputs&) const override {
        return std::make_shared<ExactPart>(shape);
    }
};

}  // namespace

const Quantizer& exact_quantizer() noexcept {
    static const ExactQuantizer quantizer;
    return quantizer;
}

}  // namespace lowkv::codec
