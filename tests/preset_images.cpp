// The bytes of every preset, as they were: an image of a sequence that packed, for each head size,
// by its hash. What is meant to change them changes the list too, and says why in CHANGELOG:
//
//     LOWKV_WRITE_HASHES=tests/preset_images.inc build/release/bin/test_preset_images

#include <doctest/doctest.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "image_case.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/query_energy.h"
#include "lowkv/scheme.h"
#include "lowkv/serial.h"
#include "xxh64.h"

using namespace lowkv;

namespace {

using Key = std::pair<std::string, std::uint32_t>;  // preset, head_dim

const std::map<Key, std::uint64_t>& stored() {
    static const std::map<Key, std::uint64_t> table = {
#include "preset_images.inc"
    };
    return table;
}

constexpr std::uint32_t heads = 2, query_heads = 4, more = 37;

// Multiples of 1/256: exact in f32. Channels differ in spread, some are biased, as keys are.
std::vector<float> rows(std::mt19937& random, std::uint32_t tokens, std::uint32_t channels) {
    std::vector<float> out;
    for (std::uint32_t i = 0; i < tokens * channels; ++i) {
        const std::uint32_t c = i % channels;
        const int noise = static_cast<int>(random() % 1024) - 512;
        out.push_back(
            static_cast<float>(noise * static_cast<int>(1 + c % 5) + (c % 31 == 7 ? 3000 : 0)) /
            256.0f);
    }
    return out;
}

// Of three packed blocks and an open one; the queries' energies as an engine gives them. Nothing
// where a preset has no plan for such heads.
std::optional<std::uint64_t> hash_of(const Preset& preset, std::uint32_t head_dim) {
    std::shared_ptr<const Plan> plan;
    try {
        plan = std::make_shared<const Plan>(
            image_test::plan_of(preset.scheme.base, Shape{heads, head_dim}));
    } catch (const Error&) {
        return std::nullopt;
    }
    Sequence sequence(std::make_shared<Store>(), plan, Retention{.window = 16, .sinks = 4});
    std::mt19937 random(12345 + head_dim);
    const std::uint32_t step = plan->block_tokens() + more;
    for (int i = 0; i < 3; ++i) {
        const auto keys = rows(random, step, heads * head_dim);
        const auto values = rows(random, step, heads * head_dim);
        const auto queries = rows(random, step, query_heads * head_dim);
        sequence.append(keys.data(), values.data(), step);
        if (plan->wants_queries())
            sequence.update_query_stats({.data = queries.data(),
                                         .token_stride = std::size_t{query_heads} * head_dim,
                                         .head_stride = head_dim,
                                         .tokens = step,
                                         .heads = query_heads});
        sequence.pack();
    }
    return xxh64(save_sequence(sequence));
}

}  // namespace

TEST_CASE("presets' images are bit for bit what they were") {
    std::map<Key, std::uint64_t> found;
    for (const Preset& preset : presets())
        for (const std::uint32_t head_dim : {64u, 128u, 256u})
            if (const auto hash = hash_of(preset, head_dim))
                found[{std::string(preset.name), head_dim}] = *hash;
    if (const char* path = std::getenv("LOWKV_WRITE_HASHES"); path != nullptr) {
        std::FILE* file = std::fopen(path, "w");
        REQUIRE(file != nullptr);
        for (const auto& [key, hash] : found)
            std::fprintf(file, "{{\"%s\", %u}, 0x%016" PRIx64 "},\n", key.first.c_str(), key.second,
                         hash);
        std::fclose(file);
        return;
    }
#ifdef LOWKV_GUESTS  // whose presets are in the list
    CHECK(found.size() == stored().size());
#endif
    for (const auto& [key, hash] : found) {
        INFO(key.first << ", head_dim " << key.second);
        REQUIRE(stored().contains(key));
        CHECK(stored().at(key) == hash);
    }
}
