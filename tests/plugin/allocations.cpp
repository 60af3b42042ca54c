// What a step of a token allocates in the plug-in, of two layers, beside ggml's own: it does not
// grow.

#include "failing_new.h"
#include "ggml_cache.h"

namespace {

using namespace lowkv::test;

class Counting : public Cache {
  public:
    using Cache::Cache;
    ggml_status compute(ggml_cgraph* graph) override {
        const long before = allocations_made;
        const ggml_status status = Cache::compute(graph);
        made += allocations_made - before;
        return status;
    }
    long made = 0;
};

}  // namespace

TEST_CASE("steps of a stream") {
    constexpr std::uint32_t prompt = 700, steps = 512;
    const struct {
        const char* scheme;
        long most;
    } schemes[] = {{"exact", 6478}, {"lowkv2.8", 6593}, {"kivi2", 7508}};
    for (const auto& [scheme, most] : schemes) {
        Counting cache(std::string(scheme) + ",window=32,sinks=4", 2048);
        REQUIRE(cache.step(range(0, prompt), {}) == fine);
        REQUIRE(cache.step({prompt}, range(0, prompt)) == fine);
        cache.made = 0;
        for (std::uint32_t t = prompt + 1; t <= prompt + steps; ++t)
            REQUIRE(cache.step({t}, range(0, t)) == fine);
        MESSAGE("a stream of ", std::string(scheme), ": a token ",
                static_cast<double>(cache.made) / steps, " allocations (", cache.made, ")");
        CHECK(cache.made <= most);
    }
}
