#include "unit_codes.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "lowkv/error.h"
#include "lowkv/serial.h"

namespace lowkv::ggml {
namespace {

constexpr std::array<char, 8> magic{'L', '~', 'O', '~', 'W', '~', 'K', '~'};

// What codes begin with, as bytes in memory.
struct Header {
    std::array<char, 8> magic;
    std::uint64_t checksum;
    std::uint32_t version, layer, parts, rows;
    std::uint64_t inputs, bytes;
};
constexpr std::size_t checked_from = offsetof(Header, version);
static_assert(sizeof(Header) == 48 && checked_from == 16);

}  // namespace

std::vector<std::byte> write_codes(const UnitCodes& unit) {
    const std::uint32_t parts = (unit.keys ? 1u : 0u) | (unit.values ? 2u : 0u);
    Header header{magic, 0,         image_version, unit.layer,
                  parts, unit.rows, unit.inputs,   unit.codes.size()};
    std::vector<std::byte> bytes(sizeof header + unit.codes.size());
    std::memcpy(bytes.data() + sizeof header, unit.codes.data(), unit.codes.size());
    std::memcpy(bytes.data(), &header, sizeof header);
    header.checksum = image_checksum(std::span(bytes).subspan(checked_from));
    std::memcpy(bytes.data(), &header, sizeof header);
    return bytes;
}

// No row of finite numbers has two of the NaNs, so a damaged beginning is still one.
bool begins_codes(std::span<const std::byte> row) noexcept {
    if (row.size() < magic.size()) return false;
    int equal = 0;
    for (std::size_t i = 0; i < magic.size(); ++i)
        equal += row[i] == static_cast<std::byte>(magic[i]) ? 1 : 0;
    return equal >= 6;
}

void write_bad_row(std::span<std::byte> row) noexcept {
    std::ranges::fill(row, std::byte{0});
    std::memcpy(row.data(), magic.data(), std::min(row.size(), magic.size()));
}

std::size_t codes_length(std::span<const std::byte> row) noexcept {
    Header header{};
    if (row.size() >= sizeof header) std::memcpy(&header, row.data(), sizeof header);
    return header.bytes < SIZE_MAX - sizeof header ? sizeof header + header.bytes : SIZE_MAX;
}

UnitCodes read_codes(std::span<const std::byte> rows) {
    Header header{};
    if (rows.size() >= sizeof header) std::memcpy(&header, rows.data(), sizeof header);
    if (header.magic == magic && header.version != image_version)
        throw Error(ErrorCode::invalid_image, "its codes are of version ", header.version,
                    "; this lowkv reads version ", image_version);
    const std::span<const std::byte> behind = rows.subspan(std::min(rows.size(), sizeof header));
    if (header.magic != magic || header.bytes > behind.size() ||
        image_checksum(rows.first(sizeof header + header.bytes).subspan(checked_from)) !=
            header.checksum)
        throw Error(ErrorCode::invalid_image, "its codes are damaged");
    const std::span<const std::byte> codes = behind.first(header.bytes);
    return {header.layer, (header.parts & 1) != 0, (header.parts & 2) != 0,
            header.rows,  header.inputs,           {codes.begin(), codes.end()}};
}

}  // namespace lowkv::ggml
