// Images of batches: what is refused, sequences as a batch of one. blocks_batch.cpp has the rest.

#include <doctest/doctest.h>

#include "batch_common.h"
#include "image_case.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace batch_test;

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

TEST_CASE("what padding is refused for") {
    Held held("kivi2", RowType::f32, 2);
    fill(held.batch, 1, 4);
    const std::vector<std::uint8_t> seen{1, 1, 0, 1};
    CHECK(refused(ErrorCode::invalid_argument, "4 marks for 3 of 4 tokens of 2 sequences",
                  [&] { held.batch.mark_padding(seen, 3); }));
    CHECK(refused(ErrorCode::invalid_argument, "4 marks for 5 of 4 tokens",
                  [&] { held.batch.mark_padding(seen, 5); }));
    held.batch.mark_padding(seen, 2);
    CHECK(refused(ErrorCode::invalid_argument, "its padding can't be saved",
                  [&] { held.batch.save(); }));
    held.batch.truncate(2);
    CHECK(!held.batch.save().empty());
}
