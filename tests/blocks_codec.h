#pragma once
// What the codec makes of a block's rows, for the model of blocks.

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "batch_common.h"
#include "cache/encode.h"
#include "lowkv/device.h"

namespace blocks_test {

using batch_test::Buffer;
using batch_test::Rng;
using batch_test::Row;
using namespace lowkv;

struct Token {
    Row key, value;  // empty: not written; it is read as zeros
    friend bool operator==(const Token&, const Token&) = default;
};
using Tokens = std::vector<Token>;
using Bytes = std::vector<std::byte>;
using Plans = std::vector<std::shared_ptr<const Plan>>;

// Rows of the newest tokens as a buffer has them, and back.
inline void put(Buffer& keys, Buffer& values, std::size_t sequence, std::span<const Token> tokens) {
    for (std::size_t t = 0; t < tokens.size(); ++t) {
        if (!tokens[t].key.empty()) keys.set(sequence, t, tokens[t].key);
        if (!tokens[t].value.empty()) values.set(sequence, t, tokens[t].value);
    }
}

// What a block's statistics are, and whether others may take them over.
struct Statistics {
    Bytes from;  // a packed block that has them; empty: none
    bool leads = false;
};

// Missing rows are zeros. It takes statistics over; without any, or where they don't lead or don't
// fit, it makes its own, and they become those. (Codes of rows that were decoded keep those that
// they had, with their mark, whatever the block does for others.)
inline Bytes encoded(const Plan& plan, std::span<const Token> tokens, Statistics& statistics) {
    Device& device = *cpu_device();
    const auto count = static_cast<std::uint32_t>(tokens.size());
    const std::uint32_t channels = plan.shape().channels(), head_dim = plan.shape().head_dim;
    const DeviceMemory exact(device, plan.exact_bytes()), packed(device, plan.packed_bytes()),
        before(device, plan.packed_bytes());
    Row rows[2];
    for (const Token& token : tokens)
        for (const int part : {0, 1}) {
            const Row& row = part == 0 ? token.key : token.value;
            rows[part].insert(rows[part].end(), row.begin(), row.end());
            if (row.empty()) rows[part].resize(rows[part].size() + channels);
        }
    const std::array to{BlockRows<std::byte>{exact.data(), 0, count}};
    device.write_rows(plan, Part::keys, to, {rows[0].data(), RowType::f32, head_dim, channels},
                      serial_executor());
    device.write_rows(plan, Part::values, to, {rows[1].data(), RowType::f32, head_dim, channels},
                      serial_executor());
    const bool follows = !statistics.from.empty() && statistics.leads;
    if (follows) std::ranges::copy(statistics.from, before.data());
    cache::Encoding its{.exact = exact.data(), .packed = packed.data()};
    if (follows) its.stats_from = before.data();
    cache::encode_blocks(device, plan, std::span(&its, 1), serial_executor());
    Bytes bytes{packed.data(), packed.data() + plan.packed_bytes()};
    if (!follows || its.anew) statistics = {bytes, its.leads};
    return bytes;
}

inline Tokens decoded(const Plan& plan, const Bytes& bytes) {
    Device& device = *cpu_device();
    const DeviceMemory exact(device, plan.exact_bytes()), packed(device, plan.packed_bytes());
    std::ranges::copy(bytes, packed.data());
    const BlockCopy copy{packed.data(), exact.data()};
    device.decode(plan, std::span(&copy, 1), serial_executor());
    Buffer keys(plan.rows(), plan.shape(), 1, plan.block_tokens()), values = keys;
    const std::array from{BlockRows<const std::byte>{exact.data(), 0, plan.block_tokens()}};
    for (Buffer* its : {&keys, &values})
        device.read_rows(plan, its == &keys ? Part::keys : Part::values, from,
                         {its->out().data, its->strides().head, its->strides().token},
                         serial_executor());
    Tokens tokens;
    for (std::uint32_t t = 0; t < plan.block_tokens(); ++t)
        tokens.push_back({keys.get(0, t), values.get(0, t)});
    return tokens;
}

}  // namespace blocks_test
