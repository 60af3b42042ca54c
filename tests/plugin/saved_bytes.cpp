// The bytes of a slot that llama.cpp saves, as they were: codes, marks and rows.

#include <cinttypes>
#include <cstdio>

#include "saved_state.h"
#include "xxh64.h"

using namespace lowkv::test;

namespace {

struct Golden {
    const char* scheme;
    std::uint64_t state;
};
constexpr Golden golden[] = {{"lowkv2.8", 0x4023d43bff7abe39},
                             {"lowkv4", 0xd01311685a4560f2},
                             {"kivi2", 0xbc8feb12599ad68f}};

std::string hex(std::uint64_t hash) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%016" PRIx64, hash);
    return text;
}

}  // namespace

TEST_CASE("a saved slot is bit for bit what it was") {
    const StatesAre packed("packed");
    for (const Golden& its : golden) {
        INFO(std::string(its.scheme));
        Cache cache(std::string(its.scheme) + ",window=32,sinks=4", cells, 1, 3);
        cache.use_whole_numbers();
        // A prompt in two batches, an answer, and another request beside it.
        REQUIRE(cache.step(range(0, 250), {}) == fine);
        REQUIRE(cache.step(range(600, 640), {}) == fine);
        REQUIRE(cache.step(range(250, 420), range(0, 250)) == fine);
        for (std::uint32_t t = 420; t < 430; ++t) REQUIRE(cache.step({t}, range(0, t)) == fine);
        Bytes all;
        for (const Bytes& rows : save(cache, range(0, 430)))
            all.insert(all.end(), rows.begin(), rows.end());
        CHECK(lowkv::ggml::stats().cells_packed >= 256);
        CHECK(hex(lowkv::xxh64(all)) == hex(its.state));
    }
}
