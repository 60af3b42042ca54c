// Fused attention equals attention over the decoded cache, decoding, prefilling and in f32, for
// every codec, head_dim, mask and implementation.

#include <doctest/doctest.h>

#include <cmath>
#include <string>

#include "attention_check.h"
#include "calibration_case.h"
#include "lowkv/error.h"
#include "lowkv/implementation.h"
#include "rotated_schemes.h"
#include "sample.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

const char* const codecs[] = {
    "exact",
    "kivi2",
    "kivi4",
    "int8",
    "int4",
    "k=channel-3-g32,v=token-3-g32",
    "k=token-2-g64,v=channel-2-g64",
    "k=channel-8-g128,v=token-8-g128",
    "k=token-3-g32-fp8,v=channel-4-g32-fp8",
    "k=channel-2-g64-fp8,v=token-2-g32-fp8",
    "k=exact,v=token-2-g32",
    rotated_2,
    rotated_2_8,
    rotated_4,
    "int4h",
    "turboquant3-qr",
    "k=token-2-g32-normal-hadamard-mean-fp8,v=token-4-g64-normal-unbiased-fp8",
    "k=token-8-g64-random-mean,v=token-3-head-normal-lsq",
    "k=channel-2-g64,v=token-4-head-normal-random",
    "k=token-2-head-normal-hadamard-mean,v=token-1.5-head-normal-hadamard",
    "k=channel-1.5-g32,v=token-1.5-g32",
    "k=token-4-g32-mean-fp8,v=channel-2-g64",
    "k=token-1.5-g64-normal-random-mean,v=exact",
    "k=token-1.5-g64-fp8,v=channel-1.5-g32",
    "k=token-2-head-trellis-hadamard-mean,v=token-2-head-trellis-hadamard-unbiased",
    "k=token-3-head-normal-hadamard-mean,v=token-2-head-trellis-fp8",
    "k=token-3-g64-normal-hadamard-mean-e5m3,v=token-2-head-trellis-hadamard-unbiased-e5m3",
    "k=token-1-head-trellis-hadamard-mean,v=token-3-head-trellis-hadamard-unbiased",
    "k=token-3-head-trellis-random-fp8,v=token-1-head-trellis-lsq",
    "k=token-2-g32-normal-fp8,v=token-3-head-normal-random-lsq",
    "k=token-3-g64-hadamard-fp8,v=channel-3-g32",
    "k=channel-2-g32,v=exact",
};

}  // namespace

TEST_CASE("every codec and head_dim, decode, prefill and f32") {
    if (forced_is_missing()) {
        MESSAGE("skipped: this CPU lacks the forced implementation");
        return;
    }
    unsigned seed = 0;
    for (const char* codec : codecs) {
        for (const std::uint32_t head_dim : {64u, 80u, 96u, 128u, 256u, 320u, 576u}) {
            if (!in_sample(++seed)) continue;
            const std::string text = std::string(codec) + ",window=40,sinks=3";
            const std::uint32_t repeat = 1 + seed % 5;
            check_case(text, {2, head_dim}, repeat, 1 + seed % 3, 500 + seed * 7 % 100, {}, seed,
                       serial_executor());
        }
    }
}

namespace {

const char* const sorted_codecs[] = {
    "k=sorted-4211-head-2rows,v=token-2-head-normal-hadamard-unbiased",
    "k=sorted-4220-head,v=token-2-g32",
    "k=sorted-4321-head-1row,v=exact",
    "k=sorted-3311-head-4rows,v=channel-2-g32",
    "k=sorted-2000-head-3rows,v=token-4-g64",
    "k=sorted-4443-head,v=token-8-g128",
    "k=sorted-5443-head-trellis-2rows,v=token-4-head-normal-hadamard-unbiased",
    "k=sorted-5520-head-1row,v=exact",
    "k=sorted-4321-head-trellis-2rows,v=token-2-head-trellis-hadamard-unbiased",
    "k=sorted-3310-head-trellis,v=token-2-g32",
    "k=sorted-2111-head-trellis-1row,v=exact",
};

}  // namespace

TEST_CASE("every kind of sorted keys") {
    if (forced_is_missing()) return;
    unsigned seed = 0;
    for (const char* codec : sorted_codecs) {
        for (const std::uint32_t head_dim : {16u, 48u, 64u, 80u, 96u, 128u, 256u, 272u, 576u}) {
            if (!in_sample(++seed)) continue;
            check_case(std::string(codec) + ",window=40,sinks=3", {2, head_dim}, 1 + seed % 5,
                       1 + seed % 3, 500 + seed * 7 % 100, {}, seed, serial_executor());
        }
    }
}

