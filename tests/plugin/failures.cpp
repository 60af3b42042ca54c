// Accesses to cache tensors that ggml takes for infallible, run out of memory: what the caller
// gets, and which graphs fail afterwards. A scheme for layers that the model lacks fails every
// graph.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "lowkv_ggml.h"
#include "registry.h"

namespace {

// While one lives, allocations of this thread fail: the one of that number, or from it on. Only
// those of at least so many bytes count.
class Shortage {
  public:
    enum class Kind { single, lasting };

    Shortage(Kind kind, std::size_t number, std::size_t least = 0)
        : kind_(kind), number_(number), least_(least) {
        current = this;
    }
    ~Shortage() { current = nullptr; }
    Shortage(const Shortage&) = delete;
    Shortage& operator=(const Shortage&) = delete;

    bool felt() const noexcept { return asked_ > number_; }  // one has failed
    static bool refuses(std::size_t bytes) noexcept {
        return current != nullptr && bytes >= current->least_ && current->next_fails();
    }

    static thread_local Shortage* current;

  private:
    bool next_fails() noexcept {
        const std::size_t n = asked_++;
        return kind_ == Kind::single ? n == number_ : n >= number_;
    }

    Kind kind_;
    std::size_t number_, least_;
    std::size_t asked_ = 0;
};

thread_local Shortage* Shortage::current = nullptr;

void* allocate(std::size_t bytes, std::size_t alignment) {
    if (Shortage::refuses(bytes)) throw std::bad_alloc();
    bytes = (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
    void* memory = std::aligned_alloc(alignment, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new[](std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
    return allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
    return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

using Cells = std::vector<std::uint32_t>;
using Bytes = std::vector<std::byte>;

constexpr int head_dim = 64, heads = 4, kv_heads = 2, channels = head_dim * kv_heads;
constexpr std::uint32_t cells = 512;
constexpr std::size_t row_bytes = channels * sizeof(ggml_fp16_t);
constexpr int layers = 2;

std::string& log_text() {
    static std::string text;
    return text;
}

bool logged(const std::string& words) { return log_text().find(words) != std::string::npos; }

void remember(ggml_log_level level, const char* text, void*) {
    if (level != GGML_LOG_LEVEL_ERROR) return;
    Shortage* shortage = std::exchange(Shortage::current, nullptr);
    log_text() += text;
    Shortage::current = shortage;
}

Cells range(std::uint32_t first, std::uint32_t last) {
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

Context new_context() {
    return Context(ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
}

// A cache of two layers as llama.cpp makes it, and a backend.
class Cache {
  public:
    explicit Cache(const std::string& scheme) {
        static const bool registered = [] {
            ggml_log_set(remember, nullptr);
            ggml_backend_register(lowkv::ggml::backend_reg());
            return true;
        }();
        REQUIRE(registered);
        lowkv::ggml::set_scheme(scheme);
        backend_.reset(ggml_backend_dev_init(lowkv::ggml::device(), nullptr));
        REQUIRE(backend_ != nullptr);
        lowkv::ggml::set_threads(backend_.get(), 1);  // whose allocations are this thread's
        for (int layer = 0; layer < layers; ++layer) {
            for (const char part : {'k', 'v'}) {
                ggml_tensor* tensor =
                    ggml_new_tensor_3d(context_.get(), GGML_TYPE_F16, channels, cells, 1);
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

    ggml_backend_buffer_t buffer() { return buffer_.get(); }
    void clear() { ggml_backend_buffer_clear(buffer_.get(), 0); }

    // In the order in which llama.cpp saves and restores them.
    std::vector<ggml_tensor*> tensors() const {
        std::vector<ggml_tensor*> all = keys_;
        all.insert(all.end(), values_.begin(), values_.end());
        return all;
    }

    // Tokens written to `where`, each seeing `before` and the tokens up to itself, in all layers.
    ggml_status step(const Cells& where, const Cells& before) {
        log_text().clear();
        const auto tokens = static_cast<std::int64_t>(where.size());
        const Context context = new_context();
        ggml_context* c = context.get();
        ggml_cgraph* graph = ggml_new_graph(c);
        ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, cells, tokens);
        ggml_tensor* numbers = ggml_new_tensor_1d(c, GGML_TYPE_I64, tokens);
        std::vector<ggml_tensor*> inputs, outputs;
        for (std::size_t layer = 0; layer < layers; ++layer) {
            for (ggml_tensor* target : {keys_[layer], values_[layer]}) {
                inputs.push_back(ggml_new_tensor_2d(c, GGML_TYPE_F32, channels, tokens));
                ggml_build_forward_expand(graph, ggml_set_rows(c, target, inputs.back(), numbers));
            }
            inputs.push_back(ggml_new_tensor_3d(c, GGML_TYPE_F32, head_dim, tokens, heads));
            ggml_tensor* out = ggml_flash_attn_ext(c, inputs.back(), view(c, keys_[layer]),
                                                   view(c, values_[layer]), mask, 0.125f, 0, 0);
            ggml_build_forward_expand(graph, out);
            outputs.push_back(out);
        }
        const Buffer memory(
            ggml_backend_alloc_ctx_tensors_from_buft(c, ggml_backend_cpu_buffer_type()));
        REQUIRE(memory != nullptr);

        std::mt19937 random(where.front());
        std::normal_distribution<float> normal;
        for (ggml_tensor* input : inputs)
            for (std::int64_t i = 0; i < ggml_nelements(input); ++i)
                static_cast<float*>(input->data)[i] = normal(random);
        Cells seen = before;
        auto* row = static_cast<ggml_fp16_t*>(mask->data);
        std::fill_n(row, ggml_nelements(mask), ggml_fp32_to_fp16(-INFINITY));
        for (std::size_t i = 0; i < where.size(); ++i, row += cells) {
            static_cast<std::int64_t*>(numbers->data)[i] = where[i];
            seen.push_back(where[i]);
            for (const std::uint32_t cell : seen) row[cell] = 0;
        }
        // The layers learn their heads when llama.cpp asks.
        for (const ggml_tensor* out : outputs)
            REQUIRE(ggml_backend_dev_supports_op(lowkv::ggml::device(), out));
        const ggml_status status = ggml_backend_graph_compute(backend_.get(), graph);

        result_.clear();
        for (const ggml_tensor* out : outputs) {
            const auto* data = static_cast<const float*>(out->data);
            result_.insert(result_.end(), data, data + ggml_nelements(out));
        }
        if (status == GGML_STATUS_SUCCESS)
            CHECK(std::all_of(result_.begin(), result_.end(),
                              [](float x) { return std::isfinite(x); }));
        return status;
    }

    // What the last step's attention gave.
    const std::vector<float>& result() const { return result_; }

  private:
    static ggml_tensor* view(ggml_context* context, ggml_tensor* cache) {
        ggml_tensor* all =
            ggml_view_4d(context, cache, head_dim, kv_heads, cells, 1,
                         head_dim * sizeof(ggml_fp16_t), row_bytes, row_bytes * cells, 0);
        return ggml_permute(context, all, 0, 2, 1, 3);
    }

    std::unique_ptr<ggml_backend, Free> backend_;
    Context context_ = new_context();
    std::vector<ggml_tensor*> keys_, values_;
    Buffer buffer_;
    std::vector<float> result_;
};

constexpr const char* scheme = "kivi2,window=32,sinks=0";
constexpr ggml_status fine = GGML_STATUS_SUCCESS;
constexpr Shortage::Kind kinds[] = {Shortage::Kind::single, Shortage::Kind::lasting};

struct Read {
    Bytes bytes;
    bool felt = false;  // the shortage
};

Read read(const ggml_tensor* tensor, const Cells& where, Shortage::Kind kind, std::size_t number) {
    Read result{.bytes = Bytes(where.size() * row_bytes, std::byte{0xAA})};
    const Shortage shortage(kind, number);
    ggml_backend_tensor_get(tensor, result.bytes.data(), where.front() * row_bytes,
                            result.bytes.size());
    result.felt = shortage.felt();
    return result;
}

Bytes read(const ggml_tensor* tensor, const Cells& where) {
    return read(tensor, where, Shortage::Kind::single, SIZE_MAX).bytes;
}

std::vector<Bytes> save(const Cache& cache, const Cells& where) {
    std::vector<Bytes> state;
    for (const ggml_tensor* tensor : cache.tensors()) state.push_back(read(tensor, where));
    return state;
}

// Restores a state, the tensor of that number under a shortage. False: nothing was short.
bool restore_short(const Cache& cache, const std::vector<Bytes>& state, const Cells& where,
                   std::size_t tensor, Shortage::Kind kind, std::size_t number,
                   std::size_t least = 0) {
    bool felt = false;
    const std::vector<ggml_tensor*> tensors = cache.tensors();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const Shortage shortage(kind, i == tensor ? number : SIZE_MAX, least);
        ggml_backend_tensor_set(tensors[i], state[i].data(), where.front() * row_bytes,
                                state[i].size());
        felt |= shortage.felt();
    }
    return felt;
}

bool zeros(const Bytes& bytes) {
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

TEST_CASE("rows that can't be read are zeros, and the next graph fails") {
    Cache cache(scheme), whole(scheme);
    const Cells first = range(0, 200);
    REQUIRE(cache.step(first, {}) == fine);
    REQUIRE(whole.step(first, {}) == fine);
    CHECK(lowkv::ggml::stats().cells_packed > 0);
    const std::vector<Bytes> state = save(whole, first);
    std::uint32_t next = 200;
    std::size_t failures = 0;
    for (std::size_t i = 0; i < state.size(); ++i) {
        const ggml_tensor* tensor = cache.tensors()[i];
        const std::string name = tensor->name;
        for (const Shortage::Kind kind : kinds) {
            for (std::size_t number = 0;; ++number) {
                CAPTURE(name);
                CAPTURE(kind);
                CAPTURE(number);
                log_text().clear();
                const auto [bytes, felt] = read(tensor, first, kind, number);
                if (!felt) {
                    CHECK(bytes == read(whole.tensors()[i], first));
                    break;
                }
                ++failures;
                CHECK(zeros(bytes));
                if (kind == Shortage::Kind::single) CHECK(logged("can't read cache rows"));
                const Cells token{next};
                CHECK(cache.step(token, range(0, next)) != fine);
                CHECK(logged("an operation on the cache that llama.cpp takes for done has failed"));
                if (kind == Shortage::Kind::single) CHECK(logged("can't read cache rows"));
                // Nothing was lost.
                CHECK(cache.step(token, range(0, next)) == fine);
                REQUIRE(whole.step(token, range(0, next)) == fine);
                CHECK(cache.result() == whole.result());
                ++next;
                REQUIRE(next < cells);
            }
        }
    }
    CHECK(failures > 0);
}

namespace {

constexpr std::size_t large = std::size_t{1} << 15;  // less than a batch of rows as floats

// A cache with 50 tokens of its own and a state of 96 tokens to restore behind them.
class Restoring {
  public:
    Restoring() {
        Cache source(scheme);
        REQUIRE(source.step(range(0, 96), {}) == fine);
        state = save(source, range(0, 96));
    }

    // What must hold for a restore under a shortage, until it is not felt any more: false.
    bool check(std::size_t tensor, Shortage::Kind kind, std::size_t number, std::size_t least) {
        Cache cache(scheme);
        const std::string name = cache.tensors()[tensor]->name;
        const bool words = least > 0 || kind == Shortage::Kind::single;  // there's memory for them
        CAPTURE(name);
        CAPTURE(words);
        CAPTURE(number);
        REQUIRE(cache.step(own, {}) == fine);
        log_text().clear();
        if (!restore_short(cache, state, cells, tensor, kind, number, least)) {
            CHECK(log_text().empty());
            CHECK(cache.step({50}, own) == fine);
            CHECK(cache.step({196}, cells) == fine);
            return false;
        }
        if (words) CHECK_FALSE(log_text().empty());
        // Those who don't see it go on.
        CHECK(cache.step({50}, own) == fine);
        for (const std::uint32_t cell : {100u, 163u, 195u}) {
            CHECK(cache.step({300}, {cell}) != fine);
            if (words) CHECK(logged("a restored state was not taken over"));
        }
        CHECK(cache.step({300}, cells) != fine);
        CHECK(cache.step({51}, range(0, 51)) == fine);
        // Written again, they are whole.
        CHECK(cache.step(cells, {}) == fine);
        CHECK(cache.step({196}, cells) == fine);
        return true;
    }

    std::vector<Bytes> state;
    const Cells own = range(0, 50), cells = range(100, 196);
};

}  // namespace

TEST_CASE("a restored row that was not taken over fails the graphs that see it") {
    Restoring restoring;
    for (std::size_t tensor = 0; tensor < restoring.state.size(); ++tensor)
        CHECK(restoring.check(tensor, Shortage::Kind::lasting, 0, large));
}

TEST_CASE("restoring again heals what a failed restore left") {
    Cache cache(scheme);
    const Restoring restoring;
    const Cells& restored = restoring.cells;
    REQUIRE(cache.step({0}, {}) == fine);
    for (std::size_t tensor = 0; tensor < restoring.state.size(); ++tensor) {
        REQUIRE(restore_short(cache, restoring.state, restored, tensor, Shortage::Kind::lasting, 0,
                              large));
        CHECK(cache.step({300}, restored) != fine);
        REQUIRE_FALSE(restore_short(cache, restoring.state, restored, tensor,
                                    Shortage::Kind::lasting, SIZE_MAX));
        CHECK(cache.step({301}, restored) == fine);
    }
}

TEST_CASE("clearing the cache heals it") {
    Cache cache(scheme), whole(scheme);
    const Cells first = range(0, 96);
    REQUIRE(cache.step(first, {}) == fine);
    const std::vector<Bytes> state = save(cache, first);
    REQUIRE(read(cache.tensors()[0], first, Shortage::Kind::lasting, 0).felt);
    REQUIRE(restore_short(cache, state, first, 1, Shortage::Kind::lasting, 0, large));
    cache.clear();
    CHECK(cache.step({96}, first) == fine);
    cache.clear();
    CHECK(cache.step(first, {}) == fine);
    REQUIRE(whole.step(first, {}) == fine);
    CHECK(cache.result() == whole.result());
}

TEST_CASE("a scheme for a layer that the model lacks fails every graph") {
    Cache cache("kivi2,layer.9=kivi4");
    for (int i = 0; i < 3; ++i) {
        CHECK(cache.step({0}, {}) != fine);
        CHECK(logged("layer 9"));
    }
    cache.clear();
    CHECK(cache.step({0}, {}) != fine);
    CHECK(logged("layer 9"));
}

TEST_CASE("no allocation of a restore may fail unnoticed") {
    Restoring restoring;
    for (std::size_t tensor = 0; tensor < restoring.state.size(); ++tensor)
        for (const Shortage::Kind kind : kinds)
            for (std::size_t number = 0; restoring.check(tensor, kind, number, 0);) ++number;
}
