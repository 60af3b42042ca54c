// What a caller has in a CUDA device's memory: rows, queries, masks and results there are what they
// would be in the host's.

#include <doctest/doctest.h>

#include <cmath>
#include <optional>
#include <string>

#include "caller_memory.h"
#include "device_case.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/part.h"
#include "lowkv/scheme.h"
#include "numbers.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

constexpr std::uint32_t sequences = 2, kv_heads = 2, heads = 6;

// As bytes of a type of rows.
std::vector<std::byte> rows_of(const std::vector<float>& from, RowType type) {
    std::vector<std::byte> bytes;
    for (const float x : from) {
        std::uint32_t bits = static_cast<std::uint32_t>(LOWKV_BITS(x));
        std::size_t size = 4;
        if (type == RowType::f16) bits = lowkv_f32_to_f16(x);
        if (type == RowType::bf16) bits >>= 16;
        if (type != RowType::f32) size = 2;
        for (std::size_t i = 0; i < size; ++i) bytes.push_back(std::byte(bits >> (8 * i)));
    }
    return bytes;
}

struct Case {
    std::string scheme;
    std::uint32_t head_dim = 32;
    std::uint32_t tokens = 200;
    RowType plan_rows = RowType::f16, given_rows = RowType::f16;
};

// A batch whose rows came from the host's memory, and one from the caller's on the device.
struct Pair {
    std::shared_ptr<const Plan> plan;
    Batch host, there;

    explicit Pair(const Case& c) : Pair(c, parse_scheme(c.scheme)) {}

  private:
    Pair(const Case& c, const Scheme& scheme)
        : plan(std::make_shared<Plan>(scheme.layer(0), Shape{kv_heads, c.head_dim}, "", 0,
                                      LayerInputs{.rows = c.plan_rows})),
          host(std::make_shared<Store>(0, shared_device()), plan, scheme.retention, sequences),
          there(std::make_shared<Store>(0, shared_device()), plan, scheme.retention, sequences) {
        // [token][sequence][head][channel], heads with a channel's worth of room.
        const std::size_t head = c.head_dim + 1, sequence = kv_heads * head;
        const BatchStrides strides{sequence, head, sequences * sequence};
        const std::vector<std::byte> keys =
            rows_of(numbers(c.tokens * strides.token, 1), c.given_rows);
        const std::vector<std::byte> values =
            rows_of(numbers(c.tokens * strides.token, 2), c.given_rows);
        const Callers<std::byte> k(keys), v(values);
        // A prompt, then a token.
        const std::size_t last = (c.tokens - 1) * strides.token * element_bytes(c.given_rows);
        for (const auto& [first, count] : {std::pair<std::size_t, std::uint32_t>{0, c.tokens - 1},
                                           std::pair<std::size_t, std::uint32_t>{last, 1}}) {
            const auto append = [&](Batch& batch, const std::byte* its_keys,
                                    const std::byte* its_values) {
                batch.append({its_keys + first, c.given_rows, strides},
                             {its_values + first, c.given_rows, strides}, count);
                batch.pack();
            };
            append(host, keys.data(), values.data());
            append(there, k.data(), v.data());
        }
    }
};

// Queries of both batches' newest tokens, [token][sequence][head][channel].
void check_attention(const Pair& pair, const Case& c, std::uint32_t queries, bool masked) {
    const std::size_t head = c.head_dim + 2, sequence = heads * head;
    const BatchStrides strides{sequence, head, sequences * sequence};
    const std::size_t size = queries * strides.token;
    const std::vector<float> q = numbers(size, 3), sinks = numbers(heads, 4);
    std::vector<float> mask = numbers(std::size_t{sequences} * queries * c.tokens, 5);
    for (std::size_t i = 0; i < mask.size(); i += 3) mask[i] = -INFINITY;
    std::vector<float> out(size, 7.0f), lse(std::size_t{sequences} * queries * heads, 7.0f);
    const Callers<float> its_q(q), its_sinks(sinks), its_mask(mask), its_out(out), its_lse(lse);
    BatchAttention a;
    a.q_sequence_stride = a.out_sequence_stride = strides.sequence;
    a.io.q_head_stride = a.io.out_head_stride = strides.head;
    a.io.q_token_stride = a.io.out_token_stride = strides.token;
    a.io.tokens = queries;
    a.io.heads = heads;
    a.io.q = q.data();
    a.io.out = out.data();
    a.io.lse = lse.data();
    a.params.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    if (masked) {
        a.params.softcap = 20.0f;
        a.params.mask = {
            .kind = Mask::Kind::additive_f32, .data = mask.data(), .row_stride = c.tokens};
        a.mask_sequence_stride = std::size_t{queries} * c.tokens;
        a.params.sink_logits = sinks.data();
    } else {
        a.params.mask = {.kind = Mask::Kind::causal, .window = 150};
    }
    AttentionWorkspace workspace;
    pair.host.attend(a, workspace);
    a.io.q = its_q.data();
    a.io.out = its_out.data();
    a.io.lse = its_lse.data();
    if (masked) {
        a.params.mask.data = its_mask.data();
        a.params.sink_logits = its_sinks.data();
    }
    pair.there.attend(a, workspace);
    CHECK(its_out.read() == out);
    CHECK(its_lse.read() == lse);
}

