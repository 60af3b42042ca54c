#pragma once
// The logical order of codes (docs/methods.md, "Codes in bytes"): little end first, codes one after
// another. 2 bits: c0 | c1<<2 | c2<<4 | c3<<6. 4 bits: c0 | c1<<4. 3 bits: 8 codes in 3 bytes.
// Blocks store units (src/kernels/units.h), a permutation of this; interchange and tests speak this
// one.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lowkv::codec {

inline std::vector<std::uint8_t> pack_logical(std::span<const std::uint8_t> codes, unsigned bits) {
    std::vector<std::uint8_t> bytes((codes.size() * bits + 7) / 8);
    for (std::size_t i = 0; i < codes.size() * bits; ++i) {
        const unsigned bit = (codes[i / bits] >> (i % bits)) & 1u;
        bytes[i / 8] = static_cast<std::uint8_t>(bytes[i / 8] | bit << (i % 8));
    }
    return bytes;
}

inline std::vector<std::uint8_t> unpack_logical(std::span<const std::uint8_t> bytes, unsigned bits,
                                                std::size_t count) {
    std::vector<std::uint8_t> codes(count);
    for (std::size_t i = 0; i < count * bits; ++i) {
        const unsigned bit = (bytes[i / 8] >> (i % 8)) & 1u;
        codes[i / bits] = static_cast<std::uint8_t>(codes[i / bits] | bit << (i % bits));
    }
    return codes;
}

}  // namespace lowkv::codec
