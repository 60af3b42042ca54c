// Images of batches: whole, of a range, and what is refused.

#include <doctest/doctest.h>

#include <algorithm>

#include "batch_common.h"
#include "cache_common.h"
#include "image_case.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace batch_test;

TEST_CASE("a batch's image gives the batch back, and it goes on as the other would") {
    for (const char* scheme : {"kivi2,window=20,sinks=4", "lowkv2.8,window=5,sinks=0", "exact"}) {
        for (const RowType type : types) {
            // A bf16 is too short for 255 times a bf16: codes may move by one.
            Held held(scheme, type, 3);
            fill(held.batch, 1, 150);
            held.batch.pack();
            Batch again = Batch::load(held.batch.save(), held.store, held.plan, held.retention);
            CHECK(again.size() == 3);
            for (unsigned i = 0; i < 3; ++i) {
                CHECK(again.save() == held.batch.save());
                CHECK(all_rows(again) == all_rows(held.batch));
                fill(held.batch, 10 + i, 30);
                fill(again, 10 + i, 30);
                held.batch.pack();
                again.pack();
                CHECK(again.packed_end() == held.batch.packed_end());
                again.truncate(again.tokens() - 11);
                held.batch.truncate(held.batch.tokens() - 11);
            }
        }
    }
}

TEST_CASE("an image of a range is the batch without the tokens before it") {
    Held held("kivi2,window=20,sinks=4", RowType::bf16, 2);
    fill(held.batch, 1, 200);
    held.batch.pack();  // [32, 160) is packed
    CHECK(held.batch.packed_end() == 160);
    const std::vector<Row> all = all_rows(held.batch);
    const std::pair<std::uint32_t, std::uint32_t> ranges[] = {
        {0, 32}, {0, 200}, {32, 160}, {64, 190}, {170, 181}, {2, 96}, {40, 40}, {0, 0}};
    for (const auto& [first, last] : ranges) {
        INFO(first, " to ", last);
        if (first == 40 || (first == 2 && last == 96)) {
            CHECK(refused(ErrorCode::invalid_argument, "inside of a packed block",
                          [&] { held.batch.save(first, last + 1); }));
            if (first == 40) continue;
        }
        Batch again =
            Batch::load(held.batch.save(first, last), held.store, held.plan, held.retention);
        CHECK(again.first() == first);
        CHECK(again.tokens() == last);
        const std::vector<Row> rows = all_rows(again);
        REQUIRE(rows.size() == std::size_t{4} * (last - first));
        for (std::uint32_t s = 0; s < 2; ++s) {
            CHECK(std::equal(rows.begin() + s * 2 * (last - first),
                             rows.begin() + (s + 1) * 2 * (last - first),
                             all.begin() + (s * 200 + first) * 2));
        }
        fill(again, 3, 50);
        again.pack();
        CHECK(again.tokens() == last + 50);
    }
    CHECK(refused(ErrorCode::invalid_argument, "it holds", [&] { held.batch.save(0, 201); }));
}

TEST_CASE("an image whose tokens a batch does not have so is refused") {
    Held held("kivi2,window=20,sinks=4", RowType::f16, 2);
    fill(held.batch, 1, 150);
    held.batch.pack();
    const std::vector<std::byte> image = held.batch.save();
    const ImageHeader good = read_image(image);
    REQUIRE(good.spans == std::vector<ImageSpan>{{0, 32, false}, {32, 96, true}, {128, 22, false}});
    const auto load = [&](const std::vector<ImageSpan>& spans, std::uint32_t tokens) {
        ImageHeader header = good;
        header.spans = spans;
        header.tokens = tokens;
        std::vector<std::byte> bytes(lay_out(header).bytes);
        seal_image(header, bytes);
        return Batch::load(bytes, held.store, held.plan, held.retention);
    };
    CHECK(load(good.spans, 150).packed_end() == 128);
    CHECK(load({{32, 96, true}, {128, 22, false}}, 150).first() == 32);
    CHECK(load({{64, 64, true}}, 128).first() == 64);
    CHECK(load({}, 150).first() == 150);
    const auto bad = [&](const std::string& word, const std::vector<ImageSpan>& spans,
                         std::uint32_t tokens) {
        CHECK(refused(ErrorCode::invalid_image, word, [&] { load(spans, tokens); }));
    };
    bad("sinks", {{0, 33, false}, {33, 96, true}}, 129);  // one sink too many
    bad("sinks", {{0, 31, false}, {31, 96, true}}, 127);
    bad("sinks", {{0, 4, false}, {4, 96, true}}, 100);
    bad("sinks", {{0, 96, true}}, 96);
    bad("sinks", {{0, 64, false}, {64, 64, true}}, 128);
    bad("after those before", {{0, 32, false}, {64, 64, true}}, 128);
    bad("more than one", {{32, 32, true}, {64, 32, true}}, 96);
    bad("more than one", {{32, 32, true}, {64, 9, false}, {73, 32, true}}, 105);
    bad("its rows end", {{32, 96, true}}, 118);  // the last block goes past the tokens
    bad("its rows end", {{0, 90, false}}, 91);
    bad("too many", {}, std::uint32_t{1} << 31);
    ImageHeader many = good;
    many.spans.clear();
    many.batch = 1u << 31;
    std::vector<std::byte> bytes(lay_out(many).bytes);
    seal_image(many, bytes);
    CHECK(refused(ErrorCode::invalid_image, "bytes without a row",
                  [&] { Batch::load(bytes, held.store, held.plan, held.retention); }));
    // Another type of rows means other bytes.
    Held other("kivi2,window=20,sinks=4", RowType::bf16, 2);
    CHECK(refused(ErrorCode::invalid_image, "exact rows are f16",
                  [&] { Batch::load(image, other.store, other.plan, other.retention); }));
}

TEST_CASE("sequences with the same spans are one image, whatever the rows") {
    for (const RowType type : types) {
        const auto store = lowkv::test::make_store();
        const auto plan = batch_test::make_plan("kivi2,window=20,sinks=4", shape, type);
        const Retention retention{.window = 20, .sinks = 4};
        std::vector<Sequence> sequences;
        cache_test::Rng rng(7);
        for (int i = 0; i < 3; ++i) {
            Sequence& its = sequences.emplace_back(store, plan, retention);
            cache_test::append(its, rng, 133);
            its.pack();
        }
        const Sequence* pointers[] = {&sequences[0], &sequences[1], &sequences[2]};
        const auto image = save_sequences(pointers);
        const auto again = load_sequences(image, store, plan, retention);
        REQUIRE(again.size() == 3);
        for (std::size_t i = 0; i < 3; ++i)
            CHECK(save_sequence(again[i]) == save_sequence(sequences[i]));
        CHECK(refused(ErrorCode::invalid_image, "a Sequence is one",
                      [&] { load_sequence(image, store, plan, retention); }));
        cache_test::append(sequences[1], rng, 1);
        CHECK(refused(ErrorCode::invalid_argument, "other plans, sizes",
                      [&] { save_sequences(pointers); }));
    }
}
