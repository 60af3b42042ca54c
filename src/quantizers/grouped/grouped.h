#pragma once
// Codes in groups that share a scale, and mostly a zero: two encoders for one layout
// (codes_part.h) and one set of kernels.
//
//   uniform.cpp   even steps over each group's range, of keys and values as they come (KIVI, int)
//   by_token.cpp  a token's head is rotated and centred first; even, normal or trellis levels
//                 (lowkv's values, TurboQuant)

#include <memory>

#include "quantizers/codes_part.h"

namespace lowkv::codec {

std::shared_ptr<const PackedPart> make_uniform(const Codec& codec, const PartShape& shape,
                                               const PartInputs& inputs);
std::shared_ptr<const PackedPart> make_by_token(const Codec& codec, const PartShape& shape,
                                                const PartInputs& inputs);

}  // namespace lowkv::codec
