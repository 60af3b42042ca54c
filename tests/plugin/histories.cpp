// A request's packed rows are those that a fresh cache gives it, whatever its stream held before.

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "ggml_cache.h"

namespace {

using namespace lowkv::test;

constexpr std::uint32_t cells = 1024;

// A prompt in batches, then some tokens one by one, from cell `first` on.
void request(Cache& cache, std::uint32_t first, std::uint32_t prompt, std::uint32_t answer,
             std::uint32_t batch) {
    for (std::uint32_t t = 0; t < prompt; t += batch)
        REQUIRE(cache.step(range(first + t, first + std::min(t + batch, prompt)),
                           range(first, first + t)) == fine);
    for (std::uint32_t t = prompt; t < prompt + answer; ++t)
        REQUIRE(cache.step(range(first + t, first + t + 1), range(first, first + t)) == fine);
}

// Of all tensors, without the two lowest bits of each number: the plug-in's marks stand there
// (row_mark.h), and they name groups.
std::vector<Bytes> rows(const Cache& cache, std::uint32_t first, std::uint32_t count) {
    std::vector<Bytes> all;
    for (const ggml_tensor* tensor : cache.tensors()) {
        Bytes& bytes = all.emplace_back(rows_of(tensor, first, count));
        for (std::size_t i = 0; i < bytes.size(); i += sizeof(ggml_fp16_t))
            bytes[i] &= std::byte{0xFC};
    }
    return all;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    double most = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
        most = std::max(most, std::fabs(double{a[i]} - double{b[i]}));
    return most;
}

}  // namespace

TEST_CASE("a request on a busy stream gives what it gives on a fresh one") {
    std::mt19937 generator(17);
    const auto random = [&](std::uint32_t most) {
        return static_cast<std::uint32_t>(generator()) % most;
    };
    for (const std::string scheme : {"lowkv2.8", "lowkv1.5", "lowkv4", "kivi2"}) {
        const std::string text = scheme + ",window=32,sinks=0";
        Cache fresh(text, cells);
        request(fresh, 0, 450, 20, 200);
        const std::vector<float> answer = fresh.result();
        const auto packed = rows(fresh, 0, 470);
        for (unsigned round = 0; round < 4; ++round) {
            Cache busy(text, cells);
            std::string what = text;
            if (round == 0) {  // a warm-up, as llama.cpp's
                REQUIRE(busy.step(range(1, 3), {}) == fine);
                busy.clear();
            }
            for (std::uint32_t i = 0; i < (round == 0 ? 0 : 1 + random(3)); ++i) {
                const std::uint32_t first = 1 + random(300), prompt = 1 + random(500);
                what +=
                    "; " + std::to_string(prompt) + " tokens from cell " + std::to_string(first);
                request(busy, first, prompt, random(10), 100 + random(100));
            }
            CAPTURE(what);
            request(busy, 0, 450, 20, 200);
            CHECK(rows(busy, 0, 470) == packed);
            CHECK(distance(busy.result(), answer) < 1e-4);
        }
    }
}

TEST_CASE("the other sequence of a stream does not change a sequence's packed rows") {
    const std::string text = "lowkv2.8,window=32,sinks=0";
    Cache alone(text, cells), together(text, cells);
    request(alone, 0, 300, 20, 150);
    for (std::uint32_t t = 0; t < 300; t += 150) {
        REQUIRE(together.step(range(500 + t, 500 + t + 130), range(500, 500 + t)) == fine);
        REQUIRE(together.step(range(t, t + 150), range(0, t)) == fine);
    }
    for (std::uint32_t t = 300; t < 320; ++t) {
        REQUIRE(together.step(range(700 + t, 701 + t), {}) == fine);
        REQUIRE(together.step(range(t, t + 1), range(0, t)) == fine);
    }
    CHECK(rows(together, 0, 320) == rows(alone, 0, 320));
}

// llama.cpp's cache of sliding layers is a ring: a row stays until another is written over it, and
// a prompt that changed may go on from any token whose window is still there.
TEST_CASE("a sequence goes back to what its sliding window has left behind") {
    constexpr std::uint32_t ring = 512, window = 160, most = 256;
    const std::string scheme = "int8,window=32,sinks=4";
    Cache exact("exact", ring), packed(scheme, ring);
    std::mt19937 generator(23);
    std::uint32_t next = 0, top = 0,
                  returns = 0;  // positions; a token lies in cell position % ring
    for (unsigned round = 0; round < 40; ++round) {
        const std::uint32_t count = 1 + static_cast<std::uint32_t>(generator()) % most;
        Cells where;
        for (std::uint32_t p = next; p < next + count; ++p) where.push_back(p % ring);
        for (Cache* cache : {&exact, &packed}) {
            std::mt19937 random(round);
            std::normal_distribution<float> normal;
            REQUIRE(cache->step(
                        where,
                        [&](std::size_t, std::span<float> input) {
                            for (float& x : input) x = normal(random);
                        },
                        [&](std::size_t token, ggml_fp16_t* row) {
                            const std::uint32_t end = next + static_cast<std::uint32_t>(token) + 1;
                            for (std::uint32_t p = end - std::min(end, window); p < end; ++p)
                                row[p % ring] = 0;
                        }) == fine);
        }
        CAPTURE(round);
        CHECK(distance_of(packed.result(), exact.result()) < 0.02f);
        next += count;
        top = std::max(top, next);
        const std::uint32_t least = top - std::min(top, ring - window);
        if (generator() % 2 != 0 || next <= least) continue;
        next -= static_cast<std::uint32_t>(generator()) % (next - least);
        ++returns;
    }
    CHECK(returns > 10);
    CHECK(lowkv::ggml::stats().packed_bytes > 0);
}
