// The bytes that a batch's image and a host's pages have, as they were, on every instruction set.
// tests/preset_images.cpp has the images of all presets, tests/plugin/saved_bytes.cpp llama.cpp's
// states. What is meant to change them says why in CHANGELOG.

#include <doctest/doctest.h>

#include <cinttypes>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "batch_common.h"
#include "lowkv/batch.h"
#include "lowkv/paged.h"
#include "xxh64.h"

using namespace lowkv;

namespace {

constexpr Shape shape{2, 64};
constexpr std::uint32_t heads = 4, tokens = 3 * 128 + 37, page_tokens = 128;

struct Golden {
    const char* scheme;
    std::uint64_t image, pages, whole_pages;
};
constexpr Golden golden[] = {
    {"lowkv2.8", 0x4f54aa706974bbc5, 0x8a62b322b5c2d056, 0x82d2c19856b11d74},
    {"lowkv4", 0x3004ab08dd218961, 0x1063cda8bdc04676, 0x6f8937a321c0b7df},
    {"kivi2", 0x31fb54f39273a3af, 0xc63d6d465c2045d7, 0xb9981df50bdce370},
};

std::string hex(std::uint64_t hash) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%016" PRIx64, hash);
    return text;
}

// Multiples of 1/256: exact in f32. Channels differ in spread, some are biased, as keys are.
std::vector<float> rows(unsigned seed, std::size_t count, std::size_t channels) {
    std::mt19937 random(seed);
    std::vector<float> out;
    for (std::size_t i = 0; i < count * channels; ++i) {
        const std::size_t c = i % channels;
        const int noise = static_cast<int>(random() % 1024) - 512;
        out.push_back(
            static_cast<float>(noise * static_cast<int>(1 + c % 5) + (c % 31 == 7 ? 3000 : 0)) /
            256.0f);
    }
    return out;
}

std::uint64_t image_of(const std::string& scheme) {
    const auto plan = batch_test::make_plan(scheme, shape, RowType::f16);
    Batch batch(std::make_shared<Store>(), plan, {.window = 16, .sinks = 4}, 2);
    const auto keys = rows(1, 2 * tokens, shape.channels()),
               values = rows(2, 2 * tokens, shape.channels()),
               queries = rows(3, 2 * tokens, std::size_t{heads} * shape.head_dim);
    const BatchStrides strides{std::size_t{tokens} * shape.channels(), shape.head_dim,
                               shape.channels()};
    batch.append({keys.data(), RowType::f32, strides}, {values.data(), RowType::f32, strides},
                 tokens);
    const std::size_t width = std::size_t{heads} * shape.head_dim;
    batch.update_query_stats(queries.data(), {tokens * width, shape.head_dim, width}, tokens,
                             heads);
    batch.pack();
    return xxh64(batch.save());
}

// Of two sequences; the second begins with the first one's first page.
std::uint64_t pages_of(const std::string& scheme, bool whole) {
    const auto plan = batch_test::make_plan(scheme, shape, RowType::f16);
    const std::size_t bytes = whole ? PagedLayer::whole_page_bytes(*plan, page_tokens, 4)
                                    : PagedLayer::page_bytes(*plan, page_tokens);
    const std::size_t stride = (bytes + 63) / 64 * 64;
    constexpr std::uint32_t pages = 8;
    const DeviceMemory memory(*cpu_device(), pages * stride);
    std::fill_n(memory.data(), pages * stride, std::byte{});
    PagedLayer layer(std::make_shared<Store>(), plan, {.window = 0, .sinks = 4}, 0, page_tokens,
                     {memory.data(), stride, pages, whole}, 0);
    const std::size_t width = std::size_t{heads} * shape.head_dim;
    AttentionWorkspace workspace;
    const auto step = [&](const std::vector<std::int32_t>& table, std::uint32_t cells,
                          std::uint32_t count) {
        std::vector<std::int64_t> slots;
        for (std::uint32_t cell = cells - count; cell < cells; ++cell)
            slots.push_back(std::int64_t{table[cell / page_tokens]} * page_tokens +
                            cell % page_tokens);
        const auto keys = rows(cells, count, shape.channels()),
                   values = rows(cells + 1, count, shape.channels()),
                   q = rows(cells + 2, count, width);
        std::vector<float> out(q.size());
        layer.write({keys.data(), RowType::f32, shape.head_dim, shape.channels()},
                    {values.data(), RowType::f32, shape.head_dim, shape.channels()}, slots);
        AttentionIO io;
        io.q = q.data();
        io.out = out.data();
        io.q_token_stride = io.out_token_stride = width;
        io.q_head_stride = io.out_head_stride = shape.head_dim;
        io.heads = heads;
        const PagedSequence one{table, cells, count, 0};
        layer.attend(std::span(&one, 1), io, {}, workspace);
    };
    step({5, 2, 0}, 200, 200);
    step({5, 2, 0}, 384, 184);
    step({5, 7}, 256, 128);
    std::vector<std::byte> all;
    for (const std::size_t page : {5u, 2u, 0u, 7u})
        all.insert(all.end(), memory.data() + page * stride, memory.data() + page * stride + bytes);
    CHECK(layer.stats().packed == 4);
    return xxh64(all);
}

}  // namespace

TEST_CASE("images of batches and pages are bit for bit what they were") {
    for (const Golden& its : golden) {
        INFO(std::string(its.scheme));
        CHECK(hex(image_of(its.scheme)) == hex(its.image));
        CHECK(hex(pages_of(its.scheme, false)) == hex(its.pages));
        CHECK(hex(pages_of(its.scheme, true)) == hex(its.whole_pages));
    }
}
