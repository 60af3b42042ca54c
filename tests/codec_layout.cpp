// Where things lie: the units' permutation, offsets and alignment, bits counted from real sizes,
// and the shapes and codecs that a plan refuses.

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "codec/units.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "quantizers/packing.h"
#include "store_code.h"

using namespace lowkv;
using test::store_code;

namespace {

Plan plan_of(const std::string& scheme, Shape shape) {
    return Plan(parse_scheme(scheme).base, shape);
}

std::string refusal(const LayerScheme& layer, Shape shape, ErrorCode code) {
    try {
        const Plan plan(layer, shape);
    } catch (const Error& error) {
        CHECK(error.code() == code);
        return error.what();
    }
    FAIL("accepted head_dim " << shape.head_dim << ", kv_heads " << shape.kv_heads);
    return {};
}

}  // namespace

TEST_CASE("units give every bit of every code a bit of its own") {
    for (const Width width : {Width::one, Width::two, Width::three, Width::four, Width::eight}) {
        const std::uint32_t levels = lowkv_levels(kernels::number_of(width));
        const auto bits = static_cast<std::uint32_t>(std::countr_zero(levels));
        for (const std::uint32_t lanes : {32u, 80u, 128u}) {
            for (const std::uint32_t steps : {32u, 80u, 256u}) {
                if (lanes * steps % 512 != 0) continue;  // no block has such a head
                CAPTURE(bits);
                CAPTURE(lanes);
                CAPTURE(steps);
                const std::size_t bytes = kernels::codes_bytes(width, lanes, steps);
                REQUIRE(bytes == std::size_t{lanes} * steps * bits / 8);
                // Each bit of each code, alone, lands on a bit of its own.
                std::vector<int> taken(bytes * 8);
                std::vector<std::uint8_t> codes(bytes);
                for (std::uint32_t lane = 0; lane < lanes; ++lane) {
                    for (std::uint32_t step = 0; step < steps; ++step) {
                        for (std::uint32_t bit = 0; bit < bits; ++bit) {
                            const auto code = static_cast<std::uint8_t>(1u << bit);
                            store_code(codes.data(), width, steps, lane, step, code);
                            REQUIRE(kernels::load_code(codes.data(), width, steps, lane, step) ==
                                    code);
                            const auto at = std::find_if(codes.begin(), codes.end(),
                                                         [](std::uint8_t b) { return b != 0; });
                            const auto byte = static_cast<std::size_t>(at - codes.begin());
                            for (std::size_t i = 0; i < 8; ++i) {
                                if (*at >> i & 1) ++taken[8 * byte + i];
                            }
                            *at = 0;
                        }
                        if (steps * lanes > 4096) step += 6;  // the search is quadratic
                    }
                }
                const int most = *std::max_element(taken.begin(), taken.end());
                CHECK(most == 1);
                if (steps * lanes <= 4096) {
                    CHECK(*std::min_element(taken.begin(), taken.end()) == 1);
                }
            }
        }
    }
}

TEST_CASE("codes that share bytes lie as densely as they can, and are told apart") {
    constexpr Width width = Width::ternary;
    for (const std::uint32_t lanes : {32u, 80u}) {
        for (const std::uint32_t steps : {32u, 64u, 80u}) {
            if (lanes * steps % 512 != 0) continue;  // no block has such a head
            CAPTURE(lanes);
            CAPTURE(steps);
            const std::size_t tiles = lanes * steps / 64;
            std::vector<std::uint8_t> codes(kernels::codes_bytes(width, lanes, steps));
            CHECK(codes.size() == (tiles + 4) / 5 * 64);
            const auto code_at = [&](std::uint32_t lane, std::uint32_t step) {
                return static_cast<std::uint8_t>((lane * 7 + step * 5 + lane * step) % 3);
            };
            for (std::uint32_t lane = 0; lane < lanes; ++lane) {
                for (std::uint32_t step = 0; step < steps; ++step) {
                    store_code(codes.data(), width, steps, lane, step, code_at(lane, step));
                }
            }
            for (const std::uint8_t byte : codes) REQUIRE(byte < 243);
            for (std::uint32_t lane = 0; lane < lanes; ++lane) {
                for (std::uint32_t step = 0; step < steps; ++step) {
                    REQUIRE(kernels::load_code(codes.data(), width, steps, lane, step) ==
                            code_at(lane, step));
                }
            }
        }
    }
}

