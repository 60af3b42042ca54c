#pragma once
// A cache as llama.cpp makes it, and the graphs that llama.cpp computes on it.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "lowkv_ggml.h"
#include "registry.h"
#include "trial/cache.h"

namespace lowkv::test {

using lowkv::ggml::trial::Bytes;
using lowkv::ggml::trial::Cells;

constexpr int head_dim = 64, heads = 4, kv_heads = 2, channels = head_dim * kv_heads;
constexpr std::size_t row_bytes = channels * sizeof(ggml_fp16_t);
constexpr int layers = 2;
constexpr ggml_status fine = GGML_STATUS_SUCCESS;

// The errors that were logged. Has room, so that a test without memory can log.
inline std::string& log_text() {
    static std::string text = [] {
        std::string empty;
        empty.reserve(std::size_t{1} << 20);
        return empty;
    }();
    return text;
}

inline bool logged(const std::string& words) { return log_text().find(words) != std::string::npos; }

inline Cells range(std::uint32_t first, std::uint32_t last) {
    Cells v(last - first);
    std::iota(v.begin(), v.end(), first);
    return v;
}

using lowkv::ggml::trial::Buffer;
using lowkv::ggml::trial::Context;
using lowkv::ggml::trial::host_memory;
using lowkv::ggml::trial::new_context;

// That of the trial, in this process, with the errors that its graphs log.
class Cache : public lowkv::ggml::trial::Cache {
  public:
    explicit Cache(const std::string& scheme, std::uint32_t cells = 512, int streams = 1,
                   int layer_count = layers)
        : lowkv::ggml::trial::Cache(device_for(scheme), {head_dim, heads, kv_heads}, cells, streams,
                                    layer_count) {
        lowkv::ggml::set_threads(backend(), 1);  // whose allocations are this thread's
        log_text().clear();
    }

    // Rows of multiples of 1/256, the same with every standard library.
    void use_whole_numbers() { whole_numbers_ = true; }

    ggml_status compute(ggml_cgraph* graph) override {
        log_text().clear();
        return lowkv::ggml::trial::Cache::compute(graph);
    }

    // Tokens written to `where` in stream 0, each seeing `before` and the tokens up to itself, in
    // all layers.
    ggml_status step(const Cells& where, const Cells& before) {
        std::mt19937 random(where.front());
        std::normal_distribution<float> normal;
        Cells seen = before;
        return step(
            where,
            [&](std::size_t, std::span<float> input) {
                for (float& x : input)
                    x = whole_numbers_ ? static_cast<float>(random() % 1024) / 256.0f - 2.0f
                                       : normal(random);
            },
            [&](std::size_t token, ggml_fp16_t* row) {
                seen.push_back(where[token]);
                for (const std::uint32_t cell : seen) row[cell] = 0;
            });
    }
    using lowkv::ggml::trial::Cache::step;

  private:
    bool whole_numbers_ = false;

    static ggml_backend_dev_t device_for(const std::string& scheme) {
        static const bool registered = [] {
            setenv("LOWKV_STATES", "f16", 0);  // tests read rows as numbers
            ggml_log_set(
                [](ggml_log_level level, const char* text, void*) {
                    if (level == GGML_LOG_LEVEL_ERROR) log_text() += text;
                },
                nullptr);
            ggml_backend_register(lowkv::ggml::backend_reg());
            return true;
        }();
        REQUIRE(registered);
        lowkv::ggml::set_scheme(scheme);
        return lowkv::ggml::device();
    }
};

inline Bytes rows_of(const ggml_tensor* tensor, std::size_t row, std::size_t rows) {
    Bytes bytes(rows * row_bytes, std::byte{0xAA});
    ggml_backend_tensor_get(tensor, bytes.data(), row * row_bytes, bytes.size());
    return bytes;
}

// All rows of stream 0 as a state has them, but without the marks of their scheme (row_mark.h).
inline void copy_rows(const Cache& from, const Cache& to) {
    for (std::size_t i = 0; i < from.tensors().size(); ++i) {
        Bytes rows = rows_of(from.tensors()[i], 0, static_cast<std::size_t>(from.keys(0)->ne[1]));
        for (std::size_t at = 0; at < rows.size(); at += sizeof(ggml_fp16_t))
            rows[at] &= std::byte{0xFE};
        ggml_backend_tensor_set(to.tensors()[i], rows.data(), 0, rows.size());
    }
}

// The largest difference, in parts of the largest magnitude.
inline float distance_of(std::span<const float> a, std::span<const float> b) {
    float most = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        most = std::max(most, std::abs(a[i] - b[i]));
        size = std::max(size, std::abs(a[i]));
    }
    return most / size;
}

}  // namespace lowkv::test
