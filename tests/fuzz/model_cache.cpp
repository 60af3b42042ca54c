// A sequence of all layers, as the C interface saves and loads it (lowkv/lowkv.h).

#include <memory>
#include <string>
#include <vector>

#include "common/target.h"
#include "lowkv/lowkv.h"

namespace lowkv::fuzz {
namespace {

constexpr std::uint32_t layers = 2, kv_heads = 1, head_dim = 64;
constexpr const char* schemes[] = {"lowkv2.8,window=0,sinks=0", "kivi2,window=8",
                                   "lowkv4,layer.1=exact,flush=32"};

void require_ok(lowkv_status status) { require(status == LOWKV_OK, lowkv_error()); }

struct Cache {
    lowkv_cache* cache = nullptr;

    explicit Cache(const char* scheme) {
        lowkv_config config{};
        config.size = sizeof config;
        config.scheme = scheme;
        config.layers = layers;
        config.kv_heads = kv_heads;
        config.head_dim = head_dim;
        require_ok(lowkv_cache_new(&config, &cache));
    }
    ~Cache() { lowkv_cache_free(cache); }
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    Bytes save(lowkv_sequence sequence) const {
        void* data = nullptr;
        std::size_t size = 0;
        require_ok(lowkv_save(cache, sequence, &data, &size));
        const auto* begin = static_cast<const std::byte*>(data);
        Bytes bytes(begin, begin + size);
        lowkv_free(data);
        return bytes;
    }
    std::uint32_t tokens(lowkv_sequence sequence) const {
        std::uint32_t count = 0;
        require_ok(lowkv_sequence_tokens(cache, sequence, 0, &count));
        return count;
    }
    void step(lowkv_sequence sequence, std::uint32_t tokens) {
        const std::vector<float> rows = numbers(std::size_t{tokens} * head_dim, tokens);
        std::vector<float> out(rows.size());
        for (std::uint32_t layer = 0; layer < layers; ++layer) {
            const lowkv_rows data{rows.data(), LOWKV_DTYPE_F32, 0, 0};
            require_ok(lowkv_append(cache, sequence, layer, data, data, tokens));
            lowkv_attention attention{};
            attention.size = sizeof attention;
            attention.sequence = sequence;
            attention.tokens = tokens;
            attention.heads = kv_heads;
            attention.q = rows.data();
            attention.out = out.data();
            attention.causal = 1;
            require_ok(lowkv_attend(cache, layer, &attention, 1, nullptr));
        }
        require_ok(lowkv_pack(cache));
    }
};

}  // namespace

std::vector<Bytes> seeds() {
    std::vector<Bytes> all;
    for (unsigned number = 0; number < std::size(schemes); ++number) {
        Cache cache(schemes[number]);
        lowkv_sequence sequence = 0;
        require_ok(lowkv_sequence_add(cache.cache, &sequence));
        for (const std::uint32_t tokens : {0u, 7u, 200u}) {
            if (tokens > 0) cache.step(sequence, tokens);
            all.push_back(seed({number, 1}, cache.save(sequence)));
        }
    }
    return all;
}

void try_bytes(std::span<const std::byte> bytes) {
    Input input(bytes);
    const char* scheme = schemes[input.below(std::size(schemes))];
    const unsigned how = input.byte();
    Bytes file = input.rest();
    if ((how & 1) != 0) seal_images(file);
    Cache cache(scheme);
    lowkv_sequence sequence = 0, again = 0;
    const lowkv_status status = lowkv_load(cache.cache, file.data(), file.size(), &sequence);
    if (status != LOWKV_OK) {
        require(status == LOWKV_INVALID_IMAGE || file.empty(), lowkv_error());
        lowkv_bytes held{};
        require_ok(lowkv_cache_bytes(cache.cache, &held));
        require(held.unquantized + held.packed == 0, "a sequence that was refused takes memory");
        return;
    }
    const Bytes saved = cache.save(sequence);
    require_ok(lowkv_load(cache.cache, saved.data(), saved.size(), &again));
    require(cache.save(again) == saved, "a sequence changes when it is loaded and saved again");
    require_ok(lowkv_sequence_remove(cache.cache, again));
    if (cache.tokens(sequence) > 1 << 16) return;
    cache.step(sequence, 40);
    require_ok(lowkv_sequence_truncate(cache.cache, sequence, cache.tokens(sequence) / 2));
    cache.step(sequence, 1);
}

}  // namespace lowkv::fuzz
