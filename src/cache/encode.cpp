#include "cache/encode.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/host_rows.h"
#include "isa/table.h"
#include "lowkv/cache.h"
#include "lowkv/device.h"
#include "lowkv/quantizer.h"

namespace lowkv::cache {
namespace {

// Statistics of one to four rows give two to four times the error in scores, 8 rows 26 % more, 16
// to 32 rows 10 to 30 % more, and 64 rows next to nothing. A block of ordinary text has 60 to 90.
constexpr std::size_t enough_rows = 48;
constexpr float tolerance = 0.03f;
constexpr std::uint32_t parts = 4;  // of a head

// Units are relative to the largest, which comes first: 1.0. The number below 1.0 marks a block
// that does not lead.
constexpr std::uint16_t mark = 0x3bff;

bool differ(const float* a, const float* b, std::size_t count) noexcept {
    for (std::size_t i = 0; i < count; ++i)
        if (std::fabs(a[i] - b[i]) > tolerance * std::max(a[i], b[i])) return true;
    return false;
}

}  // namespace

// RoPE turns pairs of channels, neighbours or half a head apart, and leaves the sum of a pair's
// squares as it is. A part of a head has whole pairs of either kind, so its sum of squares tells
// tokens apart whatever their positions are.
bool is_varied(const Device& device, const Plan& plan, const std::byte* exact) {
    const std::uint32_t tokens = plan.block_tokens(), head_dim = plan.shape().head_dim;
    const std::uint32_t channels = plan.shape().channels(), half = head_dim / 2;
    const RowType type = plan.rows();
    const std::size_t all = std::size_t{tokens} * channels;
    std::vector<std::byte> rows(element_bytes(type) * all);
    device.read_rows(plan, Part::keys, std::array{BlockRows<const std::byte>{exact, 0, tokens}},
                     {rows.data(), head_dim, channels}, serial_executor());
    device.finish();

    const std::size_t sums = std::size_t{plan.shape().kv_heads} * parts;
    std::vector<float> different;  // the sums of rows that differ from each other
    std::vector<float> row(sums), numbers(all);
    convert(plan.kernels(), type, rows.data(), RowType::f32,
            reinterpret_cast<std::byte*>(numbers.data()), all);
    for (std::uint32_t t = 0; t < tokens; ++t) {
        const float* its = numbers.data() + std::size_t{t} * channels;
        std::fill(row.begin(), row.end(), 0.0f);
        for (std::uint32_t c = 0; c < channels; c += half) {
            float* sum = row.data() + c / head_dim * parts;
            for (std::uint32_t i = 0; i < half / parts; ++i) {
                for (std::uint32_t part = 0; part < parts; ++part) {
                    const float x = its[c + part * (half / parts) + i];
                    sum[part] += x * x;
                }
            }
        }
        bool is_new = true;
        for (std::size_t at = 0; is_new && at < different.size(); at += sums)
            is_new = differ(row.data(), different.data() + at, sums);
        if (!is_new) continue;
        different.insert(different.end(), row.begin(), row.end());
        if (different.size() == enough_rows * sums) return true;
    }
    return false;
}

void mark_uniform(Device& device, const Plan& plan, std::byte* packed) noexcept {
    for (std::uint32_t head = 0; head < plan.shape().kv_heads; ++head)
        device.copy_in(packed + plan.keys().section_offset(head), &mark, sizeof mark);
}

bool leads(const Plan& plan, const std::byte* packed) noexcept {
    if (!plan.has_statistics()) return true;
    std::uint16_t first = 0;
    std::memcpy(&first, packed, sizeof first);
    return first != mark;
}

bool names_all_channels(const Plan& plan, const std::byte* packed) noexcept {
    const lowkv_sorted* sorted = plan.keys().sorted_table();
    const std::uint32_t head_dim = plan.shape().head_dim;
    for (std::uint32_t head = 0; sorted != nullptr && head < plan.shape().kv_heads; ++head) {
        const auto* order = reinterpret_cast<const std::uint8_t*>(
            packed + plan.keys().section_offset(head) + sorted->section.order);
        std::bitset<kernels::max_head_dim> named;
        for (std::uint32_t place = 0; place < head_dim; ++place)
            named.set(lowkv_sorted_channel(order, head_dim, place));
        if (named.count() != head_dim) return false;
    }
    return true;
}

namespace {

// For each block the one whose statistics it takes over, its own number if it makes them, or none
// if they come from a block that is packed. A block takes what the one before it has, unless that
// one made them for itself alone.
std::vector<std::size_t> find_leaders(const Device& device, const Plan& plan,
                                      std::span<Encoding> blocks) {
    constexpr std::size_t none = Encoding::none;
    std::vector<std::size_t> leaders(blocks.size(), none);
    const auto known = [&](std::size_t i) {
        return blocks[i].stats_from != nullptr || leaders[i] != none;
    };
    std::vector<std::size_t> chain;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        // Back to a block whose leader is known; a chain that closes is broken there.
        chain.assign(1, i);
        while (!known(chain.back())) {
            const std::size_t before = blocks[chain.back()].before;
            if (before == none || std::ranges::find(chain, before) != chain.end()) break;
            chain.push_back(before);
        }
        for (; !chain.empty(); chain.pop_back()) {
            const std::size_t number = chain.back();
            if (known(number)) continue;
            const std::size_t before = blocks[number].before;
            if (before != none && blocks[before].stats_from != nullptr) {
                blocks[number].stats_from = blocks[before].stats_from;
            } else if (before != none && leaders[before] != none && blocks[leaders[before]].leads) {
                leaders[number] = leaders[before];
            } else {
                leaders[number] = number;
                blocks[number].leads = is_varied(device, plan, blocks[number].exact);
            }
        }
    }
    return leaders;
}

}  // namespace

void encode_blocks(Device& device, const Plan& plan, std::span<Encoding> blocks, Executor& executor,
                   std::optional<Part> only) {
    std::vector<std::size_t> leaders(blocks.size(), Encoding::none);
    if (plan.has_statistics()) leaders = find_leaders(device, plan, blocks);
    std::vector<QueryEnergy::Means> queries(blocks.size());
    std::vector<BlockCopy> copies;
    for (const bool follow : {false, true}) {
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            const Encoding& its = blocks[i];
            const bool follows = leaders[i] != Encoding::none && leaders[i] != i;
            if (follows != follow) continue;
            const std::byte* stats_from = follows ? blocks[leaders[i]].packed : its.stats_from;
            if (stats_from == nullptr && its.queries != nullptr && plan.wants_queries())
                queries[i] = its.queries->means();
            copies.push_back(
                {its.exact, its.packed, stats_from, queries[i] ? queries[i]->data() : nullptr});
        }
    }
    device.encode(plan, copies, executor, only);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (!blocks[i].leads)
            mark_uniform(device, plan, blocks[i].packed);
        else if (blocks[i].queries != nullptr)
            blocks[i].queries->keep(queries[i]);
    }
}

}  // namespace lowkv::cache
