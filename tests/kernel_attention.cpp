// Fused attention equals attention over the decoded cache, decoding, prefilling and in f32, for
// every codec, head_dim, mask and implementation.

#include <doctest/doctest.h>

#include <cmath>
#include <string>

#include "attention_check.h"
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
