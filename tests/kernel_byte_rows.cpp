// Exact rows of 8 bits: every implementation's codes and scales, and what a cache makes of them.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "attention_case.h"
#include "batch_common.h"
#include "codec/small_floats.h"
#include "isa/table.h"
#include "lowkv/error.h"

using namespace lowkv;
using batch_test::byte_row;
using batch_test::Row;

namespace {

// Normal numbers with a few large ones, as keys have them, times `size`.
Row random_row(std::mt19937& random, std::size_t count, float size) {
    std::normal_distribution<float> normal;
    Row row(count);
    for (std::size_t c = 0; c < count; ++c)
        row[c] = size * normal(random) * (c % 29 == 3 ? 9.0f : 1.0f);
    return row;
}

// A group.
struct Bytes {
    std::vector<std::uint8_t> codes;
    kernels::ByteScale scale{};

    explicit Bytes(const Row& row) : codes(row.size()) {
        scale = kernels::select({}).to_bytes(row.data(), codes.data(), row.size());
    }
    Row read() const {
        Row row(codes.size());
        for (std::size_t c = 0; c < row.size(); ++c)
            row[c] = scale.scale * static_cast<float>(codes[c] - scale.zero);
        return row;
    }
    friend bool operator==(const Bytes& a, const Bytes& b) {
        return a.codes == b.codes && a.scale.scale == b.scale.scale && a.scale.zero == b.scale.zero;
    }
};

std::shared_ptr<const Plan> plan_of(const char* scheme, RowType rows = RowType::f16) {
    return batch_test::make_plan(scheme, {2, 32}, rows);
}

}  // namespace

TEST_CASE("to_bytes: half a step off, the ends up to one and a half, the same when written again") {
    if (test::forced_is_missing()) return;
    std::mt19937 random(1);
    for (const float size : {1e-30f, 1e-12f, 1e-2f, 1.0f, 40.0f, 1e4f, 1e30f}) {
        for (const float centre : {0.0f, -.5f, 3.0f, 30.0f, -30.0f}) {
            for (int i = 0; i < 60; ++i) {
                Row row = random_row(random, i % 2 == 0 ? 16 : 32, size);
                for (float& x : row) x += centre * size;
                const Bytes bytes(row);
                const Row read = bytes.read();
                CHECK(read == byte_row(row, row.size()));
                const auto& scale = bytes.scale.scale;
                CHECK(batch_test::bf16_value(batch_test::bf16_bits(scale)) == scale);
                const float high = *std::max_element(row.begin(), row.end());
                const float low = *std::min_element(row.begin(), row.end());
                for (std::size_t c = 0; c < row.size(); ++c) {
                    const bool inside = high - row[c] > 1.5f * scale && row[c] - low > 1.5f * scale;
                    REQUIRE(std::abs(row[c] - read[c]) <= (inside ? .5001f : 1.5001f) * scale);
                }
                CHECK(Bytes(read) == bytes);
                Row halves = read;  // as a host of f16 reads them
                for (float& x : halves) x = codec::f16_to_f32(codec::f32_to_f16(x));
                if (size >= 1e-2f && size <= 40.0f) CHECK(Bytes(halves) == bytes);
            }
        }
    }
}

TEST_CASE("to_bytes: nothing is zeros, what is not finite is all NaN") {
    if (test::forced_is_missing()) return;
    for (const float tiny : {0.0f, -0.0f, 1e-36f, 1e-44f}) {
        const Bytes bytes(Row(32, tiny));
        CHECK(bytes.scale.scale == 0);
        CHECK(bytes.codes == std::vector<std::uint8_t>(32));
    }
    const float infinity = std::numeric_limits<float>::infinity();
    for (const float bad : {infinity, -infinity, std::nanf("")}) {
        for (const std::size_t at : {0u, 17u, 31u}) {
            Row row(32, 1.0f);
            row[at] = bad;
            for (const float x : Bytes(row).read()) CHECK(std::isnan(x));
        }
    }
}

TEST_CASE("a cache's 8-bit rows: written, overwritten, cut, shared") {
    if (test::forced_is_missing()) return;
    const auto plan = plan_of("kivi2,rows=8");
    const Shape shape = plan->shape();
    const std::size_t channels = shape.channels();
    Sequence sequence(std::make_shared<Store>(), plan, Retention{.window = 0, .sinks = 0});
    std::mt19937 random(2);
    std::vector<Row> keys, values;
    for (std::uint32_t t = 0; t < 50; ++t) {
        keys.push_back(random_row(random, channels, 1));
        values.push_back(random_row(random, channels, 1));
        sequence.append(keys[t].data(), values[t].data(), 1);
    }
    const auto check = [&](const Sequence& its, std::uint32_t count) {
        for (std::uint32_t t = 0; t < count; ++t) {
            Row key(channels), value(channels);
            its.read_key(t, key.data());
            its.read_value(t, value.data());
            for (const auto& [read, given] : {std::pair{&key, &keys[t]}, {&value, &values[t]}}) {
                Row want = byte_row(*given, shape.head_dim);
                for (float& x : want) x = codec::f16_to_f32(codec::f32_to_f16(x));
                CHECK(*read == want);
            }
        }
    };
    check(sequence, 50);
    const Sequence fork = sequence.fork();
    const std::vector<Row> before = keys;
    for (const std::uint32_t cell : {0u, 33u, 49u}) {
        keys[cell] = random_row(random, channels, 3);
        sequence.write_keys({&cell, 1}, keys[cell].data(), channels);
    }
    check(sequence, 50);
    const std::vector<Row> after = std::exchange(keys, before);
    check(fork, 50);
    keys = after;
    sequence.truncate(40);
    const std::uint32_t far = 45;  // cells 40 to 44 are zeros again
    sequence.write_keys({&far, 1}, keys[far].data(), channels);
    check(sequence, 40);
    for (std::uint32_t t = 40; t < 45; ++t) {
        Row key(channels, 1);
        sequence.read_key(t, key.data());
        CHECK(key == Row(channels));
    }
}

TEST_CASE("an exact block of 8-bit rows is little over half of one of f16") {
    const auto bytes = plan_of("kivi2,rows=8"), halves = plan_of("kivi2");
    CHECK(bytes->exact_bytes() * 64 == halves->exact_bytes() * 35);  // 3 bytes for 32 channels
    CHECK(bytes->packed_bytes() == halves->packed_bytes());
}
