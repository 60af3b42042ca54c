#pragma once
// States as llama.cpp saves and restores them, of caches with random requests.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "buffer.h"
#include "ggml_cache.h"
#include "row_mark.h"

namespace lowkv::test {

inline constexpr std::uint32_t cells = 1024;
inline constexpr const char* schemes[] = {
    "lowkv2.8",    "lowkv1.5", "lowkv4", "kivi2",
    "turboquant3", "int8",     "int4h",  "lowkv3,layer.1=exact"};

class Random {
  public:
    explicit Random(unsigned seed) : generator_(seed) {}
    std::uint32_t below(std::uint32_t most) {
        return static_cast<std::uint32_t>(generator_()) % most;
    }

  private:
    std::mt19937 generator_;
};

// A request of two batches, so that layers know their readers, and some more tokens.
inline void request(Cache& cache, const Cells& where, Random& random) {
    Cells before;
    while (before.size() < where.size()) {
        const std::size_t first = before.size();
        const std::size_t count = std::min<std::size_t>(
            first == 0 ? where.size() / 2 : 1 + random.below(200), where.size() - first);
        const auto at = where.begin() + static_cast<std::ptrdiff_t>(first);
        const Cells batch(at, at + static_cast<std::ptrdiff_t>(count));
        REQUIRE(cache.step(batch, before) == fine);
        before.insert(before.end(), batch.begin(), batch.end());
    }
}

// A sequence's rows, one after the other, as llama.cpp saves them.
using State = std::vector<Bytes>;
inline State save(const Cache& cache, const Cells& where) {
    State state;
    for (const ggml_tensor* tensor : cache.tensors()) {
        Bytes& rows = state.emplace_back();
        for (const std::uint32_t cell : where) {
            const Bytes row = rows_of(tensor, cell, 1);
            rows.insert(rows.end(), row.begin(), row.end());
        }
    }
    return state;
}

// The first `rows` rows of a tensor.
inline void set(const Cache& cache, const State& state, const Cells& where, std::size_t tensor,
                std::size_t rows) {
    for (std::size_t i = 0; i < rows; ++i)
        ggml_backend_tensor_set(cache.tensors()[tensor], state[tensor].data() + i * row_bytes,
                                where[i] * row_bytes, row_bytes);
}

// In llama.cpp's order, up to a tensor.
inline void restore(const Cache& cache, const State& state, const Cells& where,
                    std::size_t tensors = SIZE_MAX) {
    for (std::size_t i = 0; i < std::min(tensors, state.size()); ++i)
        set(cache, state, where, i, where.size());
}

// The keys that tell the plug-in of a restore come last: nothing is packed before all is there.
inline void restore_at_once(const Cache& cache, const State& state, const Cells& where) {
    for (std::size_t i = 1; i < state.size(); ++i) set(cache, state, where, i, where.size());
    set(cache, state, where, 0, where.size());
}

// All packed blocks of a layer as they lie; empty ones are absent or exact.
inline std::vector<Bytes> packed_bytes(const Cache& cache, std::size_t layer) {
    const lowkv::ggml::LayerCache& its = *lowkv::ggml::cache_tensor(cache.keys(layer))->layer;
    const lowkv::Blocks& packed = its.stream(0).packed;
    std::vector<Bytes> blocks(packed.slots());
    for (std::uint32_t b = 0; b < packed.slots(); ++b) {
        if (!packed.packed(b)) continue;
        CHECK(packed.full(b));
        blocks[b].assign(packed.view(b).keys, packed.view(b).keys + its.plan().packed_bytes());
    }
    return blocks;
}

// Without the two lowest bits of each number: marks stand there (row_mark.h).
inline State unmarked(State state) {
    for (Bytes& bytes : state)
        for (std::size_t i = 0; i < bytes.size(); i += sizeof(ggml_fp16_t))
            bytes[i] &= std::byte{0xFC};
    return state;
}

// The same marks as versions before the checks over rows wrote them.
inline void mark_as_before(Bytes& rows) {
    const auto mix = [](std::uint64_t hash, std::uint64_t value) {
        for (int i = 0; i < 8; ++i, value >>= 8) hash = (hash ^ (value & 0xFF)) * 0x100000001B3u;
        return hash;
    };
    std::vector<std::uint16_t> row(channels);
    for (std::size_t at = 0; at < rows.size(); at += row_bytes) {
        std::memcpy(row.data(), rows.data() + at, row_bytes);
        const auto found = lowkv::ggml::read_stamp(row);
        REQUIRE(found.has_value());
        const lowkv::ggml::RowMark& mark = found->mark;
        const std::uint64_t low =
            mark.rank | std::uint64_t{mark.group} << 24 | std::uint64_t{found->scheme} << 44;
        const std::uint32_t kind = mark.coded    ? 0x636F6465u
                                   : mark.packed ? 0x6C6F776Bu
                                                 : 0x76303031u;
        const auto check =
            static_cast<std::uint32_t>(mix(mix(0xCBF29CE484222325u, low), kind) >> 33);
        const std::array<std::uint32_t, 3> words{static_cast<std::uint32_t>(low),
                                                 static_cast<std::uint32_t>(low >> 32),
                                                 (mark.packed ? 1u : 0u) | check << 1};
        for (std::size_t i = 0; i < 96; ++i)
            row[i] = static_cast<std::uint16_t>((row[i] & ~1u) | (words[i / 32] >> (i % 32) & 1u));
        const auto before = lowkv::ggml::read_stamp(row);
        REQUIRE(before.has_value());
        CHECK(before->mark == mark);
        CHECK(before->tie == lowkv::ggml::no_tie);
        std::memcpy(rows.data() + at, row.data(), row_bytes);
    }
}

inline Cells scattered(std::uint32_t first, std::uint32_t count, bool ordered, Random& random) {
    Cells all = range(first, cells);
    if (ordered) {
        all.resize(count);
        return all;
    }
    // Runs of cells in any order.
    Cells some;
    while (some.size() < count) {
        const std::size_t at = random.below(static_cast<std::uint32_t>(all.size()));
        const std::size_t run =
            std::min<std::size_t>({1 + random.below(90), all.size() - at, count - some.size()});
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(at);
        some.insert(some.end(), begin, begin + static_cast<std::ptrdiff_t>(run));
        all.erase(begin, begin + static_cast<std::ptrdiff_t>(run));
    }
    return some;
}

// What the caches made meanwhile put into states.
class StatesAre {
  public:
    explicit StatesAre(const char* what) { setenv("LOWKV_STATES", what, 1); }
    ~StatesAre() { setenv("LOWKV_STATES", "f16", 1); }
    StatesAre(const StatesAre&) = delete;
    StatesAre& operator=(const StatesAre&) = delete;
};

struct Trial {
    std::string scheme;
    int layer_count = 0;
    Cells other, where;  // of another sequence in the cache, and of the restored one
    State state;

    Trial(Random& random, unsigned number) {
        scheme = std::string(schemes[number % std::size(schemes)]) +
                 ",window=" + std::to_string(random.below(3) * 40) +
                 ",sinks=" + std::to_string(random.below(5));
        layer_count = 3 + static_cast<int>(random.below(4));
        const std::uint32_t tokens = 340 + random.below(300);
        other = range(0, random.below(2) * (20 + random.below(300)));
        where = scattered(static_cast<std::uint32_t>(other.size()), tokens, random.below(2) == 0,
                          random);
        Cache source(scheme, cells, 1, layer_count);
        const Cells from = range(0, tokens);
        request(source, from, random);
        state = save(source, from);
    }
    // With the other sequence in it.
    Cache cache() const {
        Cache made(scheme, cells, 1, layer_count);
        made.ask();
        Random random(5);
        if (!other.empty()) request(made, other, random);
        return made;
    }
};

}  // namespace lowkv::test
