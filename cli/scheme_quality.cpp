#include "scheme_quality.h"

#include <algorithm>
#include <array>

namespace lowkv::cli {

namespace {

constexpr std::array measured{
    Quality{"lowkv1.5", "0.031", "+1.5 %"},    Quality{"lowkv2", "0.017", "+0.9 %"},
    Quality{"lowkv2.6", "0.011", "+0.5 %"},    Quality{"lowkv2.8", "0.0082", "+0.5 %"},
    Quality{"lowkv3", "0.0059", "+0.5 %"},     Quality{"lowkv4", "0.0037", "+0.1 %"},
    Quality{"kivi4", "0.0041", "0.0 %"},       Quality{"int4", "0.0068", "0.0 %"},
    Quality{"int4h", "0.0051", "+0.3 %"},      Quality{"int8", "0.0031", "-0.1 %"},
    Quality{"kivi2", "0.072", "+5.9 %"},       Quality{"turboquant4", "0.0055", "+0.2 %"},
    Quality{"turboquant3", "0.013", "+1.0 %"}, Quality{"turboquant2", "0.064", "+4.5 %"},
};

}  // namespace

const Quality* find_quality(std::string_view preset) noexcept {
    const auto* const found = std::ranges::find(measured, preset, &Quality::preset);
    return found == measured.end() ? nullptr : found;
}

}  // namespace lowkv::cli
