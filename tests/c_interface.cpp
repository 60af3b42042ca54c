// The C interface: it computes what the classes below it compute, refuses in words, and keeps its
// books under any order of calls.

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "lowkv/attention.h"
#include "lowkv/batch.h"
#include "lowkv/lowkv.h"
#include "lowkv/scheme.h"

namespace {

constexpr std::uint32_t layers = 3, kv_heads = 2, heads = 4, head_dim = 64;
constexpr std::size_t channels = kv_heads * head_dim;
using Floats = std::vector<float>;

lowkv_config config_of(const char* scheme, lowkv_dtype dtype = LOWKV_DTYPE_F16) {
    lowkv_config config = {};
    config.size = sizeof config;
    config.scheme = scheme;
    config.layers = layers;
    config.kv_heads = kv_heads;
    config.head_dim = head_dim;
    config.dtype = dtype;
    return config;
}

struct Cache {
    lowkv_cache* cache = nullptr;
    explicit Cache(const lowkv_config& config) {
        REQUIRE(lowkv_cache_new(&config, &cache) == LOWKV_OK);
    }
    ~Cache() { lowkv_cache_free(cache); }
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;
    operator lowkv_cache*() const { return cache; }

    lowkv_sequence add() {
        lowkv_sequence number = 0;
        REQUIRE(lowkv_sequence_add(cache, &number) == LOWKV_OK);
        return number;
    }
    std::uint32_t tokens(lowkv_sequence sequence) {
        std::uint32_t count = 0;
        REQUIRE(lowkv_sequence_tokens(cache, sequence, 0, &count) == LOWKV_OK);
        return count;
    }
};

// Multiples of 1/64: the same in f32 and f16.
Floats numbers(std::mt19937& random, std::size_t count) {
    Floats out(count);
    for (float& x : out) x = static_cast<float>(static_cast<int>(random() % 512) - 256) / 64.0f;
    return out;
}

lowkv_rows rows(const Floats& data) { return {data.data(), LOWKV_DTYPE_F32, channels, head_dim}; }

lowkv_attention attention(lowkv_sequence sequence, const Floats& q, Floats& out) {
    lowkv_attention a = {};
    a.size = sizeof a;
    a.sequence = sequence;
    a.heads = heads;
    a.tokens = static_cast<std::uint32_t>(q.size() / (heads * head_dim));
    a.q = q.data();
    a.out = out.data();
    a.q_head_stride = a.out_head_stride = head_dim;
    a.q_token_stride = a.out_token_stride = std::size_t{heads} * head_dim;
    a.causal = 1;
    return a;
}

Floats attend(lowkv_cache* cache, lowkv_sequence sequence, std::uint32_t layer, const Floats& q) {
    Floats out(q.size());
    const lowkv_attention a = attention(sequence, q, out);
    REQUIRE(lowkv_attend(cache, layer, &a, 1, nullptr) == LOWKV_OK);
    return out;
}

bool says(const char* words) { return std::strstr(lowkv_error(), words) != nullptr; }

}  // namespace

TEST_CASE("steps give what a Sequence gives, bit for bit") {
    for (const char* scheme : {"exact", "lowkv2.8,window=64", "kivi2,window=32", "turboquant3"}) {
        CAPTURE(scheme);
        std::mt19937 random(3);
        Cache cache(config_of(scheme));
        const lowkv_sequence number = cache.add();
        const lowkv::Scheme parsed = lowkv::parse_scheme(scheme);
        lowkv::Retention retention = parsed.retention;
        if (parsed.base.exact()) retention.sinks = 0;
        const auto plan =
            std::make_shared<lowkv::Plan>(parsed.base, lowkv::Shape{kv_heads, head_dim});
        lowkv::Sequence other(std::make_shared<lowkv::Store>(), plan, retention);
        lowkv::AttentionWorkspace workspace;
        for (const std::uint32_t tokens : {200u, 1u, 1u, 90u, 1u}) {
            const Floats keys = numbers(random, tokens * channels);
            const Floats values = numbers(random, tokens * channels);
            const Floats q = numbers(random, std::size_t{tokens} * heads * head_dim);
            for (std::uint32_t layer = 0; layer < layers; ++layer)
                REQUIRE(lowkv_append(cache, number, layer, rows(keys), rows(values), tokens) ==
                        LOWKV_OK);
            const Floats out = attend(cache, number, 0, q);
            REQUIRE(lowkv_pack(cache) == LOWKV_OK);

            other.append(keys.data(), values.data(), tokens);
            Floats expected(q.size());
            lowkv::AttentionIO io;
            io.q = q.data();
            io.out = expected.data();
            io.tokens = tokens;
            io.heads = heads;
            io.q_head_stride = io.out_head_stride = head_dim;
            io.q_token_stride = io.out_token_stride = std::size_t{heads} * head_dim;
            io.n_cells = other.size();
            lowkv::AttentionParams params;
            params.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
            params.mask.kind = lowkv::Mask::Kind::causal;
            lowkv::attend(other, io, params, workspace);
            if (other.wants_queries())
                other.update_query_stats(
                    {q.data(), io.q_token_stride, io.q_head_stride, tokens, heads});
            other.pack();
            CHECK(out == expected);
        }
    }
}

