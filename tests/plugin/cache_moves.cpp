// What llama.cpp does to many rows at once: context shifts, saved states, copies of streams. Each
// touches a unit once, however its rows lie among those of others.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "buffer.h"
#include "ggml_cache.h"

namespace {

using namespace lowkv::test;

constexpr const char* scheme = "kivi2,window=32,sinks=0";
constexpr std::uint32_t cells = 4096;

// One sequence whose cells lie anywhere.
Cells write_scattered(Cache& cache, std::uint32_t tokens) {
    Cells order = range(0, cells);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    order.resize(tokens);
    constexpr std::uint32_t batch = 300;
    for (std::uint32_t first = 0; first < tokens; first += batch) {
        const auto at = [&](std::uint32_t i) { return order.begin() + std::min(i, tokens); };
        REQUIRE(cache.step({at(first), at(first + batch)}, {at(0), at(first)}) == fine);
    }
    return order;
}

std::vector<float> floats(const Bytes& bytes) {
    std::vector<float> values(bytes.size() / sizeof(ggml_fp16_t));
    ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(bytes.data()), values.data(),
                          static_cast<std::int64_t>(values.size()));
    return values;
}

// What ggml itself makes of keys that are turned.
std::vector<float> turned(const Bytes& keys, const std::vector<std::int32_t>& shifts, int pairs) {
    const Context context = new_context();
    ggml_context* c = context.get();
    ggml_cgraph* graph = ggml_new_graph(c);
    ggml_tensor* x = ggml_new_tensor_3d(c, GGML_TYPE_F32, head_dim, kv_heads, cells);
    ggml_tensor* by = ggml_new_tensor_1d(c, GGML_TYPE_I32, cells);
    ggml_tensor* y = ggml_rope_ext(c, x, by, nullptr, head_dim, pairs, 0, 10000.0f, 1.0f, 0.0f,
                                   1.0f, 32.0f, 1.0f);
    ggml_build_forward_expand(graph, y);
    const Buffer memory = host_memory(c);
    const std::vector<float> values = floats(keys);
    std::copy(values.begin(), values.end(), static_cast<float*>(x->data));
    std::copy(shifts.begin(), shifts.end(), static_cast<std::int32_t*>(by->data));
    const ggml_backend_ptr cpu(ggml_backend_cpu_init());
    REQUIRE(ggml_backend_graph_compute(cpu.get(), graph) == fine);
    const auto* data = static_cast<const float*>(y->data);
    return {data, data + ggml_nelements(y)};
}

// How many rows of a cell differ by more than `allowed` of their largest number.
std::size_t rows_apart(std::span<const float> a, std::span<const float> b, float allowed) {
    std::size_t apart = 0;
    for (std::size_t row = 0; row < a.size(); row += channels)
        if (distance_of(a.subspan(row, channels), b.subspan(row, channels)) > allowed) ++apart;
    return apart;
}

// The cells that are not among `taken`.
Cells others(const Cells& taken) {
    Cells rest;
    for (const std::uint32_t cell : range(0, cells))
        if (std::ranges::find(taken, cell) == taken.end()) rest.push_back(cell);
    return rest;
}

// Stream 1 becomes stream 0, one tensor's part of it.
void copy_stream(ggml_tensor* tensor) {
    const Context context = new_context();
    ggml_tensor* streams[2];
    for (std::size_t s = 0; s < 2; ++s) {
        streams[s] =
            ggml_view_2d(context.get(), tensor, channels, cells, row_bytes, s * row_bytes * cells);
        REQUIRE(ggml_backend_view_init(streams[s]) == fine);
    }
    ggml_backend_tensor_copy(streams[0], streams[1]);
}

void copy_stream(const Cache& cache) {
    for (ggml_tensor* tensor : cache.tensors()) copy_stream(tensor);
}

}  // namespace

TEST_CASE("a context shift leaves packed blocks that move as one as they are") {
    Cache cache(scheme, cells);
    const Cells order = write_scattered(cache, 3000);
    const auto before = lowkv::ggml::stats();
    REQUIRE(before.encoded_blocks > 100);
    REQUIRE(before.reopened_blocks == 0);
    // The older half is dropped by llama.cpp, and the newer half moves: from the middle of a block.
    std::vector<std::int32_t> shifts(cells, 0);
    for (std::size_t i = 1510; i < order.size(); ++i) shifts[order[i]] = -1510;
    REQUIRE(cache.shift(shifts) == fine);
    const auto after = lowkv::ggml::stats();
    CHECK(after.reopened_blocks == layers);
    CHECK(after.encoded_blocks == before.encoded_blocks);  // it stays unquantized
    CHECK(after.moved_blocks == before.encoded_blocks - (1510 + 31) / 32 * layers);
    CHECK(after.cells_packed == before.cells_packed);
}

