#pragma once
// Schemes as commands read and list them.

#include <string>
#include <string_view>
#include <vector>

#include "lowkv/scheme.h"

namespace lowkv::cli {

// What quality is measured against.
inline constexpr std::string_view reference_scheme = "exact";

std::string chosen_scheme();  // LOWKV_SCHEME, else the default

// Checks schemes from a list that commas separate, where + stands for the comma within a scheme.
void read_schemes(std::vector<std::string>& schemes);

// Whether a list shows the preset: all of them, or those that one would use.
inline bool shown(const Preset& preset, bool all) { return all || preset.recommended; }
// "23 more presets, to compare with: add --all.", or nothing where all are shown.
std::string what_is_not_shown(bool all);

}  // namespace lowkv::cli
