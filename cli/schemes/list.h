#pragma once
// The presets as a list, and the words that schemes are spelled out with.

#include <string>

namespace lowkv::cli {

// What `lowkv schemes` says; with `all`, the grammar too.
std::string scheme_list(bool all);
// All presets with their codecs, bits and quality, and the grammar, for documents and programs.
std::string scheme_json();

}  // namespace lowkv::cli
