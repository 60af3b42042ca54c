// Attention over row codecs, as kernel_attention.cpp has it over all others.

#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "attention_check.h"
#include "row/tests/calibration_case.h"
#include "sample.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

const char* const row_codecs[] = {
    "skvq-k2v1.5",
    "k=token-4-g64-reorder-clip-pre-fp8,v=token-3-g64-reorder-clip",
    "kvquant3",
    "kvquant4-1%",
    "k=channel-2-static-0.5%,v=token-4-row-2%",
    "k=token-8-row-pre,v=token-3-head-normal-hadamard",
    "lowkv2.8,v=token-2-row-learned-1%",
    "k=channel-3-static-learned-2%-pre,v=exact",
};

}  // namespace

TEST_CASE("every row codec, with ropes of all kinds") {
    if (forced_is_missing()) return;
    unsigned seed = 0;
    for (const char* codec : row_codecs) {
        for (const std::uint32_t head_dim : {64u, 80u, 128u, 256u}) {
            for (const std::uint32_t kv_heads : {3u, 8u}) {
                if (!in_sample(++seed)) continue;
                const Shape shape{kv_heads, head_dim};
                const Scheme scheme = parse_scheme(std::string(codec) + ",window=40,sinks=3");
                std::mt19937 random(seed);
                const LayerCalibration calibration = random_calibration(scheme.base, shape, random);
                Rope rope;
                rope.pairs = seed % 2 == 0 ? Rope::Pairs::halves : Rope::Pairs::neighbours;
                rope.magnitude = seed % 3 == 0 ? 1.8f : 1.0f;
                const std::uint32_t pairs = seed % 7 == 0 ? head_dim / 4 : head_dim / 2;
                for (std::uint32_t i = 0; i < pairs; ++i) {
                    rope.frequencies.push_back(
                        static_cast<float>(std::pow(10000.0, -2.0 * i / (2.0 * pairs))));
                }
                const std::uint32_t n_cells = 300 + seed * 7 % 100;
                // Consecutive, and in any order.
                std::vector<std::int32_t> positions(n_cells);
                for (std::uint32_t t = 0; t < n_cells; ++t) {
                    positions[t] =
                        static_cast<std::int32_t>(seed % 3 > 0 ? t + 100000 : random() % 70000);
                }
                check_case(
                    Problem(scheme, shape, kv_heads * (1 + seed % 3), 1 + seed % 2, n_cells, seed,
                            {&calibration, seed % 5 == 4 ? nullptr : &rope}, positions),
                    codec, {}, serial_executor());
            }
        }
    }
}

TEST_CASE("keys before RoPE across a wrap of positions") {
    if (forced_is_missing()) return;
    unsigned seed = 0;
    for (const char* codec : row_codecs) {
        for (const std::int32_t first : {-5, -31, 2097152 - 5, 2097152 - 31, 2097152 - 32}) {
            const Shape shape{1, 64};
            const Scheme scheme = parse_scheme(std::string(codec) + ",window=0,sinks=0");
            std::mt19937 random(++seed);
            const LayerCalibration calibration = random_calibration(scheme.base, shape, random);
            Rope rope;
            rope.pairs = seed % 2 == 0 ? Rope::Pairs::halves : Rope::Pairs::neighbours;
            rope.magnitude = 1.0f;
            for (unsigned i = 0; i < 32; ++i)
                rope.frequencies.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / 64.0)));
            std::vector<std::int32_t> positions(256);
            for (std::int32_t t = 0; t < 256; ++t)
                positions[static_cast<std::size_t>(t)] = first + t;
            check_case(Problem(scheme, shape, 2, 1, 256, seed, {&calibration, &rope}, positions),
                       codec, {}, serial_executor());
        }
    }
}