TEST_CASE("tiles are packed and unpacked as format.h says, code by code") {
    std::mt19937 random(2);
    for (const Width width :
         {Width::ternary, Width::one, Width::two, Width::three, Width::four, Width::eight}) {
        for (const codec::HeadShape head :
             {codec::HeadShape{80, 32, 32, true}, codec::HeadShape{32, 80, 80, true},
              codec::HeadShape{256, 128, 128, true}, codec::HeadShape{16, 32, 32, true}}) {
            std::vector<std::uint8_t> packed(kernels::codes_bytes(width, head.lanes, head.steps));
            std::vector<std::uint8_t> stored = packed;
            std::vector<codec::CodeTile> tiles(head.steps / 16);
            for (std::uint32_t step = 0; step < head.steps; ++step) {
                for (std::uint32_t lane = 0; lane < head.lanes; ++lane) {
                    const auto code = static_cast<std::uint8_t>(
                        random() % lowkv_levels(kernels::number_of(width)));
                    tiles[step / 16].row[step % 16][lane] = code;
                    store_code(stored.data(), width, head.steps, lane, step, code);
                }
            }
            for (std::uint32_t b = 0; b < tiles.size(); ++b) {
                codec::pack_tile(tiles[b], width, head, b, packed.data());
            }
            CHECK(packed == stored);
            for (std::uint32_t b = 0; b < tiles.size(); ++b) {
                codec::CodeTile tile;
                codec::unpack_tile(packed.data(), width, head, b, tile);
                for (std::uint32_t s = 0; s < 16; ++s) {
                    REQUIRE(std::equal(tile.row[s], tile.row[s] + head.lanes, tiles[b].row[s]));
                }
            }
        }
    }
}

TEST_CASE("bits per element, from real block sizes") {
    struct Count {
        const char* scheme;
        std::uint32_t head_dim;
        double bits;
    };
    for (const Count& c :
         {Count{"kivi2", 64, 3.0}, Count{"kivi2", 128, 3.0}, Count{"kivi4", 64, 5.0},
          Count{"kivi4", 128, 5.0}, Count{"int4", 64, 5.0}, Count{"int4", 128, 5.0},
          Count{"exact", 64, 16.0}, Count{"exact", 80, 16.0}}) {
        CAPTURE(std::string(c.scheme));
        CAPTURE(c.head_dim);
        const Plan plan = plan_of(c.scheme, {4, c.head_dim});
        CHECK(plan.bits_per_element() == c.bits);
        CHECK(plan.key_bits() == c.bits);
        CHECK(plan.value_bits() == c.bits);
        const double elements = 2.0 * plan.block_tokens() * plan.shape().channels();
        CHECK(8.0 * static_cast<double>(plan.packed_bytes()) / elements == c.bits);
    }
    // Keys share a scale and a zero by 32 tokens, values by a head's channels, at most 128.
    for (const auto& [head_dim, of_values] :
         {std::pair{64u, 8.5}, std::pair{128u, 8.25}, std::pair{256u, 8.25}}) {
        const Plan int8 = plan_of("int8", {4, head_dim});
        CHECK(int8.key_bits() == 9);
        CHECK(int8.value_bits() == of_values);
    }
    // A short last group costs whole metadata: 3 groups for 80 channels.
    CHECK(plan_of("kivi2", {1, 80}).value_bits() == 2 + 32.0 * 3 / 80);
    // fp8 halves the metadata, plus a 16-byte header and padding to 64: 144 -> 192 bytes.
    CHECK(plan_of("k=channel-2-g32-fp8,v=exact", {1, 64}).key_bits() == 8.0 * (192 + 512) / 2048);
    CHECK(plan_of("k=channel-2-g32-fp8,v=exact", {1, 64}).value_bits() == 16.0);
}

