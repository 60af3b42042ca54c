#include <algorithm>
#include <array>
#include <iterator>

#include "lowkv/codec.h"
#include "lowkv/quantizer.h"
#include "quantizers/codes_part.h"

namespace lowkv {
namespace codec {

// Each in its folder.
const Quantizer& exact_quantizer() noexcept;    // f16, as rows come
const Quantizer& grouped_quantizer() noexcept;  // KIVI, int, TurboQuant, values of lowkv
const Quantizer& sorted_quantizer() noexcept;   // keys of lowkv: sorted channels, unequal bits
#ifdef LOWKV_ROW_QUANTIZER  // a guest's (guests/row): SKVQ, KVQuant, metadata of a row of all heads
const Quantizer& LOWKV_ROW_QUANTIZER() noexcept;
#endif

namespace {

struct Owner {
    const Quantizer& (*quantizer)() noexcept;
    bool (*owns)(const Codec& codec) noexcept;
};

// The first that owns a codec stores it.
constexpr Owner owners[] = {
    {exact_quantizer, [](const Codec& c) noexcept { return c.exact(); }},
    {sorted_quantizer, [](const Codec& c) noexcept { return c.axis == Axis::sorted; }},
#ifdef LOWKV_ROW_QUANTIZER
    {LOWKV_ROW_QUANTIZER, [](const Codec& c) noexcept { return c.by_row(); }},
#endif
    {grouped_quantizer, [](const Codec&) noexcept { return true; }},
};

}  // namespace

}  // namespace codec

std::span<const Quantizer* const> quantizers() noexcept {
    static const auto all = [] {
        std::array<const Quantizer*, std::size(codec::owners)> out{};
        std::ranges::transform(codec::owners, out.begin(),
                               [](const codec::Owner& owner) { return &owner.quantizer(); });
        return out;
    }();
    return all;
}

const Quantizer& quantizer_of(const Codec& codec) noexcept {
    if (codec.quantizer != nullptr) return *codec.quantizer;
    return std::ranges::find_if(codec::owners,
                                [&](const codec::Owner& owner) { return owner.owns(codec); })
        ->quantizer();
}

std::string_view Quantizer::restriction(const Codec&, Part) const noexcept { return {}; }

PartCalibration Quantizer::neutral_calibration(const Codec&, const Shape&) const { return {}; }

void PackedPart::encode_shared(const std::uint16_t*, const std::int32_t*,
                               std::byte*) const noexcept {}

void PackedPart::set_bytes(std::size_t head, std::size_t shared) noexcept {
    head_bytes_ = round_up(head, codec::cache_line);
    shared_bytes_ = round_up(shared, codec::cache_line);
    bytes_ = shared_bytes_ + head_bytes_ * shape_.layer.kv_heads;
}

}  // namespace lowkv
