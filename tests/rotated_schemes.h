#pragma once
// Schemes whose tokens are changed first (by_token.cpp), by their words: presets change, the laws
// of a quantizer do not.

namespace lowkv::test {

inline constexpr const char* rotated_1_5 =
    "k=token-1.5-head-normal-hadamard-mean,v=token-1.5-head-normal-hadamard-unbiased";
inline constexpr const char* rotated_2 =
    "k=token-2-head-normal-hadamard-mean,v=token-2-head-normal-hadamard-unbiased";
inline constexpr const char* rotated_2_8 =
    "k=token-3-head-normal-hadamard-mean,v=token-2-head-normal-hadamard-unbiased";
inline constexpr const char* rotated_3 =
    "k=token-3-head-normal-hadamard-mean,v=token-3-head-normal-hadamard-unbiased";
inline constexpr const char* rotated_4 =
    "k=token-4-head-normal-hadamard-mean,v=token-4-head-normal-hadamard-unbiased";

}  // namespace lowkv::test
