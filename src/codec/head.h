#pragma once
// One head of an exact part, seen as the matrix that src/kernels/units.h packs: `steps` rows of
// `lanes` contiguous f16. Keys: a row is a channel, a lane a token. Values: the other way round.

#include <cstddef>
#include <cstdint>

#include "lowkv/codec.h"

namespace lowkv::codec {

enum class Part : std::uint8_t { keys, values };

inline constexpr std::uint32_t max_lanes = 576;    // a head_dim, or the 128 tokens of a block
inline constexpr std::uint32_t max_groups = 4096;  // of a section: 128 tokens x 32 groups of a row

struct HeadShape {
    std::uint32_t steps = 0, lanes = 0;
    std::size_t row_stride = 0;       // elements from one step to the next
    std::size_t offset = 0;           // elements from the part's start to the head's first
    bool groups_along_lanes = false;  // one group is `group` lanes of a step; else steps of a lane
};

inline const PartLayout& layout_of(const Plan& plan, Part part) noexcept {
    return part == Part::keys ? plan.keys() : plan.values();
}

inline HeadShape head_shape(const Plan& plan, Part part, std::uint32_t head) noexcept {
    const std::uint32_t head_dim = plan.shape().head_dim;
    const std::uint32_t tokens = plan.block_tokens();
    const bool by_channel = layout_of(plan, part).codec.axis == Axis::channel;
    const std::size_t first_channel = std::size_t{head} * head_dim;
    if (part == Part::keys) return {head_dim, tokens, tokens, first_channel * tokens, by_channel};
    return {tokens, head_dim, plan.shape().channels(), first_channel, !by_channel};
}

// A head's section of a packed part.
inline std::size_t section_offset(const PartLayout& layout, std::uint32_t head) noexcept {
    return layout.row_bytes + head * layout.head_bytes;
}

// Where part `part` starts in an exact and in a packed block.
inline std::size_t exact_offset(const Plan& plan, Part part) noexcept {
    return part == Part::keys ? 0 : plan.exact_part_bytes();
}
inline std::size_t packed_offset(const Plan& plan, Part part) noexcept {
    return part == Part::keys ? 0 : plan.keys().bytes;
}

}  // namespace lowkv::codec
