// The C interface (lowkv.h), over a KvCache.

#include "lowkv/lowkv.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "lowkv/error.h"
#include "lowkv/kv_cache.h"

using lowkv::Error;
using lowkv::ErrorCode;

struct lowkv_cache {
    explicit lowkv_cache(const lowkv::KvCacheConfig& config) : kv(config) {}

    lowkv::KvCache kv;
    std::unique_ptr<lowkv::Executor> pool;     // null: the caller's thread alone
    std::vector<lowkv::KvAttention> attended;  // kept so that a step allocates nothing

    lowkv::Executor& executor() const noexcept { return pool ? *pool : lowkv::serial_executor(); }
};

namespace {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... message) {
    throw Error(ErrorCode::invalid_argument, message...);
}

thread_local std::string message;  // of lowkv_error()

lowkv_status status_of(ErrorCode code) noexcept {
    switch (code) {
        case ErrorCode::invalid_scheme: return LOWKV_INVALID_SCHEME;
        case ErrorCode::invalid_argument: return LOWKV_INVALID_ARGUMENT;
        case ErrorCode::unsupported:
        case ErrorCode::invalid_calibration: return LOWKV_UNSUPPORTED;
        case ErrorCode::invalid_image: return LOWKV_INVALID_IMAGE;
        case ErrorCode::over_budget: return LOWKV_OVER_BUDGET;
        case ErrorCode::device_failed: return LOWKV_FAILED;
    }
    return LOWKV_FAILED;
}

// No exception leaves a function of C.
template <class F>
lowkv_status guarded(F f) noexcept {
    try {
        try {
            f();
            return LOWKV_OK;
        } catch (const Error& error) {
            message = error.what();
            return status_of(error.code());
        } catch (const std::bad_alloc&) {
            message = "out of memory";
            return LOWKV_OUT_OF_MEMORY;
        } catch (const std::exception& error) {
            message = error.what();
            return LOWKV_FAILED;
        }
    } catch (...) {  // no memory for the message
        return LOWKV_OUT_OF_MEMORY;
    }
}

template <class T>
T& required(T* pointer, const char* name) {
    if (pointer == nullptr) refuse(name, " is NULL");
    return *pointer;
}

// A structure of the caller's, which may be of a later version and then has more members.
template <class T>
const T& sized(const T* given, const char* name) {
    if (required(given, name).size < sizeof(T))
        refuse(name, ": its size is ", given->size, "; set it to sizeof, ", sizeof(T));
    return *given;
}

lowkv::RowType row_type(lowkv_dtype type) {
    if (type != LOWKV_DTYPE_F32 && type != LOWKV_DTYPE_F16 && type != LOWKV_DTYPE_BF16)
        refuse("no dtype ", type,
               "; there are LOWKV_DTYPE_F32, LOWKV_DTYPE_F16 and LOWKV_DTYPE_BF16");
    return static_cast<lowkv::RowType>(type);
}

// The number of a sequence that make(cache) makes.
template <class F>
lowkv_status new_sequence(lowkv_cache* cache, lowkv_sequence* sequence, F make) noexcept {
    return guarded([&] {
        lowkv::KvCache& kv = required(cache, "cache").kv;
        lowkv_sequence& number = required(sequence, "sequence");
        number = make(kv);
    });
}

std::unique_ptr<lowkv_cache> make_cache(const lowkv_config& given) {
    lowkv::KvCacheConfig config;
    config.scheme = lowkv::parse_scheme(given.scheme == nullptr ? std::string(lowkv::default_scheme)
                                                                : given.scheme);
    config.shape = {given.kv_heads, given.head_dim};
    config.layers = given.layers;
    if (given.dtype != 0) config.rows = row_type(given.dtype);
    config.store = std::make_shared<lowkv::Store>(given.budget);
    auto cache = std::make_unique<lowkv_cache>(config);
    if (given.threads > 1) cache->pool = lowkv::make_thread_executor(given.threads);
    return cache;
}