// A query of each sequence, one after the other.
BatchAttention one_query(const Case& c, const float* q, float* out) {
    BatchAttention a;
    a.q_sequence_stride = a.out_sequence_stride = std::size_t{heads} * c.head_dim;
    a.io.q_head_stride = a.io.out_head_stride = c.head_dim;
    a.io.tokens = 1;
    a.io.heads = heads;
    a.io.q = q;
    a.io.out = out;
    return a;
}

}  // namespace

TEST_CASE("every type of rows, into plans of every type") {
    for (const RowType plan : {RowType::f32, RowType::f16, RowType::bf16}) {
        for (const RowType given : {RowType::f32, RowType::f16, RowType::bf16}) {
            INFO("plan ", static_cast<unsigned>(plan), " given ", static_cast<unsigned>(given));
            const Pair pair({"kivi2,window=40,sinks=3", 16, 120, plan, given});
            CHECK(pair.host.save() == pair.there.save());
        }
    }
    const Pair pair({.scheme = "lowkv2.8,window=40,sinks=3"});
    CHECK(pair.host.save() == pair.there.save());
}

TEST_CASE("attention to few queries and to many") {
    for (const char* scheme : {"kivi2", "turboquant3-qr", "lowkv2.8", "exact"}) {
        const Case c{.scheme = std::string(scheme) + ",window=40,sinks=3"};
        const Pair pair(c);
        for (const std::uint32_t queries : {1u, 37u}) {
            for (const bool masked : {false, true}) {
                INFO(c.scheme, " queries ", queries, " masked ", masked);
                check_attention(pair, c, queries, masked);
            }
        }
    }
}

TEST_CASE("reading rows to the memory of a caller, of some sequences or of all") {
    for (const char* scheme : {"kivi2", "lowkv2.8", "exact"}) {
        for (const RowType rows : {RowType::f32, RowType::bf16}) {
            const Case c{std::string(scheme) + ",window=40,sinks=3", 32, 200, rows, rows};
            const Pair pair(c);
            const std::uint32_t first = 5, count = c.tokens - first;
            // [token][sequence][head][channel], heads with a channel's worth of room.
            const std::size_t head = c.head_dim + 1, sequence = kv_heads * head;
            const BatchStrides strides{sequence, head, sequences * sequence};
            const std::size_t bytes = count * strides.token * element_bytes(rows);
            for (const std::uint32_t from : {0u, 1u}) {
                INFO(c.scheme, " from sequence ", from);
                std::vector<std::byte> keys(bytes), values(bytes);
                const Callers<std::byte> its_keys(keys), its_values(values);
                pair.host.read(first, count, {keys.data(), strides}, {values.data(), strides},
                               serial_executor(), from, sequences - from);
                pair.host.read(first, count, {its_keys.data(), strides},
                               {its_values.data(), strides}, serial_executor(), from,
                               sequences - from);
                CHECK(its_keys.read() == keys);
                CHECK(its_values.read() == values);
            }
        }
    }
}