TEST_CASE("sections are aligned and hold what they say, for every codec and shape") {
    for (const char* axis : {"channel", "token"}) {
        for (const char* rest : {"-2-g32", "-3-g64", "-4-g128-fp8", "-8-g32-fp8"}) {
            const std::string codec = std::string(axis) + rest;
            for (std::uint32_t head_dim = 16; head_dim <= 576; head_dim += 16) {
                const Plan plan = plan_of("k=" + codec + ",v=" + codec, {3, head_dim});
                const auto& part = dynamic_cast<const codec::CodesPart&>(plan.keys());
                const bool by_channel = part.codec.axis == Axis::channel;
                const std::uint32_t grouped = by_channel ? plan.block_tokens() : head_dim;
                const std::size_t width = part.codec.metadata == Metadata::fp16 ? 2 : 1;
                CHECK(part.group == std::min(row_of(part.codec.group).size, grouped));
                CHECK(part.group_rows == (grouped + part.group - 1) / part.group);
                CHECK(part.row_entries == (by_channel ? head_dim : plan.block_tokens()));
                CHECK(part.metadata_at == (width == 2 ? 0 : 16));
                CHECK(part.codes_at % 64 == 0);
                CHECK(part.codes_at >=
                      part.metadata_at + 2 * width * part.group_rows * part.row_entries);
                CHECK(part.head_bytes() % 64 == 0);
                const auto bits =
                    static_cast<std::uint32_t>(std::countr_zero(part.codec.level_count()));
                CHECK(part.head_bytes() >=
                      part.codes_at + std::size_t{head_dim} * plan.block_tokens() * bits / 8);
                CHECK(part.bytes() == 3 * part.head_bytes());
                CHECK(plan.packed_bytes() == plan.keys().bytes() + plan.values().bytes());
            }
        }
    }
}

TEST_CASE("a block is 32 tokens, or the longest group that runs over tokens") {
    const auto tokens = [](const char* scheme) { return block_tokens(parse_scheme(scheme).base); };
    CHECK(tokens("exact") == 32);
    CHECK(tokens("int8") == 32);
    CHECK(tokens("kivi2") == 32);
    CHECK(tokens("k=channel-2-g64,v=token-2-g128") == 64);
    CHECK(tokens("k=channel-2-g32,v=channel-2-g128") == 128);
    const Plan plan = plan_of("k=channel-2-g32,v=channel-2-g128", {1, 64});
    CHECK(dynamic_cast<const codec::CodesPart&>(plan.keys()).group_rows == 4);
}

TEST_CASE("an exact part is stored as in an exact block") {
    const Plan plan = plan_of("k=exact,v=token-2-g32", {2, 64});
    CHECK(plan.keys().bytes() == plan.exact_part_bytes());
    CHECK(plan.values().bytes() < plan.exact_part_bytes());
}

TEST_CASE("illegal shapes and codecs are refused with what is legal") {
    const LayerScheme kivi2 = parse_scheme("kivi2").base;
    for (const std::uint32_t head_dim : {0u, 8u, 72u, 592u, 4000000000u}) {
        const std::string message = refusal(kivi2, {2, head_dim}, ErrorCode::invalid_argument);
        CHECK(message.find("head_dim " + std::to_string(head_dim)) != std::string::npos);
        CHECK(message.find("a multiple of 16 from 16 to 576") != std::string::npos);
    }
    for (const std::uint32_t heads : {0u, 4097u, 4294967295u}) {
        const std::string message = refusal(kivi2, {heads, 64}, ErrorCode::invalid_argument);
        CHECK(message.find("kv_heads " + std::to_string(heads)) != std::string::npos);
    }
    LayerScheme illegal = kivi2;
    illegal.key.width = static_cast<Width>(9);
    CHECK(refusal(illegal, {2, 64}, ErrorCode::invalid_scheme).find("2, 3, 4, 8") !=
          std::string::npos);
}
