#include "scheme_quality.h"

#include <algorithm>
#include <array>

namespace lowkv::cli {

namespace {

constexpr std::array measured{
    // clang-format off: written by eval/quality.py
    // clang-format on
};

}  // namespace

const Quality* find_quality(std::string_view preset) noexcept {
    const auto* const found = std::ranges::find(measured, preset, &Quality::preset);
    return found == measured.end() ? nullptr : found;
}

}  // namespace lowkv::cli