TEST_CASE("several sequences at once are what each is alone, on threads too") {
    lowkv_config config = config_of("lowkv2.8,window=32");
    config.threads = 2;
    Cache cache(config);
    std::mt19937 random(4);
    std::vector<lowkv_sequence> all;
    for (const std::uint32_t tokens : {300u, 40u, 170u}) {
        all.push_back(cache.add());
        const Floats keys = numbers(random, tokens * channels);
        REQUIRE(lowkv_append(cache, all.back(), 1, rows(keys), rows(keys), tokens) == LOWKV_OK);
    }
    REQUIRE(lowkv_pack(cache) == LOWKV_OK);
    const Floats q = numbers(random, heads * head_dim);
    std::vector<Floats> outs(all.size(), Floats(q.size()));
    std::vector<lowkv_attention> list;
    for (std::size_t i = 0; i < all.size(); ++i) list.push_back(attention(all[i], q, outs[i]));
    REQUIRE(lowkv_attend(cache, 1, list.data(), 3, nullptr) == LOWKV_OK);
    for (std::size_t i = 0; i < all.size(); ++i) CHECK(outs[i] == attend(cache, all[i], 1, q));

    // A caller of a later version, whose structure is longer.
    struct Later {
        lowkv_attention known;
        double more;
    } later[2] = {};
    for (std::size_t i = 0; i < 2; ++i) {
        later[i].known = attention(all[2 - i], q, outs[i]);
        later[i].known.size = sizeof(Later);
    }
    REQUIRE(lowkv_attend(cache, 1, &later[0].known, 2, nullptr) == LOWKV_OK);
    CHECK(outs[0] == attend(cache, all[2], 1, q));
    CHECK(outs[1] == attend(cache, all[1], 1, q));
    later[1].known.size = sizeof(lowkv_attention);
    CHECK(lowkv_attend(cache, 1, &later[0].known, 2, nullptr) == LOWKV_INVALID_ARGUMENT);
}

TEST_CASE("random calls against lists of rows") {
    for (unsigned seed = 1; seed <= 20; ++seed) {
        std::mt19937 random(seed);
        Cache cache(config_of("exact", LOWKV_DTYPE_F32));
        std::map<lowkv_sequence, std::vector<Floats>>
            model;  // rows by token, the same in all layers
        const auto any = [&] { return std::next(model.begin(), random() % model.size())->first; };
        for (int step = 0; step < 120; ++step) {
            const unsigned what = model.empty() ? 0 : static_cast<unsigned>(random() % 10);
            if (what == 0) {
                model[cache.add()] = {};
            } else if (what == 1) {
                const lowkv_sequence from = any();
                lowkv_sequence fork = 0;
                REQUIRE(lowkv_sequence_fork(cache, from, &fork) == LOWKV_OK);
                REQUIRE(!model.contains(fork));
                model[fork] = model[from];
            } else if (what == 2) {
                const lowkv_sequence gone = any();
                REQUIRE(lowkv_sequence_remove(cache, gone) == LOWKV_OK);
                model.erase(gone);
                std::uint32_t tokens = 0;
                CHECK(lowkv_sequence_tokens(cache, gone, 0, &tokens) == LOWKV_INVALID_ARGUMENT);
            } else if (what == 3) {
                const lowkv_sequence cut = any();
                const auto tokens = static_cast<std::uint32_t>(random() % 200);
                REQUIRE(lowkv_sequence_truncate(cache, cut, tokens) == LOWKV_OK);
                if (tokens < model[cut].size()) model[cut].resize(tokens);
            } else if (what == 4) {
                const lowkv_sequence saved = any();
                void* data = nullptr;
                std::size_t size = 0;
                lowkv_sequence loaded = 0;
                REQUIRE(lowkv_save(cache, saved, &data, &size) == LOWKV_OK);
                REQUIRE(lowkv_load(cache, data, size, &loaded) == LOWKV_OK);
                lowkv_free(data);
                model[loaded] = model[saved];
            } else {
                const lowkv_sequence grown = any();
                const auto tokens = static_cast<std::uint32_t>(1 + random() % 40);
                const Floats data = numbers(random, tokens * channels);
                for (std::uint32_t layer = 0; layer < layers; ++layer)
                    REQUIRE(lowkv_append(cache, grown, layer, rows(data), rows(data), tokens) ==
                            LOWKV_OK);
                for (std::uint32_t t = 0; t < tokens; ++t)
                    model[grown].emplace_back(data.begin() + t * static_cast<long>(channels),
                                              data.begin() + (t + 1) * static_cast<long>(channels));
                REQUIRE(lowkv_pack(cache) == LOWKV_OK);
            }
            for (const auto& [number, expected] : model) {
                REQUIRE(cache.tokens(number) == expected.size());
                Floats read(expected.size() * channels), all;
                for (const Floats& row : expected) all.insert(all.end(), row.begin(), row.end());
                REQUIRE(lowkv_read(cache, number, step % layers, 0,
                                   static_cast<std::uint32_t>(expected.size()), read.data(),
                                   nullptr) == LOWKV_OK);
                CHECK(read == all);
            }
        }
    }
}

