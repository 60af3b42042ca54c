// The core by itself: a layer's cache that is appended to, attended to, forked and measured.

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "lowkv/attention.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"
#include "lowkv/serial.h"

int main() try {
    const lowkv::Scheme scheme = lowkv::parse_scheme("kivi2,window=64");
    const lowkv::Shape shape{.kv_heads = 2, .head_dim = 64};
    const auto plan = std::make_shared<lowkv::Plan>(scheme.layer(0), shape);
    const auto store = std::make_shared<lowkv::Store>();
    lowkv::Sequence sequence(store, plan, scheme.retention);

    // A model would project these; here they are random.
    const std::uint32_t tokens = 1000, heads = 8;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> keys(std::size_t{tokens} * shape.channels()), values(keys.size());
    std::vector<float> q(std::size_t{heads} * shape.head_dim), out(q.size());
    for (float& x : keys) x = normal(random);
    for (float& x : values) x = normal(random);
    for (float& x : q) x = normal(random);

    sequence.append(keys.data(), values.data(), tokens);

    // One query token with 8 heads, 4 to each kv head.
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
    const std::vector<float> exact = out;
    sequence.pack();  // after the step's attention: packs what has left the window
    lowkv::attend(sequence, io, params, workspace);

    double dot = 0, a = 0, b = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
        dot += double{exact[i]} * out[i];
        a += double{exact[i]} * exact[i];
        b += double{out[i]} * out[i];
    }
    const double cosine = dot / std::sqrt(a * b);

    const lowkv::Sequence continuation = sequence.fork();  // shares every block

    // In bytes, for a file or another process, and back: docs/images.md.
    const std::vector<std::byte> image = lowkv::save_sequence(sequence);
    const lowkv::Sequence again =
        lowkv::load_sequence(image, std::make_shared<lowkv::Store>(), plan, scheme.retention);
    io.n_cells = again.size();
    std::vector<float> same(out.size());
    io.out = same.data();
    lowkv::attend(again, io, params, workspace);

    const lowkv::StoreStats stats = store->stats();
    std::printf("%s: %.2f bits per element, %zu packed and %zu exact blocks, %zu bytes\n",
                lowkv::to_string(scheme).c_str(), plan->bits_per_element(), stats.packed_blocks,
                stats.exact_blocks, stats.packed_bytes + stats.exact_bytes);
    std::printf("cosine to the exact attention: %.4f\n", cosine);
    std::printf("image of %zu bytes: %s\n", image.size(), same == out ? "equal" : "different");
    return cosine > 0.85 && continuation.size() == tokens && same == out ? 0 : 1;
} catch (const lowkv::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