// More rows than a task has, and than are a multiple of four.
TEST_CASE("the rows of a prompt") {
    if (forced_is_missing()) return;
    unsigned seed = 0;
    for (const char* codec : {"lowkv2.8", "kivi2", "int8", "turboquant3", "lowkv1.5"}) {
        for (const std::uint32_t head_dim : {64u, 128u}) {
            if (!in_sample(++seed)) continue;
            AttentionParams params;
            params.mask.kind = Mask::Kind::causal;
            check_case(std::string(codec) + ",window=40,sinks=3", {2, head_dim}, 3, 35 + seed, 400,
                       params, seed, serial_executor());
        }
    }
}

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

TEST_CASE("a query that sees nothing gets zeros, absent blocks read as zeros") {
    if (forced_is_missing()) return;
    const Problem p(parse_scheme("kivi2,window=0,sinks=0"), {1, 64}, 2, 2, 128, 3);
    std::vector<std::uint16_t> mask(2 * 128, 0xfc00);
    std::fill(mask.begin() + 128, mask.end(), std::uint16_t{0});
    AttentionParams params;
    params.mask = {Mask::Kind::additive_f16, mask.data(), 128};
    AttentionWorkspace workspace;
    std::vector<float> out;
    for (const std::uint32_t decode_rows : {0u, 16u}) {
        params.decode_rows = decode_rows;
        attend(*p.sequence, p.io(out), params, workspace);
        for (std::size_t i = 0; i < 128; ++i) CHECK(out[i] == 0.0f);
        CHECK(out[128] != 0.0f);

        const Sequence empty(make_store(), p.plan, Retention{});
        attend(empty, p.io(out), params, workspace);
        for (const float x : out) CHECK(x == 0.0f);
    }
}

// All weights and all codes of a token at their largest: the sum that has the least room.
TEST_CASE("the integers of wide heads don't overflow") {
    if (forced_is_missing()) return;
    for (const std::uint32_t head_dim : {256u, 576u}) {
        Problem p(parse_scheme("k=channel-8-g32,v=exact,window=0,sinks=0"), {1, head_dim}, 1, 1,
                  128, 3);
        std::vector<float> rows(std::size_t{128} * head_dim, 0.0f);
        for (std::size_t token = 7; token < 128; token += 32) {
            std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(token * head_dim), head_dim,
                        1.0f);
        }
        p.sequence.emplace(make_store(), p.plan, Retention{.window = 0, .sinks = 0});
        p.sequence->append(rows.data(), rows.data(), 128);
        p.sequence->pack();
        REQUIRE(p.sequence->packed(3));
        std::fill(p.q.begin(), p.q.end(), 1.0f);
        AttentionParams params;
        params.scale = 1.0f / static_cast<float>(head_dim);
        params.decode_rows = 1u << 30;
        AttentionWorkspace workspace;
        std::vector<float> out;
        attend(*p.sequence, p.io(out), params, workspace);
        const double share = std::exp(1.0) / (std::exp(1.0) + 31);
        for (const float x : out) CHECK(x == doctest::Approx(share).epsilon(decode_budget));
    }
}

TEST_CASE("wrong arguments are refused by name") {
    const Problem p(parse_scheme("kivi2"), {2, 64}, 4, 2, 64, 3);
    AttentionWorkspace workspace;
    std::vector<float> out;
    const auto says = [&](const char* words,
                          const std::function<void(AttentionIO&, AttentionParams&)>& change) {
        AttentionIO io = p.io(out);
        AttentionParams params;
        change(io, params);
        try {
            attend(*p.sequence, io, params, workspace);
        } catch (const Error& e) {
            return std::string(e.what()).find(words) != std::string::npos;
        }
        return false;
    };
    CHECK(says("3 query heads are not a multiple of 2 kv heads",
               [](AttentionIO& io, AttentionParams&) { io.heads = 3; }));
    CHECK(says("q or out is null", [](AttentionIO& io, AttentionParams&) { io.out = nullptr; }));
    CHECK(says("has no data",
               [](AttentionIO&, AttentionParams& a) { a.mask.kind = Mask::Kind::additive_f32; }));
    CHECK(says("at least as many cells", [](AttentionIO& io, AttentionParams& a) {
        a.mask.kind = Mask::Kind::causal;
        io.n_cells = 1;
    }));
    CHECK(says("finite", [](AttentionIO&, AttentionParams& a) { a.scale = NAN; }));
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
