#include "cache/encode.h"

#include <algorithm>
#include <array>
#include <bit>
#include <bitset>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "cpu/host_rows.h"
#include "isa/table.h"
#include "lowkv/cache.h"
#include "lowkv/device.h"
#include "lowkv/quantizer.h"
#include "quantizers/sorted/sorted_part.h"

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
        const float* from = numbers.data() + std::size_t{t} * channels;
        std::fill(row.begin(), row.end(), 0.0f);
        for (std::uint32_t c = 0; c < channels; c += half) {
            float* sum = row.data() + c / head_dim * parts;
            for (std::uint32_t i = 0; i < half / parts; ++i) {
                for (std::uint32_t part = 0; part < parts; ++part) {
                    const float x = from[c + part * (half / parts) + i];
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

// Whose statistics a block takes over: a packed block's, or those of one that is packed with it, by
// number; its own number if it makes them.
struct Source {
    const std::byte* packed = nullptr;
    std::size_t leader = Encoding::none;
    friend bool operator==(const Source&, const Source&) = default;
};

// A block takes what the one before it has, unless that one made them for itself alone.
std::vector<Source> find_sources(const Device& device, const Plan& plan,
                                 std::span<Encoding> blocks) {
    constexpr std::size_t none = Encoding::none;
    std::vector<Source> sources(blocks.size());
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (blocks[i].anew)
            sources[i].leader = i;
        else
            sources[i].packed = blocks[i].stats_from;
    }
    const auto known = [&](std::size_t i) { return sources[i] != Source{}; };
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
            const Source source = before != none ? sources[before] : Source{};
            if (source != Source{} && (source.leader == none || blocks[source.leader].leads)) {
                sources[number] = source;
            } else {
                sources[number].leader = number;
                blocks[number].leads = is_varied(device, plan, blocks[number].exact);
            }
        }
    }
    return sources;
}

// ---- whether what a block took over fits it ----

// A block is judged by so many of its tokens, as many from each quarter.
constexpr std::uint32_t sampled = 16, quarters = 4, left_out = 2;
// It makes its own statistics if they would lose so many times less: half of the error in scores.
constexpr float limit = 4.0f;
// The squared error of codes of so many bits for N(0, 1).
constexpr float lost[] = {1.0f, 0.36f, 0.12f, 0.035f, 0.0095f, 0.0025f};

// Of a head's sampled rows, by channel: squares, less the mean's. Without the tokens farthest from
// the mean: such as those have what their codes miss beside.
void find_energies(const float* rows, std::size_t stride, std::size_t channels,
                   float* energy) noexcept {
    const float* row[sampled];
    for (std::uint32_t t = 0; t < sampled; ++t) row[t] = rows + t * stride;
    float mean[codec::max_sorted_dim];
    const auto find_mean = [&](std::uint32_t count) {
        std::fill_n(mean, channels, 0.0f);
        for (std::uint32_t t = 0; t < count; ++t)
            for (std::size_t c = 0; c < channels; ++c) mean[c] += row[t][c];
        for (std::size_t c = 0; c < channels; ++c) mean[c] /= static_cast<float>(count);
    };
    find_mean(sampled);
    std::pair<float, const float*> distances[sampled];
    for (std::uint32_t t = 0; t < sampled; ++t) {
        float sums[codec::sorted_group] = {};
        for (std::size_t c = 0; c < channels; c += codec::sorted_group)
            for (std::size_t i = 0; i < codec::sorted_group; ++i) {
                const float x = row[t][c + i] - mean[c + i];
                sums[i] += x * x;
            }
        distances[t] = {std::accumulate(sums, sums + codec::sorted_group, 0.0f), row[t]};
    }
    std::sort(distances, distances + sampled);
    for (std::uint32_t t = 0; t < sampled; ++t) row[t] = distances[t].second;
    find_mean(sampled - left_out);
    std::fill_n(energy, channels, 0.0f);
    for (std::uint32_t t = 0; t < sampled - left_out; ++t)
        for (std::size_t c = 0; c < channels; ++c)
            energy[c] += (row[t][c] - mean[c]) * (row[t][c] - mean[c]);
}

