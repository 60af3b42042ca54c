// Fused attention under every kind of mask, with its additions, by several threads.

#include <doctest/doctest.h>

#include <string>

#include "attention_check.h"
#include "rotated_schemes.h"
#include "sample.h"

using namespace lowkv;
using namespace lowkv::test;

TEST_CASE("masks, soft-cap, ALiBi, sink logits, threads") {
    if (forced_is_missing()) return;
    const auto executor = make_thread_executor(3);
    unsigned seed = 100;
    for (const char* codec : {"exact", "kivi2", "int4", "k=token-2-g64,v=channel-2-g64",
                              rotated_2_8, "k=token-2-head-normal-hadamard-mean,v=token-2-g32"}) {
        for (int kind = 0; kind < 4; ++kind) {
            for (const std::uint32_t tokens : {1u, 3u, 70u}) {
                if (!in_sample(++seed)) continue;
                const std::uint32_t n_cells = 300 + seed % 200, heads = 6;
                const RandomParams random(  // one whole block is hidden
                    static_cast<Mask::Kind>(kind), tokens, n_cells, heads, seed, true,
                    [](std::size_t, std::size_t cell) { return cell >= 64 && cell < 96; });
                check_case(std::string(codec) + ",window=32,sinks=1", {2, 64}, heads / 2, tokens,
                           n_cells, random.params, seed, *executor);
            }
        }
    }
}
