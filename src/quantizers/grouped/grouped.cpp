#include "quantizers/grouped/grouped.h"

#include "quantizers/packing.h"
#include "quantizers/words.h"

namespace lowkv::codec {
namespace {

bool by_token(const Codec& codec) noexcept {
    return codec.levels == Levels::normal || codec.levels == Levels::trellis ||
           codec.rotation != Rotate::none || codec.centred;
}

class GroupedQuantizer final : public Quantizer {
    std::string_view name() const noexcept override { return "grouped"; }
    std::uint32_t block_tokens(const Codec& codec) const noexcept override {
        if (codec.centred) return max_block_tokens;
        return codec.axis == Axis::channel ? row_of(codec.group).size : 0;
    }
    std::shared_ptr<const PackedPart> compile(const Codec& codec, const PartShape& shape,
                                              const PartInputs& inputs) const override {
        return by_token(codec) ? make_by_token(codec, shape, inputs)
                               : make_uniform(codec, shape, inputs);
    }
    std::string_view restriction(const Codec& codec, Part part) const noexcept override {
        return grouped_restriction(codec, part);
    }
};

}  // namespace

const Quantizer& grouped_quantizer() noexcept {
    static const GroupedQuantizer quantizer;
    return quantizer;
}

}  // namespace lowkv::codec
