#include "scheme_quality.h"

#include <algorithm>
#include <array>

namespace lowkv::cli {

namespace {

constexpr std::array measured{
    Quality{"lowkv2", "0.019", "+0.8 %"},      Quality{"lowkv2.8", "0.0091", "+0.5 %"},
    Quality{"lowkv3", "0.0061", "+0.65 %"},    Quality{"lowkv4", "0.0037", "+0.1 %"},
    Quality{"kivi2", "0.072", "+5.9 %"},       Quality{"turboquant4", "0.0055", "+0.2 %"},
    Quality{"turboquant3", "0.013", "+1.0 %"}, Quality{"turboquant2", "0.064", "+4.5 %"},
};

}  // namespace

const Quality* find_quality(std::string_view preset) noexcept {
    const auto* const found = std::ranges::find(measured, preset, &Quality::preset);
    return found == measured.end() ? nullptr : found;
}

}  // namespace lowkv::cli