// Those of [token][head][channel] where both are 0. No two vectors may overlap: of a result,
// threads would write them at once.
struct Strides {
    std::size_t token, head;

    Strides(const std::string& name, std::size_t of_token, std::size_t of_head,
            std::uint32_t tokens, std::uint32_t heads, std::uint32_t head_dim)
        : token(of_token), head(of_head) {
        if (token == 0 && head == 0) {
            head = head_dim;
            token = std::size_t{heads} * head_dim;
        }
        if ((tokens > 1 && token < head_dim) || (heads > 1 && head < head_dim))
            refuse(name, ": token stride ", token, ", head stride ", head, "; heads have ",
                   head_dim, " numbers, and may not overlap (both 0: side by side)");
    }
};

lowkv::Rows rows_of(const lowkv_rows& rows, const char* name, std::uint32_t tokens,
                    const lowkv::Shape& shape) {
    if (rows.data == nullptr) refuse(name, ".data is NULL");
    const Strides strides(name, rows.token_stride, rows.head_stride, tokens, shape.kv_heads,
                          shape.head_dim);
    return {rows.data, row_type(rows.dtype), strides.head, strides.token};
}

lowkv::KvAttention attention_of(const lowkv_attention& given, std::uint32_t head_dim) {
    const Strides q("q", given.q_token_stride, given.q_head_stride, given.tokens, given.heads,
                    head_dim);
    const Strides results("out", given.out_token_stride, given.out_head_stride, given.tokens,
                          given.heads, head_dim);
    lowkv::KvAttention out;
    out.sequence = given.sequence;
    out.io.q = given.q;
    out.io.q_token_stride = q.token;
    out.io.q_head_stride = q.head;
    out.io.out = given.out;
    out.io.out_token_stride = results.token;
    out.io.out_head_stride = results.head;
    out.io.tokens = given.tokens;
    out.io.heads = given.heads;
    out.io.lse = given.lse;
    if (given.mask != nullptr && given.causal != 0) refuse("a mask and causal: take one of them");
    out.mask.kind = given.mask != nullptr ? lowkv::Mask::Kind::additive_f32
                    : given.causal != 0   ? lowkv::Mask::Kind::causal
                                          : lowkv::Mask::Kind::none;
    out.mask.data = given.mask;
    out.mask.row_stride = given.mask_stride;
    out.mask.window = given.window;
    return out;
}

void attend(lowkv_cache& cache, std::uint32_t layer, const lowkv_attention* list,
            std::uint32_t count, const lowkv_attention_params* given) {
    lowkv::AttentionParams params;
    params.scale = 1.0f / std::sqrt(static_cast<float>(cache.kv.shape().head_dim));
    if (given != nullptr) {
        const lowkv_attention_params& from = sized(given, "params");
        if (from.scale != 0) params.scale = from.scale;
        params.softcap = from.softcap;
        params.alibi_slopes = from.alibi_slopes;
        params.sink_logits = from.sink_logits;
    }
    if (count == 0) return;
    // A caller's are as far apart as its own version of the structure is long.
    const std::size_t apart = sized(list, "attentions").size;
    cache.attended.clear();
    for (std::uint32_t i = 0; i < count; ++i) {
        const auto& one = *reinterpret_cast<const lowkv_attention*>(
            reinterpret_cast<const std::byte*>(list) + i * apart);
        if (one.size != apart) refuse("attentions of several sizes: set each to sizeof");
        cache.attended.push_back(attention_of(one, cache.kv.shape().head_dim));
    }
    cache.kv.attend(layer, cache.attended, params, cache.executor());
}

}  // namespace

uint32_t lowkv_api_version(void) { return LOWKV_API_VERSION; }
const char* lowkv_version(void) { return LOWKV_VERSION; }
const char* lowkv_default_scheme(void) { return lowkv::default_scheme.data(); }
const char* lowkv_error(void) { return message.c_str(); }