// The keys' energies in these blocks, by channel.
std::vector<float> energies(const Device& device, const Plan& plan,
                            std::span<const Encoding> blocks, std::span<const std::size_t> numbers,
                            Executor& executor) {
    const std::size_t channels = plan.shape().channels(), each = sampled * channels;
    const std::size_t bytes = element_bytes(plan.rows());
    std::vector<std::byte> rows(numbers.size() * each * bytes);
    std::vector<BlockRows<const std::byte>> from;
    for (std::size_t i = 0; i < numbers.size(); ++i)
        for (std::uint32_t q = 0; q < quarters; ++q)
            from.push_back({blocks[numbers[i]].exact, q * plan.block_tokens() / quarters,
                            sampled / quarters, i * each + q * each / quarters});
    device.read_rows(plan, Part::keys, from, {rows.data(), plan.shape().head_dim, channels},
                     executor);
    device.finish();
    const std::size_t heads = plan.shape().kv_heads;
    std::vector<float> found(numbers.size() * channels), values(numbers.size() * each);
    convert(plan.kernels(), plan.rows(), rows.data(), RowType::f32,
            reinterpret_cast<std::byte*>(values.data()), values.size());
    executor.parallel_for(numbers.size() * heads, [&](std::size_t item, unsigned) noexcept {
        const std::size_t i = item / heads, first = i * each + item % heads * (channels / heads);
        find_energies(values.data() + first, channels, channels / heads,
                      found.data() + item * (channels / heads));
    });
    return found;
}

// Whether statistics of its own would serve a head with these energies so much better.
bool misfits(const lowkv_sorted& sorted, const std::byte* section, const float* energy) noexcept {
    codec::SortedStatistics statistics;
    codec::read_statistics(sorted, section, statistics);
    const auto lost_in = [&](std::uint32_t g) { return lost[lowkv_sorted_bits(sorted.head, g)]; };
    float group[codec::max_sorted_groups] = {}, scale = 0, taken_over = 0, own = 0;
    // Of channels by exponent, which sorts them well enough.
    float sum[256] = {};
    std::uint32_t count[256] = {};
    for (std::uint32_t p = 0; p < sorted.head.head_dim; ++p) {
        const std::uint32_t c = statistics.order[p];
        const float damped = energy[c] / (statistics.factor[c] * statistics.factor[c]);
        const std::uint32_t exponent = std::bit_cast<std::uint32_t>(damped) >> 23;
        group[p / codec::sorted_group] += damped;
        sum[exponent] += damped;
        ++count[exponent];
    }
    const auto unit = [&](std::uint32_t g) { return statistics.unit[g] * statistics.unit[g]; };
    // A token's numbers are scaled until they are, on the whole, as large as units say.
    for (std::uint32_t g = 0; g < sorted.coded_groups; ++g)
        scale += group[g] / unit(g) / static_cast<float>(sorted.coded_groups);
    for (std::uint32_t g = 0; g < sorted.section.groups; ++g) {
        const float levels = g < sorted.coded_groups ? scale * unit(g) : 0.0f;
        taken_over += lost_in(g) * std::max(group[g], levels);
    }
    for (std::uint32_t e = 256, p = 0; e-- > 0;)
        for (std::uint32_t i = 0; i < count[e]; ++i, ++p)
            own += lost_in(p / codec::sorted_group) * sum[e] / static_cast<float>(count[e]);
    return taken_over > limit * own;
}

