// What llama.cpp does to many rows at once: context shifts, saved states, copies of streams. Each
// touches a unit once, however its rows lie among those of others.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
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
std::vector<float> turned(const Bytes& keys, const std::vector<std::int32_t>& shifts) {
    const Context context = new_context();
    ggml_context* c = context.get();
    ggml_cgraph* graph = ggml_new_graph(c);
    ggml_tensor* x = ggml_new_tensor_3d(c, GGML_TYPE_F32, head_dim, kv_heads, cells);
    ggml_tensor* by = ggml_new_tensor_1d(c, GGML_TYPE_I32, cells);
    ggml_tensor* y =
        ggml_rope_ext(c, x, by, nullptr, head_dim, 0, 0, 10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
    ggml_build_forward_expand(graph, y);
    const Buffer memory = host_memory(c);
    const std::vector<float> values = floats(keys);
    std::copy(values.begin(), values.end(), static_cast<float*>(x->data));
    std::copy(shifts.begin(), shifts.end(), static_cast<std::int32_t*>(by->data));
    const std::unique_ptr<ggml_backend, Free> cpu(ggml_backend_cpu_init());
    REQUIRE(ggml_backend_graph_compute(cpu.get(), graph) == fine);
    const auto* data = static_cast<const float*>(y->data);
    return {data, data + ggml_nelements(y)};
}

// The largest difference, in parts of the largest magnitude.
double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double most = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        most = std::max<double>(most, std::abs(a[i] - b[i]));
        size = std::max<double>(size, std::abs(a[i]));
    }
    return most / size;
}

}  // namespace

TEST_CASE("a context shift packs each block that it touches once") {
    Cache cache(scheme, cells);
    const Cells order = write_scattered(cache, 3000);
    const auto before = lowkv::ggml::stats();
    REQUIRE(before.encoded_blocks > 100);
    REQUIRE(before.reopened_blocks == 0);
    // The older half is dropped by llama.cpp, and the newer half moves.
    std::vector<std::int32_t> shifts(cells, 0);
    for (std::size_t i = 1504; i < order.size(); ++i) shifts[order[i]] = -1504;
    REQUIRE(cache.shift(shifts) == fine);
    const auto after = lowkv::ggml::stats();
    const auto moved = (before.encoded_blocks / layers - 1504 / 32) * layers;
    CHECK(after.reopened_blocks == moved);
    CHECK(after.encoded_blocks - before.encoded_blocks == moved);
    CHECK(after.cells_packed == before.cells_packed);
}

TEST_CASE("a context shift turns the keys that it names, and no others") {
    for (const bool packed : {false, true}) {
        CAPTURE(packed);
        Cache cache(packed ? "int8,window=32,sinks=0" : "exact", cells);
        const Cells order = write_scattered(cache, 3000);
        std::vector<std::int32_t> shifts(cells, 0);
        for (std::size_t i = 0; i < order.size(); i += 3)
            shifts[order[i]] = -1000 + static_cast<std::int32_t>(i % 7);
        for (const ggml_tensor* keys : {cache.keys(0), cache.keys(1)}) {
            const std::vector<float> expected = turned(rows_of(keys, 0, cells), shifts);
            if (keys == cache.keys(0)) REQUIRE(cache.shift(shifts) == fine);
            if (keys == cache.keys(1)) continue;
            CHECK(distance(expected, floats(rows_of(keys, 0, cells))) < (packed ? 2e-2 : 1e-3));
        }
    }
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
    const auto copy = [&](ggml_tensor* tensor) {
        const Context context = new_context();
        ggml_tensor* streams[2];
        for (std::size_t s = 0; s < 2; ++s) {
            streams[s] = ggml_view_2d(context.get(), tensor, channels, cells, row_bytes,
                                      s * row_bytes * cells);
            REQUIRE(ggml_backend_view_init(streams[s]) == fine);
        }
        ggml_backend_tensor_copy(streams[0], streams[1]);
    };
    const auto copy_all = [&] {
        for (std::size_t layer = 0; layer < layers; ++layer) {
            copy(cache.keys(layer));
            // A second copy of the tracker would take this away.
            if (layer == 0) buffer->tracker(1).poison(cells - 1);
            copy(cache.values(layer));
        }
    };
    const auto marked = [&] { return buffer->tracker(1).sees_poison(nullptr, 0, 1, cells); };
    copy_all();
    CHECK(marked());
    for (const ggml_tensor* tensor : cache.tensors())
        CHECK(rows_of(tensor, 0, cells) == rows_of(tensor, cells, cells));
    CHECK(buffer->tracker(0).groups().packed_count() == buffer->tracker(1).groups().packed_count());

    // What has changed since is copied again.
    const auto packed = buffer->tracker(1).groups().packed_count();
    Cells more = range(0, cells);
    REQUIRE(cache.step({5, 6, 7}, {}) == fine);
    copy(cache.keys(0));
    CHECK_FALSE(marked());
    CHECK(buffer->tracker(1).groups().packed_count() <= packed);
    for (const ggml_tensor* tensor : {cache.keys(0), cache.values(0)})
        CHECK(rows_of(tensor, 0, cells) == rows_of(tensor, cells, cells));
}
