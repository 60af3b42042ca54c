#pragma once
// Numbers with units, as `lowkv plan` reads them. k, M, G, T are decimal (1,000 ...), Ki, Mi, Gi,
// Ti binary (1,024 ...). What can't be read throws UsageError, which names the option.

#include <cstdint>
#include <string>

namespace lowkv::cli {

double read_size(const std::string& option, const std::string& text);           // "80GB", bytes
double read_bandwidth(const std::string& option, const std::string& text);      // bytes/s
std::uint64_t read_tokens(const std::string& option, const std::string& text);  // "128k"

}  // namespace lowkv::cli
