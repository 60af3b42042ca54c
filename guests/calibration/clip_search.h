#pragma once
// SKVQ's clips (its section 3.1, equation 3): the share of each group's range that leaves the
// smallest squared error in the attention output, of some. Ranges shrink about their centre.

#include <functional>
#include <vector>

#include "calibration/attention_output.h"
#include "lowkv/calibration.h"

namespace lowkv::calibration {

// 1.00, 0.95 ... 0.30: the best shares lie below 0.5 for some groups at 2 bits.
std::vector<float> clip_shares();

// `rows` are the keys as the codec sees them (before RoPE if its stage is pre), [rows][channels];
// `to_cached` then makes cached keys of them, null if they are. The groups of `part` are known
// and its clips are set: one after the other, the others as found so far, twice around.
void search_key_clips(const AttentionOutput& output, const Codec& codec,
                      std::span<const float> rows,
                      const std::function<void(std::span<float>)>& to_cached,
                      PartCalibration& part);

// Values enter the output linearly, so that each group has its own error.
void search_value_clips(const AttentionOutput& output, const Codec& codec, PartCalibration& part);

}  // namespace lowkv::calibration
