// Accesses to cache tensors that ggml takes for infallible, run out of memory: what the caller
// gets, and which graphs fail afterwards. A scheme for layers that the model lacks fails every
// graph.

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "../shortage.h"
#include "ggml_cache.h"

namespace {

using namespace lowkv::test;

constexpr std::uint32_t cells = 512, many_cells = 4096;
constexpr const char* scheme = "kivi2,window=32,sinks=0";
constexpr Shortage::Kind kinds[] = {Shortage::Kind::single, Shortage::Kind::lasting};

struct Read {
    Bytes bytes;
    bool felt = false;  // the shortage
};

Read read(const ggml_tensor* tensor, const Cells& where, Shortage::Kind kind, std::size_t number) {
    Read result{.bytes = Bytes(where.size() * row_bytes, std::byte{0xAA})};
    const Shortage shortage(kind, number);
    ggml_backend_tensor_get(tensor, result.bytes.data(), where.front() * row_bytes,
                            result.bytes.size());
    result.felt = shortage.felt();
    return result;
}

Bytes read(const ggml_tensor* tensor, const Cells& where) {
    return rows_of(tensor, where.front(), where.size());
}

std::vector<Bytes> save(const Cache& cache, const Cells& where) {
    std::vector<Bytes> state;
    for (const ggml_tensor* tensor : cache.tensors()) state.push_back(read(tensor, where));
    return state;
}

// Restores a state, the tensor of that number under a shortage. False: nothing was short.
bool restore_short(const Cache& cache, const std::vector<Bytes>& state, const Cells& where,
                   std::size_t tensor, Shortage::Kind kind, std::size_t number,
                   std::size_t least = 0) {
    bool felt = false;
    const std::vector<ggml_tensor*> tensors = cache.tensors();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const Shortage shortage(kind, i == tensor ? number : SIZE_MAX, least);
        ggml_backend_tensor_set(tensors[i], state[i].data(), where.front() * row_bytes,
                                state[i].size());
        felt |= shortage.felt();
    }
    return felt;
}

// Whether a cache that a state is restored to, the rows of one of its tensors replaced, answers
// from them.
bool answers(const std::vector<Bytes>& state, std::size_t tensor, const Bytes& rows,
             const Cells& where) {
    Cache cache(scheme, many_cells);
    REQUIRE(cache.step({many_cells - 1}, {}) == fine);  // as llama.cpp's first graph
    std::vector<Bytes> saved = state;
    saved[tensor] = rows;
    restore_short(cache, saved, where, 0, Shortage::Kind::single, SIZE_MAX);
    return cache.step({where.back() + 1}, where) == fine;
}

}  // namespace

TEST_CASE("rows that can't be read are such as no restore takes, and the next graph fails") {
    Cache cache(scheme, many_cells), whole(scheme, many_cells);
    const Cells first = range(0, 200);
    REQUIRE(cache.step(first, {}) == fine);
    REQUIRE(whole.step(first, {}) == fine);
    CHECK(lowkv::ggml::stats().cells_packed > 0);
    std::uint32_t next = 200;
    std::size_t failures = 0;
    for (std::size_t i = 0; i < cache.tensors().size(); ++i) {
        const ggml_tensor* tensor = cache.tensors()[i];
        const std::string name = tensor->name;
        for (const Shortage::Kind kind : kinds) {
            for (std::size_t number = 0;; ++number) {
                CAPTURE(name);
                CAPTURE(kind);
                CAPTURE(number);
                const std::vector<Bytes> state = save(whole, first);
                // As llama.cpp reads them: the keys with the marks before all others.
                if (i > 0) read(cache.tensors()[0], first);
                log_text().clear();
                const auto [bytes, felt] = read(tensor, first, kind, number);
                if (!felt) {
                    CHECK(bytes == state[i]);
                    CHECK(answers(state, i, bytes, first));
                    break;
                }
                ++failures;
                if (kind == Shortage::Kind::single) CHECK(logged("can't read cache rows"));
                const Cells token{next};
                CHECK(cache.step(token, range(0, next)) != fine);
                CHECK(logged("an operation on the cache that llama.cpp takes for done has failed"));
                if (kind == Shortage::Kind::single) CHECK(logged("can't read cache rows"));
                CHECK_FALSE(answers(state, i, bytes, first));
                // Nothing was lost.
                CHECK(cache.step(token, range(0, next)) == fine);
                REQUIRE(whole.step(token, range(0, next)) == fine);
                CHECK(cache.result() == whole.result());
                ++next;
                REQUIRE(next < many_cells);
            }
        }
    }
    CHECK(failures > 0);
}

namespace {

constexpr std::size_t large = 96 * sizeof(std::uint32_t);  // the list of the restored cells

// A cache with 50 tokens of its own and a state of 96 tokens to restore behind them.
class Restoring {
  public:
    Restoring() {
        Cache source(scheme);
        REQUIRE(source.step(range(0, 96), {}) == fine);
        state = save(source, range(0, 96));
    }

