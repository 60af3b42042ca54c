#pragma once
// Scales and zeros of one head's section: rounded to their storage type, written and read.
//
// E4M3 spans 2^-9 .. 448 only, so each section carries two powers of two, one for its scales and
// one for its zeros; a stored byte means e4m3 * multiplier. E5M3 needs none, and has no sign: norms
// only.

#include <cstddef>

#include "quantizers/codes_part.h"

namespace lowkv::codec {

// Group r * row_entries + e is entry e of metadata row r (codes_part.h). x^ = code * scale + zero;
// normal levels: write_metadata() takes the unit of the levels as the scale, and x^ =
// layout.levels[code] * scale + zero afterwards.
struct Groups {
    float scale[max_groups];
    float zero[max_groups];
};

constexpr std::size_t metadata_bytes(Metadata type) noexcept {
    return type == Metadata::fp16 ? 2 : 1;
}

// Stores the groups and leaves in them what a reader will get. A scale above 0 stays above 0.
void write_metadata(const CodesPart& layout, std::byte* section, Groups& groups) noexcept;
void read_metadata(const CodesPart& layout, const std::byte* section, Groups& groups) noexcept;

}  // namespace lowkv::codec
