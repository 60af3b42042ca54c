// lowkv/format.h and lowkv/part.h are enough to read packed blocks, in C99 (format_reader.c), and
// rounds there as in C++. tests/CMakeLists.txt compiles it as CUDA and OpenCL C, where their
// compilers are.

#include "lowkv/part.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "codec/small_floats.h"
#include "format_reader.h"
#include "lowkv/codec.h"

namespace {

using namespace lowkv;

lowkv_head head_of(const Plan& plan, Part part) {
    const Codec& codec = part == Part::keys ? plan.scheme().key : plan.scheme().value;
    return {.width = static_cast<std::uint32_t>(codec.width),
            .tokens = plan.block_tokens(),
            .head_dim = plan.shape().head_dim,
            .group = row_of(codec.group).size,
            .by_channel = codec.axis == Axis::channel,
            .keys = part == Part::keys,
            .has_zeros = 1,
            .has_mean = 0,
            .metadata = static_cast<std::uint32_t>(codec.metadata)};
}

}  // namespace

TEST_CASE("a reader in C99 finds in a packed block what decode_block() finds") {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (const char* scheme :
         {"kivi2", "kivi4", "int8", "k=channel-1.5-g64,v=token-3-g32-fp8",
          "k=token-3-g32-fp8,v=channel-3-g128", "k=channel-4-g32-fp8,v=token-8-g64"}) {
        for (const Shape shape : {Shape{2, 64}, Shape{1, 80}}) {
            CAPTURE(scheme);
            CAPTURE(shape.head_dim);
            const Plan plan(parse_scheme(scheme).base, shape);
            std::vector<std::uint16_t> exact(plan.exact_bytes() / 2), decoded(exact.size());
            for (auto& x : exact) x = codec::f32_to_f16(normal(random));
            std::vector<std::byte> packed(plan.packed_bytes());
            const auto bytes = [](std::vector<std::uint16_t>& x) {
                return reinterpret_cast<std::byte*>(x.data());
            };
            encode_block(plan, bytes(exact), packed.data(), 0, shape.kv_heads);
            decode_block(plan, packed.data(), bytes(decoded));
            for (const Part part : {Part::keys, Part::values}) {
                const lowkv_head head = head_of(plan, part);
                const bool keys = part == Part::keys;
                const std::byte* from = packed.data() + (keys ? 0 : plan.keys().bytes());
                const std::uint16_t* rows = decoded.data() + (keys ? 0 : decoded.size() / 2);
                REQUIRE(lowkv_lay_out(head).bytes == plan.part(part).head_bytes());
                for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
                    const auto* section = reinterpret_cast<const std::uint8_t*>(
                        from + plan.part(part).section_offset(h));
                    for (std::uint32_t t = 0; t < head.tokens; ++t) {
                        for (std::uint32_t c = 0; c < head.head_dim; ++c) {
                            const std::uint32_t channel = h * shape.head_dim + c;
                            const std::uint16_t expected =
                                rows[keys ? lowkv_exact_key(head.tokens, channel, t)
                                          : lowkv_exact_value(shape.channels(), channel, t)];
                            REQUIRE(format_to_f16(format_element(section, &head, t, c)) ==
                                    expected);
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("C99 rounds as C++ does") {
    std::mt19937 random(2);
    for (int i = 0; i < 200000; ++i) {
        const auto bits = static_cast<std::uint32_t>(random());
        float value = 0;
        std::memcpy(&value, &bits, sizeof value);
        REQUIRE(format_to_f16(value) == lowkv_f32_to_f16(value));
        REQUIRE(format_to_e4m3(value) == lowkv_f32_to_e4m3(value));
    }
    for (unsigned byte = 0; byte < 256; ++byte) {
        const auto b = static_cast<std::uint8_t>(byte);
        const float c = format_from_e4m3(b), cpp = lowkv_e4m3_to_f32(b);
        REQUIRE((std::isnan(c) ? std::isnan(cpp) : c == cpp));
    }
}

TEST_CASE("the multiplier is the smallest power of two with which the largest magnitude fits") {
    CHECK(lowkv_e4m3_multiplier(0) == 1.0f);
    std::mt19937 random(3);
    std::uniform_real_distribution<float> exponent(-60, 60);
    std::vector<float> values{448, 464, std::nextafter(464.0f, 500.0f), 896, 928, 1, 0x1p-9f};
    for (int i = 0; i < 20000; ++i) values.push_back(std::exp2(exponent(random)));
    // 464 is halfway between 448 and what would come next.
    const auto fits = [](float largest, float multiplier) { return largest / multiplier <= 464; };
    for (const float largest : values) {
        CAPTURE(largest);
        const float multiplier = lowkv_e4m3_multiplier(largest);
        int ignored = 0;
        REQUIRE(std::frexp(multiplier, &ignored) == 0.5f);
        REQUIRE(format_multiplier(largest) == multiplier);
        REQUIRE(fits(largest, multiplier));
        REQUIRE_FALSE(fits(largest, multiplier / 2));
    }
}
