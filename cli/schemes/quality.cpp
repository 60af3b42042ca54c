#include "common/options.h"

#include <algorithm>
#include <array>

namespace lowkv::cli {

namespace {

constexpr std::array measured{
    // clang-format off: written by eval/quality.py
    Quality{"lowkv1.5", "0.017", "+1.5 %"},
    Quality{"lowkv2", "0.0038", "-0.1 %"},
    Quality{"lowkv2.8", "0.0019", "+0.1 %"},
    Quality{"lowkv3", "0.00093", "-0.1 %"},
    Quality{"lowkv4", "0.00038", "+0.1 %"},
    Quality{"kivi2", "0.068", "+5.8 %"},
    Quality{"kivi4", "0.00088", "-0.1 %"},
    Quality{"turboquant2", "0.061", "+5.2 %"},
    Quality{"turboquant3", "0.0092", "+1.0 %"},
    Quality{"turboquant4", "0.0020", "+0.1 %"},
    Quality{"turboquant2-qr", "0.056", "+4.8 %"},
    Quality{"turboquant3-qr", "0.011", "+0.7 %"},
    Quality{"turboquant4-qr", "0.0021", "+0.2 %"},
    Quality{"int4", "0.0035", "0.0 %"},
    Quality{"int4h", "0.0020", "+0.3 %"},
    Quality{"int8", "0.0000053", "0.0 %"},
    Quality{"skvq-k4v4", "0.0046", "+0.6 %"},
    Quality{"skvq-k2v2", "0.25", "+31.0 %"},
    Quality{"skvq-k2v1.5", "0.29", "+37.5 %"},
    Quality{"kvquant4", "0.011", "+0.6 %"},
    Quality{"kvquant3", "0.049", "+4.7 %"},
    Quality{"kvquant2", "0.34", "+41.6 %"},
    Quality{"kvquant4-1%", "0.0067", "+0.7 %"},
    Quality{"kvquant3-1%", "0.027", "+2.5 %"},
    Quality{"kvquant2-1%", "0.13", "+13.1 %"},
    // clang-format on
};

}  // namespace

const Quality* find_quality(std::string_view preset) noexcept {
    const auto* const found = std::ranges::find(measured, preset, &Quality::preset);
    return found == measured.end() ? nullptr : found;
}

}  // namespace lowkv::cli
