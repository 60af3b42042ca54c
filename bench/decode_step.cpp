// One decode step over a packed cache of random rows: what bench/instructions.py counts. Arguments:
// scheme, head_dim, tokens, heads that share a kv head.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "lowkv/attention.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/implementation.h"
#include "lowkv/scheme.h"

int main(int argc, char** argv) try {
    if (argc != 5) return 2;
    const auto number = [&](int i) { return static_cast<std::uint32_t>(std::atoi(argv[i])); };
    const lowkv::Scheme scheme = lowkv::parse_scheme(argv[1]);
    const lowkv::Shape shape{.kv_heads = 1, .head_dim = number(2)};
    const std::uint32_t tokens = number(3), heads = number(4);
    const auto plan = std::make_shared<lowkv::Plan>(scheme.layer(0), shape);
    lowkv::Sequence sequence(std::make_shared<lowkv::Store>(), plan, scheme.retention);

    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> keys(std::size_t{tokens} * shape.channels()), values(keys.size());
    std::vector<float> q(std::size_t{heads} * shape.head_dim), out(q.size());
    for (std::vector<float>* all : {&keys, &values, &q}) {
        for (float& x : *all) x = normal(random);
    }
    sequence.append(keys.data(), values.data(), tokens);
    sequence.pack();

    lowkv::AttentionIO io;
    io.q = q.data();
    io.out = out.data();
    io.q_token_stride = io.out_token_stride = q.size();
    io.q_head_stride = io.out_head_stride = shape.head_dim;
    io.tokens = 1;
    io.heads = heads;
    io.n_cells = sequence.size();
    lowkv::AttentionParams params;
    params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    lowkv::AttentionWorkspace workspace;
    lowkv::attend(sequence, io, params, workspace);
    std::printf("%s\n", std::string(lowkv::active_implementation().name).c_str());
} catch (const lowkv::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
