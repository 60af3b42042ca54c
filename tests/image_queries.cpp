// A saved sequence or batch goes on exactly as the unsaved one would: images keep query energies.

#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

#include "image_case.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace image_test;

namespace {

constexpr Shape shape{2, 64};
constexpr std::uint32_t heads = 4;

// Rows and queries of a channel's own size, for `tokens` tokens of `sequences` sequences.
struct Text {
    std::vector<float> keys, values, queries;
    std::uint32_t tokens;

    Text(std::mt19937& random, std::uint32_t sequences, std::uint32_t its_tokens)
        : tokens(its_tokens) {
        std::normal_distribution<float> normal;
        std::vector<float> size(std::size_t{heads} * shape.head_dim);
        for (float& x : size) x = std::exp2(1.5f * normal(random));
        const std::size_t rows = std::size_t{sequences} * tokens;
        for (std::size_t i = 0; i < rows * shape.channels(); ++i) {
            keys.push_back(size[i % shape.channels()] * normal(random));
            values.push_back(normal(random));
        }
        for (std::size_t i = 0; i < rows * size.size(); ++i)
            queries.push_back(size[size.size() - 1 - i % size.size()] * normal(random));
    }

    // A model's step over tokens [first, first + count).
    void step(Batch& batch, std::uint32_t first, std::uint32_t count) const {
        const std::size_t row = shape.channels(), q = std::size_t{heads} * shape.head_dim;
        const BatchStrides strides{tokens * row, shape.head_dim, row};
        batch.append({keys.data() + first * row, RowType::f32, strides},
                     {values.data() + first * row, RowType::f32, strides}, count);
        if (batch.wants_queries())
            batch.update_query_stats(queries.data() + first * q, {tokens * q, shape.head_dim, q},
                                     count, heads);
        batch.pack();
    }
    void step(Sequence& sequence, std::uint32_t first, std::uint32_t count) const {
        const std::size_t row = shape.channels(), q = std::size_t{heads} * shape.head_dim;
        sequence.append(keys.data() + first * row, values.data() + first * row, count);
        if (sequence.wants_queries())
            sequence.update_query_stats(
                {queries.data() + first * q, q, shape.head_dim, count, heads});
        sequence.pack();
    }
};

// All presets that weigh keys by queries, and others.
std::vector<const Preset*> weighing() {
    std::vector<const Preset*> found;
    for (const Preset& preset : presets()) {
        if (plan_of(preset.scheme.base, shape).wants_queries()) found.push_back(&preset);
    }
    return found;
}

}  // namespace

TEST_CASE("saved anywhere, a sequence and a batch go on to the last bit") {
    std::mt19937 random(1);
    REQUIRE(weighing().size() > 2);
    int before = 0, behind = 0;
    for (const Preset* preset : weighing()) {
        for (int round = 0; round < 6; ++round) {
            const Retention retention{.window = static_cast<std::uint32_t>(random() % 40),
                                      .sinks = static_cast<std::uint32_t>(random() % 3) * 64};
            const auto plan = std::make_shared<const Plan>(plan_of(preset->scheme.base, shape));
            const auto total = 420 + static_cast<std::uint32_t>(random() % 300);
            const auto cut = 1 + static_cast<std::uint32_t>(random()) % (total - 1);
            INFO(preset->name, ": ", cut, " of ", total, ", window ", retention.window, ", sinks ",
                 retention.sinks);
            const Text text(random, 2, total);
            Batch batch(lowkv::test::make_store(), plan, retention, 2);
            Sequence sequence(lowkv::test::make_store(), plan, retention);
            const auto both = [&](Batch& b, Sequence& s, std::uint32_t from, std::uint32_t to,
                                  std::mt19937 steps) {
                while (from < to) {
                    const auto count =
                        std::min(to - from, 1 + static_cast<std::uint32_t>(steps()) % 60);
                    text.step(b, from, count);
                    text.step(s, from, count);
                    from += count;
                }
            };
            both(batch, sequence, 0, cut, random);
            ++(batch.packed_end() > batch.packed_first() ? behind : before);
            Batch loaded = Batch::load(batch.save(), lowkv::test::make_store(), plan, retention);
            Sequence again =
                load_sequence(save_sequence(sequence), lowkv::test::make_store(), plan, retention);
            CHECK(loaded.wants_queries() == batch.wants_queries());
            CHECK(loaded.save() == batch.save());
            CHECK(save_sequence(again) == save_sequence(sequence));
            both(batch, sequence, cut, total, random);
            both(loaded, again, cut, total, random);
            CHECK(loaded.save() == batch.save());
            CHECK(save_sequence(again) == save_sequence(sequence));
            // A range is the batch without the others.
            if (batch.packed_end() > batch.packed_first()) {
                Batch part = batch.fork();
                part.truncate(part.packed_end());
                CHECK(batch.save(0, batch.packed_end()) == part.save());
            }
        }
    }
    CHECK(before > 5);
    CHECK(behind > 5);
}