// Shifts of every kind one after the other, with new tokens between them: a dropped half, a passage
// in the middle, single rows.
TEST_CASE("context shifts turn the keys that they name, and attention sees them turned") {
    for (const char* text : {"exact", "int8", "kivi2", "lowkv2.8", "lowkv4"}) {
        for (const int pairs : {GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX}) {
            CAPTURE(text);
            CAPTURE(pairs);
            Cache cache(std::string(text) + ",window=32,sinks=0", cells);
            Cells order = write_scattered(cache, 3000);
            Cells free = others(order);
            std::mt19937 random(7);
            const auto any = [&](std::size_t n) { return random() % n; };
            for (int round = 0; round < 4; ++round) {
                CAPTURE(round);
                std::vector<std::int32_t> shifts(cells, 0);
                const std::size_t first = 400 + any(order.size() / 2);
                const std::size_t last = round % 2 == 0 ? order.size() : first + any(1000);
                const auto distance = static_cast<std::int32_t>(1 + any(first));
                for (std::size_t i = first; i < std::min(last, order.size()); ++i)
                    shifts[order[i]] = -distance;
                for (int i = 0; i < round; ++i) shifts[order[any(order.size())]] = 5;
                const ggml_tensor* layer = cache.keys(1);  // that of keys(0) has marks
                const std::vector<float> expected = turned(rows_of(layer, 0, cells), shifts, pairs);
                const auto reopened = lowkv::ggml::stats().reopened_blocks;
                REQUIRE(cache.shift(shifts, pairs) == fine);
                const std::vector<float> keys = floats(rows_of(layer, 0, cells));
                // What moves alone is packed once more, with its block.
                const auto packed_again =
                    (lowkv::ggml::stats().reopened_blocks - reopened) / layers * 128;
                CHECK(packed_again <= (3 + round) * 128);
                CHECK(rows_apart(expected, keys, 2e-3f) <= packed_again);
                CHECK(distance_of(expected, keys) < 0.6f);

                if (round % 2 == 0)  // what was dropped is not seen any more
                    order.erase(order.begin() + 200,
                                order.begin() + static_cast<std::ptrdiff_t>(first));
                const Cells more(free.end() - 150, free.end());
                free.resize(free.size() - 150);
                Cache plain("exact", cells);
                copy_rows(cache, plain);
                REQUIRE(plain.step(more, order) == fine);
                lowkv::ggml::set_scheme(text);
                REQUIRE(cache.step(more, order) == fine);
                CHECK(distance_of(plain.result(), cache.result()) < 0.02f);
                order.insert(order.end(), more.begin(), more.end());
            }
            if (std::string(text) != "exact") CHECK(lowkv::ggml::stats().moved_blocks > 20);
        }
    }
}

TEST_CASE("a copied stream takes its moved blocks along, and a cleared cache forgets them") {
    Cache cache(scheme, cells, 2);
    const Cells order = write_scattered(cache, 1000);
    std::vector<std::int32_t> shifts(2 * cells, 0);
    for (const std::uint32_t cell : order) shifts[cell] = -17;
    REQUIRE(cache.shift(shifts) == fine);
    REQUIRE(lowkv::ggml::stats().moved_blocks > 0);
    copy_stream(cache);
    for (const ggml_tensor* tensor : cache.tensors())
        CHECK(rows_of(tensor, 0, cells) == rows_of(tensor, cells, cells));
    std::fill_n(shifts.begin(), cells, 0);
    std::fill_n(shifts.begin() + cells, cells, 30);
    const Bytes before = rows_of(cache.keys(0), 0, cells);
    REQUIRE(cache.shift(shifts) == fine);
    CHECK(rows_of(cache.keys(0), 0, cells) == before);
    CHECK(rows_of(cache.keys(0), cells, cells) != before);

    cache.clear();
    Cache fresh(scheme, cells, 2);
    write_scattered(fresh, 1000);
    write_scattered(cache, 1000);
    CHECK(rows_of(cache.keys(0), 0, cells) == rows_of(fresh.keys(0), 0, cells));
}

TEST_CASE("reading scattered rows decodes each block once") {
    Cache cache(scheme, cells);
    write_scattered(cache, 3000);
    for (const ggml_tensor* tensor : cache.tensors()) {
        const auto& layer = *lowkv::ggml::cache_tensor(tensor)->layer;
        Bytes one_by_one;
        for (std::uint32_t cell = 0; cell < cells; ++cell) {
            const Bytes row = rows_of(tensor, cell, 1);
            one_by_one.insert(one_by_one.end(), row.begin(), row.end());
        }
        const auto before = layer.decoded_blocks();
        const Bytes at_once = rows_of(tensor, 0, cells);
        CHECK(layer.decoded_blocks() - before == lowkv::ggml::stats().encoded_blocks / layers);
        CHECK(at_once == one_by_one);
    }
}

TEST_CASE("a copied stream takes its cells' ages along once") {
    Cache cache(scheme, cells, 2);
    write_scattered(cache, 1000);
    auto* buffer = lowkv::ggml::cache_tensor(cache.keys(0))->buffer;
    const auto copy_all = [&] {
        for (std::size_t layer = 0; layer < layers; ++layer) {
            copy_stream(cache.keys(layer));
            // A second copy of the tracker would take this away.
            if (layer == 0) buffer->tracker(1).poison(cells - 1);
            copy_stream(cache.values(layer));
        }
    };
    const auto marked = [&] { return buffer->tracker(1).sees_poison(nullptr, 0, 1, cells); };
    copy_all();
    CHECK(marked());
    for (const ggml_tensor* tensor : cache.tensors())
        CHECK(rows_of(tensor, 0, cells - 1) == rows_of(tensor, cells, cells - 1));
    CHECK(buffer->tracker(0).groups().packed_count() == buffer->tracker(1).groups().packed_count());

    // What has changed since is copied again.
    const auto packed = buffer->tracker(1).groups().packed_count();
    Cells more = range(0, cells);
    REQUIRE(cache.step({5, 6, 7}, {}) == fine);
    copy_stream(cache.keys(0));
    CHECK_FALSE(marked());
    CHECK(buffer->tracker(1).groups().packed_count() <= packed);
    for (const ggml_tensor* tensor : {cache.keys(0), cache.values(0)})
        CHECK(rows_of(tensor, 0, cells) == rows_of(tensor, cells, cells));
}