    // What must hold for a restore under a shortage, until it is not felt any more: false.
    bool check(std::size_t tensor, Shortage::Kind kind, std::size_t number, std::size_t least) {
        Cache cache(scheme);
        const std::string name = cache.tensors()[tensor]->name;
        const bool words = least > 0 || kind == Shortage::Kind::single;  // there's memory for them
        CAPTURE(name);
        CAPTURE(words);
        CAPTURE(number);
        REQUIRE(cache.step(own, {}) == fine);
        log_text().clear();
        if (!restore_short(cache, state, cells, tensor, kind, number, least)) {
            CHECK(log_text().empty());
            CHECK(cache.step({50}, own) == fine);
            CHECK(cache.step({196}, cells) == fine);
            return false;
        }
        if (words) CHECK_FALSE(log_text().empty());
        // Those who don't see it go on.
        CHECK(cache.step({50}, own) == fine);
        for (const std::uint32_t cell : {100u, 163u, 195u}) {
            CHECK(cache.step({300}, {cell}) != fine);
            if (words) CHECK(logged("a restored state was not taken over"));
        }
        CHECK(cache.step({300}, cells) != fine);
        CHECK(cache.step({51}, range(0, 51)) == fine);
        // Written again, they are whole.
        CHECK(cache.step(cells, {}) == fine);
        CHECK(cache.step({196}, cells) == fine);
        return true;
    }

    std::vector<Bytes> state;
    const Cells own = range(0, 50), cells = range(100, 196);
};

}  // namespace

TEST_CASE("a restored row that was not taken over fails the graphs that see it") {
    Restoring restoring;
    for (std::size_t tensor = 0; tensor < restoring.state.size(); ++tensor)
        CHECK(restoring.check(tensor, Shortage::Kind::lasting, 0, large));
}

TEST_CASE("restoring again heals what a failed restore left") {
    Cache cache(scheme);
    const Restoring restoring;
    const Cells& restored = restoring.cells;
    REQUIRE(cache.step({0}, {}) == fine);
    for (std::size_t tensor = 0; tensor < restoring.state.size(); ++tensor) {
        REQUIRE(restore_short(cache, restoring.state, restored, tensor, Shortage::Kind::lasting, 0,
                              large));
        CHECK(cache.step({300}, restored) != fine);
        REQUIRE_FALSE(restore_short(cache, restoring.state, restored, tensor,
                                    Shortage::Kind::lasting, SIZE_MAX));
        CHECK(cache.step({301}, restored) == fine);
    }
}

TEST_CASE("clearing the cache heals it") {
    Cache cache(scheme), whole(scheme);
    const Cells first = range(0, 96);
    REQUIRE(cache.step(first, {}) == fine);
    const std::vector<Bytes> state = save(cache, first);
    REQUIRE(read(cache.tensors()[0], first, Shortage::Kind::lasting, 0).felt);
    REQUIRE(restore_short(cache, state, first, 1, Shortage::Kind::lasting, 0, large));
    cache.clear();
    CHECK(cache.step({96}, first) == fine);
    cache.clear();
    CHECK(cache.step(first, {}) == fine);
    REQUIRE(whole.step(first, {}) == fine);
    CHECK(cache.result() == whole.result());
}

TEST_CASE("a scheme for a layer that the model lacks fails every graph") {
    Cache cache("kivi2,layer.9=kivi4");
    for (int i = 0; i < 3; ++i) {
        CHECK(cache.step({0}, {}) != fine);
        CHECK(logged("layer 9"));
    }
    cache.clear();
    CHECK(cache.step({0}, {}) != fine);
    CHECK(logged("layer 9"));
}

TEST_CASE("no allocation of a restore may fail unnoticed") {
    for (const char* states : {"f16", "packed"}) {
        CAPTURE(states);
        setenv("LOWKV_STATES", states, 1);
        Restoring restoring;
        for (std::size_t tensor = 0; tensor < restoring.state.size(); ++tensor)
            for (const Shortage::Kind kind : kinds)
                for (std::size_t number = 0; restoring.check(tensor, kind, number, 0);) ++number;
    }
    setenv("LOWKV_STATES", "f16", 1);
}

TEST_CASE("the keys of a context shift that fails are not seen, as llama.cpp goes on") {
    Cache cache(scheme);
    const Cells first = range(0, 200);
    REQUIRE(cache.step(first, {}) == fine);
    REQUIRE(read(cache.tensors()[0], first, Shortage::Kind::lasting, 0).felt);
    std::vector<std::int32_t> shifts(cells, 0);
    std::fill(shifts.begin() + 100, shifts.begin() + 200, -3);
    CHECK(cache.shift(shifts) != fine);
    CHECK(logged("a context shift has failed"));
    CHECK(cache.step({200}, range(0, 100)) == fine);
    CHECK(cache.step({201}, {150}) != fine);
    CHECK(logged("a context shift has failed"));
    CHECK(cache.step(range(100, 200), range(0, 100)) == fine);
    CHECK(cache.step({201}, first) == fine);
}
