#pragma once
// What the kernel tests share: random attention parameters of every kind, and whether the forced
// implementation can run.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include "codec/small_floats.h"
#include "lowkv/attention.h"
#include "lowkv/codec.h"
#include "lowkv/implementation.h"

namespace lowkv::test {

// This CPU lacks the implementation that LOWKV_IMPLEMENTATION names.
inline bool forced_is_missing() {
    const char* forced = std::getenv("LOWKV_IMPLEMENTATION");
    if (forced == nullptr) return false;
    for (const Implementation& i : implementations()) {
        if (i.name == forced) return !i.supported;
    }
    return true;
}

// AMX multiplies numbers of 8 bits where tokens are packed. A query's and a key's are each off by
// at most 2^-9, so a score is by 2^-8 of what its channels' products add up to in size: with the
// outliers of our keys, up to 15. By so much, .06, a sum's logarithm may be off, or the weights of
// two tokens drift apart, and an output with them; the 2^-8 of weights and values are small beside
// it.
inline constexpr double matrix_budget = 6e-2;

inline bool multiplies_matrices(const Plan& plan, std::uint32_t queries,
                                std::uint32_t decode_rows) {
    const Shape& shape = plan.shape();
    const bool exact = plan.keys().exact() && (shape.latent() || plan.values().exact());
    const bool prompt = queries / shape.kv_heads > decode_rows || shape.latent();
    return plan.implementation() == "amx" && decode_rows != 0 && prompt && !exact;
}

struct RandomParams {
    std::vector<std::uint16_t> f16;
    std::vector<float> f32, slopes, sinks;
    AttentionParams params;

    RandomParams(const RandomParams&) = delete;
    RandomParams& operator=(const RandomParams&) = delete;

    // A third of the cells is hidden, and those that hidden(token, cell) names. ALiBi, a soft-cap
    // and, if wanted, sink logits take turns with the seed.
    template <class Hidden>
    RandomParams(Mask::Kind kind, std::uint32_t tokens, std::uint32_t n_cells, std::uint32_t heads,
                 unsigned seed, bool with_sinks, Hidden hidden)
        : f16(std::size_t{tokens} * n_cells), f32(f16.size()), slopes(heads), sinks(heads) {
        std::mt19937 random(seed);
        for (std::size_t i = 0; i < f32.size(); ++i) {
            const bool hide = random() % 3 == 0 || hidden(i / n_cells, i % n_cells);
            const int value = static_cast<int>(random() % 16) - 8;
            f32[i] = hide ? -INFINITY : static_cast<float>(value) / 4;
            f16[i] = hide ? std::uint16_t{0xfc00} : codec::f32_to_f16(f32[i]);
        }
        params.mask.kind = kind;
        params.mask.row_stride = n_cells;
        if (kind == Mask::Kind::additive_f16) params.mask.data = f16.data();
        if (kind == Mask::Kind::additive_f32) params.mask.data = f32.data();
        for (std::uint32_t h = 0; h < heads; ++h) {
            slopes[h] = std::exp2(-static_cast<float>(h + 1));
            sinks[h] = static_cast<float>(h) - 2;
        }
        if (seed % 2 == 0 && kind != Mask::Kind::none) params.alibi_slopes = slopes.data();
        if (seed % 3 == 0 && with_sinks) params.sink_logits = sinks.data();
        if (seed % 3 == 1) params.softcap = 5.0f;
    }

    // So many cells of each row, from the first on, are seen with nothing added.
    void open(std::size_t cells) {
        for (std::size_t i = 0; i < f32.size(); ++i)
            if (i % params.mask.row_stride < cells) f32[i] = f16[i] = 0;
    }
};

}  // namespace lowkv::test