TEST_CASE("a call is four kernels and one upload at most, whatever the batch") {
    for (const char* scheme : {"kivi2", "turboquant4", "lowkv2.8"}) {
        const Case c{.scheme = std::string(scheme) + ",window=40,sinks=3", .head_dim = 64};
        const Pair pair(c);
        const std::vector<float> numbers_of_all(std::size_t{sequences} * heads * c.head_dim, 1.0f);
        const Callers<float> q(numbers_of_all), out(numbers_of_all);
        BatchAttention a = one_query(c, q.data(), out.data());
        a.params.mask.kind = Mask::Kind::causal;
        AttentionWorkspace workspace;
        const std::uint64_t launched = launches(), uploaded = uploads();
        pair.there.attend(a, workspace);
        INFO(c.scheme);
        CHECK(launches() - launched <= 4);
        CHECK(uploads() - uploaded <= 1);
    }
}

TEST_CASE("many blocks are appended to and read by few kernels") {
    const Case c{.scheme = "kivi2,window=300,sinks=3", .head_dim = 16, .tokens = 5100};
    Pair pair(c);
    CHECK(pair.host.save() == pair.there.save());
    const BatchStrides strides{kv_heads * 16, 16, sequences * kv_heads * 16};
    const std::size_t bytes = c.tokens * strides.token * element_bytes(c.plan_rows);
    std::vector<std::byte> keys(bytes), values(bytes);
    const Callers<std::byte> its_keys(keys), its_values(values);
    pair.host.read(0, c.tokens, {keys.data(), strides}, {values.data(), strides});
    std::uint64_t launched = launches(), uploaded = uploads();
    pair.there.read(0, c.tokens, {its_keys.data(), strides}, {its_values.data(), strides});
    // 4,096 tokens at a time: decoded in two launches, and read in one for 48 blocks and part. Then
    // the unpacked ones.
    const std::uint32_t tokens = pair.plan->block_tokens();
    const std::uint32_t packed =
        sequences * (pair.there.packed_end() - pair.there.packed_first()) / tokens;
    const std::uint32_t at_once = 4096 / tokens, turns = (packed + at_once - 1) / at_once;
    CHECK(turns > 2);
    CHECK(launches() - launched <= turns * (2 + 2 * ((at_once + 47) / 48)) + 2);
    CHECK(uploads() - uploaded <= turns);
    CHECK(its_keys.read() == keys);
    CHECK(its_values.read() == values);

    // A token of each sequence: keys, then values.
    launched = launches(), uploaded = uploads();
    pair.there.append({its_keys.data(), c.plan_rows, strides},
                      {its_values.data(), c.plan_rows, strides}, 1);
    CHECK(launches() - launched <= 2);
    CHECK(uploads() == uploaded);
}

// As in codes.cpp: for whoever looks for races.
TEST_CASE("small: rows and a query of a caller's") {
    const Case c{.scheme = "k=token-4-head-hadamard,v=exact,window=20,sinks=1",
                 .head_dim = 16,
                 .tokens = 70};
    check_attention(Pair(c), c, 1, true);
}

TEST_CASE("queries and results in two memories are refused, and nothing is lost") {
    const Case c{.scheme = "kivi2,window=40,sinks=3"};
    const Pair pair(c);
    const std::vector<float> q = numbers(std::size_t{sequences} * heads * c.head_dim, 3);
    std::vector<float> out(q.size());
    const Callers<float> its_q(q);
    const BatchAttention a = one_query(c, its_q.data(), out.data());
    AttentionWorkspace workspace;
    try {
        pair.there.attend(a, workspace);
        FAIL("not refused");
    } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::invalid_argument);
        CHECK(std::string(error.what()).find("must all be in the host's memory") !=
              std::string::npos);
    }
    check_attention(pair, c, 1, false);
}

TEST_CASE("what is in another device's memory is refused, and read by nobody") {
    auto* const others = static_cast<float*>(others_memory());
    if (others == nullptr) return;
    const Case c{.scheme = "kivi2,window=40,sinks=3"};
    const Pair pair(c);
    std::vector<float> out(std::size_t{sequences} * heads * c.head_dim);
    const BatchAttention a = one_query(c, others, out.data());
    AttentionWorkspace workspace;
    CHECK_THROWS_WITH_AS(pair.there.attend(a, workspace),
                         doctest::Contains("must all be in the host's memory"), Error);
    check_attention(pair, c, 1, false);
}

TEST_CASE("work goes to a stream of the caller's") {
    const Case c{.scheme = "lowkv2.8,window=40,sinks=3"};
    device().use_stream(callers_stream());
    const Pair pair(c);
    check_attention(pair, c, 1, false);
    device().use_stream(nullptr);
    check_attention(pair, c, 1, false);
}