// Of these blocks, which take statistics over, those that they don't fit.
std::set<std::size_t> find_misfits(const Device& device, const Plan& plan,
                                   std::span<const Encoding> blocks,
                                   std::span<const Source> sources,
                                   std::span<const std::size_t> numbers, Executor& executor) {
    const lowkv_sorted* sorted = plan.keys().sorted_table();
    if (sorted == nullptr || numbers.empty()) return {};
    const std::vector<float> energy = energies(device, plan, blocks, numbers, executor);
    std::map<const std::byte*, std::vector<std::byte>> headers;  // by block: up to the last head's
    std::vector<const std::byte*> header_of;
    const std::uint32_t heads = plan.shape().kv_heads, head_dim = plan.shape().head_dim;
    for (const std::size_t i : numbers) {
        const Source& one = sources[i];
        const std::byte* from = one.packed != nullptr ? one.packed : blocks[one.leader].packed;
        const auto [header, is_new] = headers.try_emplace(from);
        if (is_new) {
            header->second.resize(plan.keys().section_offset(heads - 1) + sorted->section.largest);
            device.copy_out(header->second.data(), from, header->second.size());
        }
        header_of.push_back(header->second.data());
    }
    device.finish();
    std::vector<char> found(numbers.size() * heads);
    executor.parallel_for(found.size(), [&](std::size_t item, unsigned) noexcept {
        const auto head = static_cast<std::uint32_t>(item % heads);
        found[item] = misfits(*sorted, header_of[item / heads] + plan.keys().section_offset(head),
                              energy.data() + item * head_dim);
    });
    std::set<std::size_t> all;
    for (std::size_t item = 0; item < found.size(); ++item)
        if (found[item] != 0) all.insert(numbers[item / heads]);
    return all;
}

}  // namespace

void encode_blocks(Device& device, const Plan& plan, std::span<Encoding> blocks, Executor& executor,
                   std::optional<Part> only) {
    std::vector<QueryEnergy::Means> queries(blocks.size());
    std::vector<Source> sources(blocks.size());
    std::vector<std::size_t> left(blocks.size());
    std::iota(left.begin(), left.end(), std::size_t{0});
    std::set<std::size_t> misfits;
    // Mostly one round. A block that what it took over does not fit makes its own statistics in the
    // next, and those behind it take these over.
    if (plan.has_statistics()) sources = find_sources(device, plan, blocks);
    while (!left.empty()) {
        std::vector<BlockCopy> copies;
        std::vector<std::size_t> following;
        for (const bool follow : {false, true}) {
            for (const std::size_t i : left) {
                const Encoding& encoding = blocks[i];
                const std::size_t leader = sources[i].leader;
                const bool follows = leader != Encoding::none && leader != i;
                if (follows != follow) continue;
                const std::byte* stats_from = follows ? blocks[leader].packed : sources[i].packed;
                if (stats_from == nullptr && encoding.queries != nullptr && plan.wants_queries())
                    queries[i] = encoding.queries->means();
                if (stats_from != nullptr) following.push_back(i);
                copies.push_back({encoding.exact, encoding.packed, stats_from,
                                  queries[i] ? queries[i]->data() : nullptr});
            }
        }
        device.encode(plan, copies, executor, only);
        for (const std::size_t i : left) misfits.erase(i);
        misfits.merge(find_misfits(device, plan, blocks, sources, following, executor));
        left.clear();
        std::erase_if(misfits,
                      [&](std::size_t i) { return !is_varied(device, plan, blocks[i].exact); });
        if (misfits.empty()) break;
        blocks[*misfits.begin()].anew = true;
        const std::vector<Source> before =
            std::exchange(sources, find_sources(device, plan, blocks));
        for (std::size_t i = 0; i < blocks.size(); ++i)
            if (sources[i] != before[i]) left.push_back(i);
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (blocks[i].leads && blocks[i].queries != nullptr) blocks[i].queries->keep(queries[i]);
        if (blocks[i].leads) continue;
        for (std::uint32_t head = 0; head < plan.shape().kv_heads; ++head)
            device.copy_in(blocks[i].packed + plan.keys().section_offset(head), &mark, sizeof mark);
    }
}

}  // namespace lowkv::cache