TEST_CASE("what is wrong is refused in words, and nothing changes") {
    lowkv_cache* none = nullptr;
    const auto refused = [&](lowkv_config config) { return lowkv_cache_new(&config, &none); };
    CHECK(refused(config_of("lowkv9")) == LOWKV_INVALID_SCHEME);
    CHECK(says("lowkv9"));
#ifdef LOWKV_GUESTS
    CHECK(refused(config_of("kvquant3")) == LOWKV_UNSUPPORTED);
#endif
    CHECK(refused(config_of("kivi2,filter=heavy,keep=5%,evict=50%")) == LOWKV_UNSUPPORTED);
    CHECK(refused(config_of("lowkv2,layer.7=lowkv4")) == LOWKV_INVALID_SCHEME);
    lowkv_config config = config_of("lowkv2");
    config.head_dim = 40;
    CHECK(refused(config) == LOWKV_INVALID_ARGUMENT);
    config = config_of("lowkv2");
    config.size = 8;
    CHECK(refused(config) == LOWKV_INVALID_ARGUMENT);
    CHECK(says("sizeof"));
    config = config_of("lowkv2", 9);
    CHECK(refused(config) == LOWKV_INVALID_ARGUMENT);
    config = config_of("lowkv2");
    config.layers = 0;
    CHECK(refused(config) == LOWKV_INVALID_ARGUMENT);
    CHECK(lowkv_cache_new(nullptr, &none) == LOWKV_INVALID_ARGUMENT);
    CHECK(lowkv_cache_new(&config, nullptr) == LOWKV_INVALID_ARGUMENT);
    CHECK(none == nullptr);

    Cache cache(config_of(nullptr));
    const lowkv_sequence number = cache.add();
    const Floats data(channels);
    CHECK(lowkv_append(cache, 7, 0, rows(data), rows(data), 1) == LOWKV_INVALID_ARGUMENT);
    CHECK(says("no sequence 7"));
    CHECK(lowkv_append(cache, number, layers, rows(data), rows(data), 1) == LOWKV_INVALID_ARGUMENT);
    CHECK(lowkv_append(cache, number, 0, rows(data), {}, 1) == LOWKV_INVALID_ARGUMENT);
    CHECK(cache.tokens(number) == 0);
    REQUIRE(lowkv_append(cache, number, 0, rows(data), rows(data), 1) == LOWKV_OK);
    void* bytes = nullptr;
    std::size_t size = 0;
    CHECK(lowkv_save(cache, number, &bytes, &size) == LOWKV_INVALID_ARGUMENT);
    CHECK(says("save between steps"));
    CHECK(bytes == nullptr);

    Floats q(heads * head_dim), out(q.size());
    lowkv_attention a = attention(number, q, out);
    a.heads = 3;
    CHECK(lowkv_attend(cache, 0, &a, 1, nullptr) == LOWKV_INVALID_ARGUMENT);
    a = attention(number, q, out);
    a.mask = q.data();
    CHECK(lowkv_attend(cache, 0, &a, 1, nullptr) == LOWKV_INVALID_ARGUMENT);
    a.causal = 0;
    const Floats slopes(heads, 0.0f);
    lowkv_attention_params params{};
    params.size = sizeof params;
    params.alibi_slopes = slopes.data();
    CHECK(lowkv_attend(cache, 0, &a, 1, &params) == LOWKV_INVALID_ARGUMENT);
    CHECK(says("slope of head 0"));
    CHECK(lowkv_attend(cache, 0, nullptr, 1, nullptr) == LOWKV_INVALID_ARGUMENT);
    CHECK(lowkv_attend(cache, 0, nullptr, 0, nullptr) == LOWKV_OK);
    float row[channels];
    CHECK(lowkv_read(cache, number, 0, 0, 2, row, nullptr) == LOWKV_INVALID_ARGUMENT);

    config = config_of("lowkv2.8");
    config.budget = 4096;
    Cache small(config);
    const lowkv_sequence tight = small.add();
    const Floats many(300 * channels);
    CHECK(lowkv_append(small, tight, 0, rows(many), rows(many), 300) == LOWKV_OVER_BUDGET);
    CHECK(small.tokens(tight) == 0);
}

