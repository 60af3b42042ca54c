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

namespace lowkv::test {

using Cells = std::vector<std::uint32_t>;
using Bytes = std::vector<std::byte>;

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

struct Free {
    void operator()(ggml_context* context) const { ggml_free(context); }
    void operator()(ggml_backend* backend) const { ggml_backend_free(backend); }
    void operator()(ggml_backend_buffer* buffer) const { ggml_backend_buffer_free(buffer); }
};

using Context = std::unique_ptr<ggml_context, Free>;
using Buffer = std::unique_ptr<ggml_backend_buffer, Free>;

inline Context new_context() {
    return Context(
        ggml_init({128 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
}

inline Buffer host_memory(ggml_context* context) {
    Buffer memory(
        ggml_backend_alloc_ctx_tensors_from_buft(context, ggml_backend_cpu_buffer_type()));
    REQUIRE(memory != nullptr);
    return memory;
}

// A cache, and a backend.
class Cache {
  public:
    explicit Cache(const std::string& scheme, std::uint32_t cells = 512, int streams = 1,
                   int layer_count = layers)
        : cells_(cells) {
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
        backend_.reset(ggml_backend_dev_init(lowkv::ggml::device(), nullptr));
        REQUIRE(backend_ != nullptr);
        lowkv::ggml::set_threads(backend_.get(), 1);  // whose allocations are this thread's
        for (int layer = 0; layer < layer_count; ++layer) {
            for (const char part : {'k', 'v'}) {
                ggml_tensor* tensor =
                    ggml_new_tensor_3d(context_.get(), GGML_TYPE_F16, channels, cells, streams);
                ggml_format_name(tensor, "cache_%c_l%d", part, layer);
                (part == 'k' ? keys_ : values_).push_back(tensor);
            }
        }
        buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(
            context_.get(), ggml_backend_dev_buffer_type(lowkv::ggml::device())));
        REQUIRE(buffer_ != nullptr);
        clear();
        log_text().clear();
    }

    virtual ~Cache() = default;
    Cache(Cache&&) = default;

    // Rows of multiples of 1/256, the same with every standard library.
    void use_whole_numbers() { whole_numbers_ = true; }

    std::uint32_t cell_count() const { return cells_; }
    ggml_backend_buffer_t buffer() { return buffer_.get(); }
    void clear() { ggml_backend_buffer_clear(buffer_.get(), 0); }

    // In the order in which llama.cpp saves and restores them.
    std::vector<ggml_tensor*> tensors() const {
        std::vector<ggml_tensor*> all = keys_;
        all.insert(all.end(), values_.begin(), values_.end());
        return all;
    }
    ggml_tensor* keys(std::size_t layer) const { return keys_[layer]; }
    ggml_tensor* values(std::size_t layer) const { return values_[layer]; }

    // Stream 0 of a tensor as attention reads it.
    ggml_tensor* view(ggml_context* context, ggml_tensor* cache) const {
        ggml_tensor* all =
            ggml_view_4d(context, cache, head_dim, kv_heads, cells_, 1,
                         head_dim * sizeof(ggml_fp16_t), row_bytes, row_bytes * cells_, 0);
        return ggml_permute(context, all, 0, 2, 1, 3);
    }

    virtual ggml_status compute(ggml_cgraph* graph) {
        log_text().clear();
        return ggml_backend_graph_compute(backend_.get(), graph);
    }

    // The layers learn their heads when llama.cpp asks whether their attention is served.
    void ask() const {
        const Context context = new_context();
        ggml_context* c = context.get();
        ggml_tensor* query = ggml_new_tensor_3d(c, GGML_TYPE_F32, head_dim, 1, heads);
        ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, cells_, 1);
        for (std::size_t layer = 0; layer < keys_.size(); ++layer)
            REQUIRE(ggml_backend_dev_supports_op(
                lowkv::ggml::device(),
                ggml_flash_attn_ext(c, query, view(c, keys_[layer]), view(c, values_[layer]), mask,
                                    0.125f, 0, 0)));
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

    // The same of any tokens. fill(input, numbers): of each layer keys and values,
    // [token][channel], and queries, [head][token][channel]. show(token, row): the cells that it
    // sees, as zeros.
    template <class Fill, class Show>
    ggml_status step(const Cells& where, Fill fill, Show show) {
        const auto tokens = static_cast<std::int64_t>(where.size());
        const Context context = new_context();
        ggml_context* c = context.get();
        ggml_cgraph* graph = ggml_new_graph(c);
        ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, cells_, tokens);
        ggml_set_input(mask);
        ggml_tensor* numbers = ggml_new_tensor_1d(c, GGML_TYPE_I64, tokens);
        std::vector<ggml_tensor*> inputs, outputs;
        for (std::size_t layer = 0; layer < keys_.size(); ++layer) {
            for (ggml_tensor* target : {keys_[layer], values_[layer]}) {
                inputs.push_back(ggml_new_tensor_2d(c, GGML_TYPE_F32, channels, tokens));
                ggml_tensor* rows = ggml_reshape_2d(c, target, channels, ggml_nrows(target));
                ggml_build_forward_expand(graph, ggml_set_rows(c, rows, inputs.back(), numbers));
            }
            inputs.push_back(ggml_new_tensor_3d(c, GGML_TYPE_F32, head_dim, tokens, heads));
            ggml_tensor* out = ggml_flash_attn_ext(c, inputs.back(), view(c, keys_[layer]),
                                                   view(c, values_[layer]), mask, 0.125f, 0, 0);
            ggml_build_forward_expand(graph, out);
            outputs.push_back(out);
        }
        const Buffer memory = host_memory(c);

        for (std::size_t i = 0; i < inputs.size(); ++i)
            fill(i, std::span(static_cast<float*>(inputs[i]->data),
                              static_cast<std::size_t>(ggml_nelements(inputs[i]))));
        auto* row = static_cast<ggml_fp16_t*>(mask->data);
        std::fill_n(row, ggml_nelements(mask), ggml_fp32_to_fp16(-INFINITY));
        for (std::size_t i = 0; i < where.size(); ++i, row += cells_) {
            static_cast<std::int64_t*>(numbers->data)[i] = where[i];
            show(i, row);
        }
        for (const ggml_tensor* out : outputs)
            REQUIRE(ggml_backend_dev_supports_op(lowkv::ggml::device(), out));
        const ggml_status status = compute(graph);

        result_.clear();
        for (const ggml_tensor* out : outputs) {
            const auto* data = static_cast<const float*>(out->data);
            result_.insert(result_.end(), data, data + ggml_nelements(out));
        }
        if (status == fine)
            CHECK(std::all_of(result_.begin(), result_.end(),
                              [](float x) { return std::isfinite(x); }));
        return status;
    }

    // What the last step's attention gave.
    const std::vector<float>& result() const { return result_; }

    // A context shift: cell i's keys (of all streams) are turned by shifts[i] positions, in all
    // layers.
    ggml_status shift(const std::vector<std::int32_t>& shifts, int pairs = GGML_ROPE_TYPE_NORMAL) {
        const Context context = new_context();
        ggml_context* c = context.get();
        ggml_cgraph* graph = ggml_new_graph(c);
        const auto rows = static_cast<std::int64_t>(shifts.size());
        ggml_tensor* by = ggml_new_tensor_1d(c, GGML_TYPE_I32, rows);
        for (ggml_tensor* keys : keys_) {
            ggml_tensor* all = ggml_view_3d(c, keys, head_dim, kv_heads, rows,
                                            head_dim * sizeof(ggml_fp16_t), row_bytes, 0);
            ggml_build_forward_expand(
                graph, ggml_rope_ext_inplace(c, all, by, nullptr, head_dim, pairs, 0, 10000.0f,
                                             1.0f, 0.0f, 1.0f, 32.0f, 1.0f));
        }
        const Buffer memory = host_memory(c);
        std::copy(shifts.begin(), shifts.end(), static_cast<std::int32_t*>(by->data));
        return compute(graph);
    }

  private:
    std::unique_ptr<ggml_backend, Free> backend_;
    Context context_ = new_context();
    std::uint32_t cells_;
    std::vector<ggml_tensor*> keys_, values_;
    Buffer buffer_;
    bool whole_numbers_ = false;
    std::vector<float> result_;
};

inline Bytes rows_of(const ggml_tensor* tensor, std::size_t row, std::size_t rows) {
    Bytes bytes(rows * row_bytes, std::byte{0xAA});
    ggml_backend_tensor_get(tensor, bytes.data(), row * row_bytes, bytes.size());
    return bytes;
}

// All rows of stream 0 as a state has them, but without the marks of their scheme (row_mark.h).
inline void copy_rows(const Cache& from, const Cache& to) {
    for (std::size_t i = 0; i < from.tensors().size(); ++i) {
        Bytes rows = rows_of(from.tensors()[i], 0, from.cell_count());
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
