// Restored states: packed as they arrive, to the same bytes as if all rows had come first.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "buffer.h"
#include "ggml_cache.h"

namespace {

using namespace lowkv::test;

constexpr std::uint32_t cells = 1024;
constexpr const char* schemes[] = {
    "lowkv2.8",    "lowkv1.5", "lowkv4", "kivi2",        "kvarn3",
    "turboquant3", "int8",     "int4h",  "kivi2,rows=8", "lowkv3,layer.1=exact"};

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
void request(Cache& cache, const Cells& where, Random& random) {
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
State save(const Cache& cache, const Cells& where) {
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
void set(const Cache& cache, const State& state, const Cells& where, std::size_t tensor,
         std::size_t rows) {
    for (std::size_t i = 0; i < rows; ++i)
        ggml_backend_tensor_set(cache.tensors()[tensor], state[tensor].data() + i * row_bytes,
                                where[i] * row_bytes, row_bytes);
}

// In llama.cpp's order, up to a tensor.
void restore(const Cache& cache, const State& state, const Cells& where,
             std::size_t tensors = SIZE_MAX) {
    for (std::size_t i = 0; i < std::min(tensors, state.size()); ++i)
        set(cache, state, where, i, where.size());
}

// The keys that tell the plug-in of a restore come last: nothing is packed before all is there.
void restore_at_once(const Cache& cache, const State& state, const Cells& where) {
    for (std::size_t i = 1; i < state.size(); ++i) set(cache, state, where, i, where.size());
    set(cache, state, where, 0, where.size());
}

// All packed blocks of a layer as they lie; empty ones are absent or exact.
std::vector<Bytes> packed_bytes(const Cache& cache, std::size_t layer) {
    const lowkv::ggml::LayerCache& its = *lowkv::ggml::cache_tensor(cache.keys(layer))->layer;
    const lowkv::Sequence& packed = its.stream(0).packed.back();
    std::vector<Bytes> blocks(packed.blocks());
    for (std::uint32_t b = 0; b < packed.blocks(); ++b) {
        if (!packed.packed(b)) continue;
        CHECK(packed.full(b));
        blocks[b].assign(packed.view(b).keys, packed.view(b).keys + its.plan().packed_bytes());
    }
    return blocks;
}

// Without the two lowest bits of each number: marks stand there (row_mark.h).
State unmarked(State state) {
    for (Bytes& bytes : state)
        for (std::size_t i = 0; i < bytes.size(); i += sizeof(ggml_fp16_t))
            bytes[i] &= std::byte{0xFC};
    return state;
}

Cells scattered(std::uint32_t first, std::uint32_t count, bool ordered, Random& random) {
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

}  // namespace

TEST_CASE("a state that is packed as it arrives has the bytes of one that is packed at once") {
    Random random(23);
    for (unsigned number = 0; number < 30; ++number) {
        Trial trial(random, number);
        CAPTURE(trial.scheme);
        CAPTURE(number);
        const bool damaged = number % 3 == 2;
        for (unsigned i = 0; damaged && i < 40; ++i) {
            const auto count = static_cast<std::uint32_t>(trial.state.size());
            Bytes& bytes = trial.state[random.below(count)];
            bytes[random.below(static_cast<std::uint32_t>(bytes.size()))] ^= std::byte{4};
            Bytes& marked = trial.state[0];
            marked[random.below(static_cast<std::uint32_t>(marked.size()))] ^= std::byte{1};
        }
        Cache arriving = trial.cache(), whole = trial.cache();
        restore(arriving, trial.state, trial.where);
        restore_at_once(whole, trial.state, trial.where);
        const Cells all = range(0, cells);
        CHECK(save(arriving, all) == save(whole, all));
        bool any = false;
        for (std::size_t layer = 0; layer < static_cast<std::size_t>(trial.layer_count); ++layer) {
            const std::vector<Bytes> blocks = packed_bytes(arriving, layer);
            CHECK(blocks == packed_bytes(whole, layer));
            for (const Bytes& block : blocks) any = any || !block.empty();
        }
        CHECK((any || damaged));
        Cells next = scattered(0, cells, true, random);
        std::erase_if(next, [&](std::uint32_t cell) {
            return std::ranges::find(trial.where, cell) != trial.where.end() ||
                   std::ranges::find(trial.other, cell) != trial.other.end();
        });
        next.resize(3);
        REQUIRE(arriving.step(next, trial.where) == fine);
        REQUIRE(whole.step(next, trial.where) == fine);
        CHECK(arriving.result() == whole.result());
    }
}

TEST_CASE("a state that ends early costs nobody a row, and may come again") {
    Random random(29);
    for (unsigned number = 0; number < 30; ++number) {
        const Trial trial(random, number);
        CAPTURE(trial.scheme);
        CAPTURE(number);
        Cache cache = trial.cache(), never = trial.cache();
        const State before = save(cache, trial.other);
        for (unsigned times = 1 + random.below(3); times > 0; --times) {
            const auto count = static_cast<std::uint32_t>(trial.state.size());
            const std::size_t tensors = random.below(count);
            restore(cache, trial.state, trial.where, tensors);
            set(cache, trial.state, trial.where, tensors,
                random.below(static_cast<std::uint32_t>(trial.where.size())));
            if (random.below(2) == 0) CHECK(unmarked(save(cache, trial.other)) == unmarked(before));
        }
        restore(cache, trial.state, trial.where);
        restore(never, trial.state, trial.where);
        CHECK(unmarked(save(cache, trial.other)) == unmarked(before));
        CHECK(unmarked(save(cache, trial.where)) == unmarked(save(never, trial.where)));
    }
}

TEST_CASE("a restore needs the packed state and the rows of two layers") {
    for (const std::string scheme : {"lowkv2.8", "kivi2", "turboquant3", "kivi4"}) {
        CAPTURE(scheme);
        constexpr std::uint32_t many = 4096;
        constexpr int layer_count = 8;
        const std::string text = scheme + ",window=32,sinks=0";
        State state;
        const Cells where = range(0, many);
        {
            Cache source(text, many, 1, layer_count);
            for (std::uint32_t t = 0; t < many; t += 512)
                REQUIRE(source.step(range(t, t + 512), range(t > 64 ? t - 64 : 0, t)) == fine);
            state = save(source, where);
        }
        Cache cache(text, many, 1, layer_count);
        cache.ask();
        for (std::size_t i = 0; i < state.size(); ++i)
            ggml_backend_tensor_set(cache.tensors()[i], state[i].data(), 0, state[i].size());
        rows_of(cache.keys(0), 0, 1);
        const lowkv::ggml::CacheStats stats = lowkv::ggml::stats();
        CHECK(stats.cells_packed > many / 2);
        const std::size_t layer_rows = 2 * many * row_bytes;
        MESSAGE(text, ": packed ", stats.packed_bytes, ", exact ", stats.exact_bytes, ", peak ",
                stats.peak_bytes, ", a layer's rows ", layer_rows);
        CHECK(stats.peak_bytes <= stats.packed_bytes + 2 * layer_rows);
    }
}
