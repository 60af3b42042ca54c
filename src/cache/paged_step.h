#pragma once
// What the sources of a PagedLayer share: how they refuse, and what a step keeps between finding
// its pages and packing them.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "lowkv/error.h"
#include "lowkv/paged.h"

namespace lowkv {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... message) {
    throw Error(ErrorCode::invalid_argument, message...);
}

struct PagedLayer::Step {
    // Of one sequence: pages[first_page] is the first that its queries see.
    struct Part {
        std::size_t first_page = 0, first_view = 0;
        std::uint32_t first_cell = 0;        // that its queries see
        std::optional<std::uint32_t> sinks;  // their page, if it is only packed
    };
    std::vector<Part> parts;  // by sequence, as all that follows
    std::vector<BlockView> views;
    std::map<std::uint32_t, std::vector<BlockView>> sinks;  // by page
    std::vector<AttentionPiece> pieces;
    std::vector<PiecewiseAttention> attended;
};

}  // namespace lowkv
