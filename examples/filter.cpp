// A filter: of the tokens that leave the window, heavy hitters stay exact, half are dropped and the
// rest is packed. Prints what is left, and what the attention mass costs beside attend().

#include "lowkv/filter.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "lowkv/attention.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"

namespace {

using Clock = std::chrono::steady_clock;

template <class Work>
double seconds(const Work& work) {
    const auto start = Clock::now();
    work();
    return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

int main() try {
    const lowkv::Scheme scheme = lowkv::parse_scheme("kivi4,filter=heavy,keep=5%,evict=50%");
    const lowkv::Shape shape{.kv_heads = 2, .head_dim = 128};
    const auto plan = std::make_shared<lowkv::Plan>(scheme.layer(0), shape);
    const auto store = std::make_shared<lowkv::Store>();
    lowkv::FilteredSequence sequence(store, plan, scheme.retention);

    const std::uint32_t prompt = 4096, steps = 200, heads = 8;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto rows = [&](std::size_t floats) {
        std::vector<float> row(floats);
        for (float& x : row) x = normal(random);
        return row;
    };

    lowkv::AttentionParams params;
    params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    params.mask.kind = lowkv::Mask::Kind::causal;
    lowkv::AttentionWorkspace workspace;
    double attending = 0, window_mass = 0, all_mass = 0;

    // Per step: append, attend, report the mass, pack.
    const auto step = [&](std::uint32_t tokens) {
        const std::size_t q_floats = std::size_t{heads} * shape.head_dim;
        const std::vector<float> keys = rows(std::size_t{tokens} * shape.channels());
        const std::vector<float> values = rows(keys.size()), q = rows(tokens * q_floats);
        std::vector<float> out(q.size()), lse(std::size_t{tokens} * heads);
        sequence.append(keys.data(), values.data(), tokens);
        lowkv::AttentionIO io;
        io.q = q.data();
        io.out = out.data();
        io.q_token_stride = io.out_token_stride = q_floats;
        io.q_head_stride = io.out_head_stride = shape.head_dim;
        io.tokens = tokens;
        io.heads = heads;
        io.n_cells = sequence.size();
        io.lse = lse.data();  // what the mass needs
        attending += seconds([&] { attend(sequence, io, params, workspace); });
        window_mass += seconds([&] { add_attention_mass(sequence, io, params, workspace); });
        io.n_cells = sequence.cells().size();
        std::vector<float> mass(io.n_cells);
        all_mass +=
            seconds([&] { attention_mass(sequence.cells(), io, params, 0, mass, workspace); });
        sequence.pack();
    };
    const auto report = [&](const char* what) {
        std::printf(
            "%s: attention mass costs %.0f%% of attend() for the undecided tokens, %.0f%% "
            "for all cells\n",
            what, 100 * window_mass / attending, 100 * all_mass / attending);
        attending = window_mass = all_mass = 0;
    };

    step(prompt);
    report("prompt");
    for (std::uint32_t i = 0; i < steps; ++i) step(1);
    report("decode");

    const lowkv::StoreStats stats = store->stats();
    const double exact = 4.0 * sequence.size() * shape.channels();
    std::printf("%u tokens, %u left: %zu exact and %zu packed blocks, %.0f%% of f16's bytes\n",
                sequence.size(), sequence.cells().size(), stats.exact_blocks, stats.packed_blocks,
                100 * static_cast<double>(stats.exact_bytes + stats.packed_bytes) / exact);
    return sequence.evicted() > sequence.size() / 3 ? 0 : 1;
} catch (const lowkv::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
