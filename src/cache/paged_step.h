#pragma once
// What a step of a PagedLayer keeps between finding its pages and packing them.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowkv/paged.h"

namespace lowkv {

struct PagedLayer::Step {
    // Of one sequence: pages[first_page] is the first that its queries see.
    struct Part {
        std::size_t first_page = 0, first_view = 0;
        std::uint32_t first_cell = 0;   // that its queries see
        const Beside* sinks = nullptr;  // attended to apart, because their page is only packed
    };
    std::vector<Part> parts;  // by sequence, as all that follows
    std::vector<BlockView> views;
    std::vector<SequenceAttention> attended;
};

}  // namespace lowkv