lowkv_status lowkv_cache_new(const lowkv_config* config, lowkv_cache** cache) {
    return guarded([&] {
        lowkv_cache*& out = required(cache, "cache");
        out = make_cache(sized(config, "config")).release();
    });
}

void lowkv_cache_free(lowkv_cache* cache) { delete cache; }

lowkv_status lowkv_sequence_add(lowkv_cache* cache, lowkv_sequence* sequence) {
    return new_sequence(cache, sequence, [](lowkv::KvCache& kv) { return kv.add(); });
}

lowkv_status lowkv_sequence_fork(lowkv_cache* cache, lowkv_sequence from,
                                 lowkv_sequence* sequence) {
    return new_sequence(cache, sequence, [&](lowkv::KvCache& kv) { return kv.fork(from); });
}

lowkv_status lowkv_sequence_remove(lowkv_cache* cache, lowkv_sequence sequence) {
    return guarded([&] { required(cache, "cache").kv.remove(sequence); });
}

lowkv_status lowkv_sequence_tokens(const lowkv_cache* cache, lowkv_sequence sequence,
                                   uint32_t layer, uint32_t* tokens) {
    return guarded([&] {
        required(tokens, "tokens") = required(cache, "cache").kv.at(sequence, layer).size();
    });
}

lowkv_status lowkv_sequence_truncate(lowkv_cache* cache, lowkv_sequence sequence, uint32_t tokens) {
    return guarded([&] { required(cache, "cache").kv.truncate(sequence, tokens); });
}

lowkv_status lowkv_append(lowkv_cache* cache, lowkv_sequence sequence, uint32_t layer,
                          lowkv_rows keys, lowkv_rows values, uint32_t tokens) {
    return guarded([&] {
        lowkv::Sequence& all = required(cache, "cache").kv.at(sequence, layer);
        const lowkv::Shape& shape = all.plan().shape();
        all.append(rows_of(keys, "keys", tokens, shape), rows_of(values, "values", tokens, shape),
                   tokens);
    });
}

lowkv_status lowkv_attend(lowkv_cache* cache, uint32_t layer, const lowkv_attention* attentions,
                          uint32_t count, const lowkv_attention_params* params) {
    return guarded([&] { attend(required(cache, "cache"), layer, attentions, count, params); });
}

lowkv_status lowkv_pack(lowkv_cache* cache) {
    return guarded([&] { required(cache, "cache").kv.pack(cache->executor()); });
}

lowkv_status lowkv_read(const lowkv_cache* cache, lowkv_sequence sequence, uint32_t layer,
                        uint32_t first, uint32_t tokens, float* keys, float* values) {
    return guarded([&] {
        const lowkv_cache& all = required(cache, "cache");
        all.kv.at(sequence, layer).read(first, tokens, keys, values, all.executor());
    });
}

lowkv_status lowkv_cache_bytes(const lowkv_cache* cache, lowkv_bytes* bytes) {
    return guarded([&] {
        const lowkv::StoreStats stats = required(cache, "cache").kv.store().stats();
        required(bytes, "bytes") = {stats.exact_bytes, stats.packed_bytes, stats.peak_bytes};
    });
}

lowkv_status lowkv_save(const lowkv_cache* cache, lowkv_sequence sequence, void** data,
                        size_t* size) {
    return guarded([&] {
        void*& out = required(data, "data");
        size_t& bytes = required(size, "size");
        const std::vector<std::byte> image = required(cache, "cache").kv.save(sequence);
        void* memory = std::malloc(image.size());
        if (memory == nullptr) throw std::bad_alloc();
        std::memcpy(memory, image.data(), image.size());
        out = memory;
        bytes = image.size();
    });
}

lowkv_status lowkv_load(lowkv_cache* cache, const void* data, size_t size,
                        lowkv_sequence* sequence) {
    return new_sequence(cache, sequence, [&](lowkv::KvCache& kv) {
        if (data == nullptr) refuse("data is NULL");
        return kv.load({static_cast<const std::byte*>(data), size});
    });
}

void lowkv_free(void* data) { std::free(data); }