TEST_CASE("strides of 0 are those of numbers side by side, and others may not overlap") {
    Cache cache(config_of("lowkv4"));
    std::mt19937 random(9);
    const Floats keys = numbers(random, 4 * channels), q = numbers(random, 4 * heads * head_dim);
    Floats with(q.size()), without(q.size()), read(keys.size());
    lowkv_rows its = rows(keys);
    its.token_stride = its.head_stride = 0;
    const lowkv_sequence one = cache.add();
    REQUIRE(lowkv_append(cache, one, 0, its, its, 4) == LOWKV_OK);
    REQUIRE(lowkv_read(cache, one, 0, 0, 4, read.data(), nullptr) == LOWKV_OK);
    CHECK(read == keys);
    lowkv_attention a = attention(one, q, with), zeros = attention(one, q, without);
    zeros.q_token_stride = zeros.q_head_stride = 0;
    zeros.out_token_stride = zeros.out_head_stride = 0;
    REQUIRE(lowkv_attend(cache, 0, &a, 1, nullptr) == LOWKV_OK);
    REQUIRE(lowkv_attend(cache, 0, &zeros, 1, nullptr) == LOWKV_OK);
    CHECK(with == without);

    const auto refused = [&](lowkv_status status, const char* name) {
        CHECK(status == LOWKV_INVALID_ARGUMENT);
        CHECK(std::string(lowkv_error()).starts_with(std::string(name) + ": token stride "));
    };
    for (const std::size_t wrong : {std::size_t{0}, std::size_t{1}, std::size_t{head_dim - 1}}) {
        lowkv_rows some = rows(keys);
        some.token_stride = wrong;
        refused(lowkv_append(cache, one, 0, rows(keys), some, 4), "values");
        some = rows(keys);
        some.head_stride = wrong;
        refused(lowkv_append(cache, one, 0, some, rows(keys), 1), "keys");
        lowkv_attention bad = a;
        bad.out_token_stride = wrong;
        refused(lowkv_attend(cache, 0, &bad, 1, nullptr), "out");
        bad = a;
        bad.q_head_stride = wrong;
        refused(lowkv_attend(cache, 0, &bad, 1, nullptr), "q");
    }
    std::uint32_t tokens = 0;
    CHECK(lowkv_sequence_tokens(cache, one, 0, &tokens) == LOWKV_OK);
    CHECK(tokens == 4);
}

TEST_CASE("a saved sequence that was damaged, cut or made by others is refused") {
    Cache cache(config_of("lowkv2.8,window=32"));
    const lowkv_sequence number = cache.add();
    std::mt19937 random(9);
    const Floats data = numbers(random, 300 * channels);
    for (std::uint32_t layer = 0; layer < layers; ++layer)
        REQUIRE(lowkv_append(cache, number, layer, rows(data), rows(data), 300) == LOWKV_OK);
    REQUIRE(lowkv_pack(cache) == LOWKV_OK);
    void* data_of = nullptr;
    std::size_t size = 0;
    REQUIRE(lowkv_save(cache, number, &data_of, &size) == LOWKV_OK);
    std::vector<unsigned char> image(size);
    std::memcpy(image.data(), data_of, size);
    lowkv_free(data_of);

    lowkv_sequence loaded = 77;
    const auto load = [&](lowkv_cache* into, const std::vector<unsigned char>& bytes) {
        return lowkv_load(into, bytes.data(), bytes.size(), &loaded);
    };
    for (int i = 0; i < 300; ++i) {
        std::vector<unsigned char> wrong = image;
        // The header's bytes, then any.
        const std::size_t at = i < 40 ? static_cast<std::size_t>(i) : 64 + random() % (size - 64);
        wrong[at] = static_cast<unsigned char>(wrong[at] ^ (1u << random() % 8));
        CHECK(load(cache, wrong) == LOWKV_INVALID_IMAGE);
        wrong = image;
        wrong.resize(i < 80 ? static_cast<std::size_t>(i) : random() % size);
        CHECK(load(cache, wrong) == LOWKV_INVALID_IMAGE);
    }
    image.push_back(0);
    CHECK(load(cache, image) == LOWKV_INVALID_IMAGE);
    image.pop_back();
    Cache other(config_of("lowkv2,window=32"));
    CHECK(load(other, image) == LOWKV_INVALID_IMAGE);
    lowkv_config config = config_of("lowkv2.8,window=32");
    config.layers = 2;
    Cache fewer(config);
    CHECK(load(fewer, image) == LOWKV_INVALID_IMAGE);
    CHECK(loaded == 77);
    CHECK(load(cache, image) == LOWKV_OK);
    CHECK(attend(cache, loaded, 2, numbers(random, heads * head_dim)).size() == heads * head_dim);
}
