#include <algorithm>
#include <array>
#include <iterator>

#include "families/codes_part.h"
#include "lowkv/family.h"

namespace lowkv {
namespace codec {

// Each in its folder.
const Family& exact_family() noexcept;     // f16, as rows come
const Family& uniform_family() noexcept;   // KIVI, int: groups of even steps
const Family& rotated_family() noexcept;   // lowkv, TurboQuant: rotated, a norm times levels
const Family& balanced_family() noexcept;  // KVarN: tokens and channels scaled to one variance
const Family& row_family() noexcept;       // SKVQ, KVQuant: metadata of a row of all heads
const Family& sorted_family() noexcept;    // keys: sorted channels, unequal bits, exact rows

namespace {

struct Owner {
    const Family& (*family)() noexcept;
    bool (*owns)(const Codec& codec) noexcept;
};

// The first that owns a codec stores it.
constexpr Owner owners[] = {
    {exact_family, [](const Codec& c) noexcept { return c.exact(); }},
    {sorted_family, [](const Codec& c) noexcept { return c.axis == Axis::sorted; }},
    {row_family, [](const Codec& c) noexcept { return c.by_row(); }},
    {balanced_family, [](const Codec& c) noexcept { return c.balanced; }},
    {rotated_family,
     [](const Codec& c) noexcept {
         return c.levels == Levels::normal || c.levels == Levels::trellis ||
                c.rotation != Rotate::none || c.centred;
     }},
    {uniform_family, [](const Codec&) noexcept { return true; }},
};

}  // namespace

}  // namespace codec

std::span<const Family* const> families() noexcept {
    static const auto all = [] {
        std::array<const Family*, std::size(codec::owners)> out{};
        std::ranges::transform(codec::owners, out.begin(),
                               [](const codec::Owner& owner) { return &owner.family(); });
        return out;
    }();
    return all;
}

const Family& family_of(const Codec& codec) noexcept {
    if (codec.family != nullptr) return *codec.family;
    return std::ranges::find_if(codec::owners,
                                [&](const codec::Owner& owner) { return owner.owns(codec); })
        ->family();
}

std::string_view Family::restriction(const Codec&, Part) const noexcept { return {}; }
CodecWords Family::words(const Codec&, Part) const { return {std::string(name()), {}, {}}; }

void PackedPart::encode_shared(const std::uint16_t*, const std::int32_t*,
                               std::byte*) const noexcept {}

void PackedPart::set_bytes(std::size_t head, std::size_t shared) noexcept {
    head_bytes_ = round_up(head, codec::cache_line);
    shared_bytes_ = round_up(shared, codec::cache_line);
    bytes_ = shared_bytes_ + head_bytes_ * shape_.layer.kv_heads;
}

}  // namespace lowkv
