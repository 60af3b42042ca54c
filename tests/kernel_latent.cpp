// Attention of latent rows, whose first channels are the values, equals attention over the decoded
// rows: for every codec that stores them, any number of query heads, every mask and implementation.

#include <doctest/doctest.h>

#include <string>

#include "attention_check.h"
#include "lowkv/executor.h"
#include "sample.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

const char* const schemes[] = {
    "exact", "lowkv3", "lowkv4", "int8", "kivi2", "k=sorted-5320-head-1row,v=exact",
};

}  // namespace

TEST_CASE("every codec of latent rows, few heads and many") {
    if (forced_is_missing()) {
        MESSAGE("skipped: this CPU lacks the forced implementation");
        return;
    }
    unsigned seed = 0;
    for (const char* scheme : schemes) {
        for (const Shape shape : {Shape{1, 576, 512}, Shape{1, 288, 256}, Shape{1, 64, 64}}) {
            for (const std::uint32_t heads : {1u, 5u, 16u, 100u}) {
                if (!in_sample(++seed)) continue;
                const std::string text =
                    std::string(scheme) + (heads == 5 ? ",sinks=3,window=0" : ",sinks=3,window=40");
                check_case(text, shape, heads, 1 + seed % 3, 300 + seed * 7 % 100, {}, seed,
                           serial_executor());
            }
        }
    }
}

TEST_CASE("latent rows under masks, by several threads") {
    if (forced_is_missing()) return;
    const auto threads = make_thread_executor(3);
    const Shape shape{1, 96, 80};
    unsigned seed = 0;
    for (const char* scheme : schemes) {
        for (const Mask::Kind kind : {Mask::Kind::none, Mask::Kind::causal,
                                      Mask::Kind::additive_f16, Mask::Kind::additive_f32}) {
            if (!in_sample(++seed)) continue;
            const std::uint32_t tokens = seed % 4 == 0 ? 40 : 2, cells = 600 + seed, heads = 6;
            // The first block and a later span are out of all sight.
            const RandomParams random(
                kind, tokens, cells, heads, seed, true,
                [](std::size_t, std::size_t c) { return c < 128 || (c >= 256 && c < 512); });
            check_case(std::string(scheme) + ",window=40,sinks=3", shape, heads, tokens, cells,
                       random.params, seed, *threads);
        }
    }
}