TEST_CASE("sequences of one image have seen their own queries, or none") {
    std::mt19937 random(2);
    const auto plan = std::make_shared<const Plan>(plan_of(parse_scheme("lowkv2.8").base, shape));
    const Retention retention{.window = 0, .sinks = 0};
    const Text text(random, 1, 256);
    Batch batch(lowkv::test::make_store(), plan, retention, 3);
    const std::size_t row = shape.channels(), q = std::size_t{heads} * shape.head_dim;
    const auto append = [&](Batch& its, std::uint32_t first, std::uint32_t count) {
        const BatchStrides strides{0, shape.head_dim, row};  // the same rows in each
        its.append({text.keys.data() + first * row, RowType::f32, strides},
                   {text.values.data() + first * row, RowType::f32, strides}, count);
    };
    append(batch, 0, 100);
    for (std::uint32_t i = 1; i < 3; ++i)
        batch.update_query_stats(i,
                                 {text.queries.data() + i * 50 * q, q, shape.head_dim, 100, heads});
    Batch loaded = Batch::load(batch.save(), lowkv::test::make_store(), plan, retention);
    for (Batch* its : {&batch, &loaded}) {
        append(*its, 100, 28);
        its->pack();
        REQUIRE(its->packed_end() == 128);
    }
    CHECK(loaded.save() == batch.save());
    const auto alone = [&](std::uint32_t sequence) {
        Batch copy = loaded.fork();
        copy.select({&sequence, 1});
        return copy.save();
    };
    CHECK(alone(0) != alone(1));
    CHECK(alone(1) != alone(2));
}

TEST_CASE("an image of version 2 has no queries and is read; records that can't be are refused") {
    std::mt19937 random(3);
    const auto plan = std::make_shared<const Plan>(plan_of(parse_scheme("lowkv2.8").base, shape));
    const Retention retention{.window = 0, .sinks = 0};
    const Text text(random, 1, 256);
    Sequence sequence(lowkv::test::make_store(), plan, retention);
    text.step(sequence, 0, 100);
    const Bytes image = save_sequence(sequence);
    const auto load = [&](const Bytes& bytes) {
        return load_sequence(bytes, lowkv::test::make_store(), plan, retention);
    };
    ImageHeader header = read_image(image);
    REQUIRE(header.queries);
    const std::size_t at = lay_out(header).queries;
    header.queries = false;
    Bytes old(image.begin(), image.begin() + static_cast<std::ptrdiff_t>(at));
    seal_image(header, old);
    const auto put = [](Bytes bytes, std::size_t place, std::uint32_t value) {
        std::memcpy(bytes.data() + place, &value, sizeof value);
        reseal(bytes);
        return bytes;
    };
    old = put(old, 8, 2);
    Sequence loaded = load(old);
    CHECK(loaded.size() == 100);
    CHECK(save_sequence(loaded).size() == old.size());
    const auto refused = [&](const Bytes& bytes, const char* words) {
        CHECK_THROWS_WITH_AS(load(bytes), doctest::Contains(words), Error);
    };
    refused(put(image, 8, 2), "flags: 2; legal: 0 to 1");
    refused(put(image, 8, 1), "version 1; this lowkv reads versions 2 and 4");
    refused(put(image, 8, 3), "version 3");
    refused(put(image, 76, 4), "flags: 4; legal: 0 to 3");
    refused(put(image, at, 513), "query energies of 513 tokens and 2 heads");
    refused(put(image, at, 0), "query energies of 0 tokens");
    refused(put(image, at + 4, 0), "and 0 heads");
    refused(put(image, at + 4, 1u << 31), "heads; legal");
    refused(put(image, at + 8, 3), "query energies of kind 3");
    refused(put(image, at + 12, 1), "legal: 0 to 2, 0");
    // Whatever the sums are, what is packed by them is harmless.
    for (const std::uint32_t bits : {0x7fc00000u, 0x7f800000u, 0xff800000u, 0xbf800000u}) {
        Sequence odd = load(put(image, at + 16 + 4 * (random() % 128), bits));
        text.step(odd, 100, 156);
        CHECK(odd.packed(1));
    }
    // Means that are kept, of which one is as large as any, and the sum no larger.
    Sequence largest = load(put(put(image, at + 8, 2), at + 16, 0x7f7fffff));
    text.step(largest, 100, 156);
    CHECK(largest.packed(1));
    // A scheme that weighs nothing by them has none.
    const auto other = std::make_shared<const Plan>(plan_of(parse_scheme("kivi2").base, shape));
    ImageHeader kivi;
    kivi.identity = image_identity(*other, retention);
    kivi.queries = true;
    Bytes bytes(lay_out(kivi).bytes);
    seal_image(kivi, bytes);
    CHECK_THROWS_WITH_AS(load_sequence(bytes, lowkv::test::make_store(), other, retention),
                         doctest::Contains("weighs no keys by them"), Error);
}
