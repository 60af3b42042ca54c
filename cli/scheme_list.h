#pragma once
// The presets as a list, and the words that schemes are spelled out with.

#include <string>
#include <string_view>

#include "lowkv/scheme.h"

namespace lowkv::cli {

// What quality is measured against.
inline constexpr std::string_view reference_scheme = "exact";

// Whether a list shows the preset: all of them, or those that one would use.
inline bool shown(const Preset& preset, bool all) { return all || preset.recommended; }
// "23 more presets, to compare with: add --all.", or nothing where all are shown.
std::string what_is_not_shown(bool all);

// What `lowkv schemes` says; with `all`, the grammar too.
std::string scheme_list(bool all);
// All presets with their codecs, bits and quality, and the grammar, for documents and programs.
std::string scheme_json();

}  // namespace lowkv::cli
