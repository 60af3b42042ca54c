// Attention to a packed cache of random rows on a device, OpenCL's or (LOWKV_BENCH_CUDA) CUDA's,
// and on one core of the CPU. Arguments: scheme, head_dim, heads, kv heads, cells, queries,
// repetitions; `device`: not the CPU.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "lowkv/attention.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"
#ifdef LOWKV_BENCH_CUDA
#include "lowkv/cuda.h"
#else
#include "lowkv/opencl.h"
#endif

namespace {

struct Size {
    std::uint32_t head_dim, heads, kv_heads, cells, queries, repetitions;
};

double now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(time).count();
}

std::vector<float> numbers(std::size_t count) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> all(count);
    for (float& x : all) x = normal(random);
    return all;
}

// The median, in ms, after one call that isn't counted.
double measure(const lowkv::Scheme& scheme, const Size& size, std::shared_ptr<lowkv::Store> store,
               std::vector<float>& out) {
    const lowkv::Shape shape{.kv_heads = size.kv_heads, .head_dim = size.head_dim};
    const auto plan = std::make_shared<lowkv::Plan>(scheme.layer(0), shape);
    lowkv::Sequence sequence(std::move(store), plan, scheme.retention);
    const std::vector<float> rows = numbers(std::size_t{size.cells} * shape.channels());
    const std::vector<float> q = numbers(std::size_t{size.queries} * size.heads * size.head_dim);
    sequence.append(rows.data(), rows.data(), size.cells);
    sequence.pack();
    out.assign(q.size(), 0.0f);
    lowkv::AttentionIO io;
    io.q = q.data();
    io.out = out.data();
    io.q_token_stride = io.out_token_stride = std::size_t{size.heads} * size.head_dim;
    io.q_head_stride = io.out_head_stride = size.head_dim;
    io.tokens = size.queries;
    io.heads = size.heads;
    io.n_cells = sequence.size();
    lowkv::AttentionParams params;
    params.mask.kind = lowkv::Mask::Kind::causal;
    params.scale = 1.0f / std::sqrt(static_cast<float>(size.head_dim));
    lowkv::AttentionWorkspace workspace;
    std::vector<double> times;
    for (std::uint32_t i = 0; i <= size.repetitions; ++i) {
        const double begin = now();
        lowkv::attend(sequence, io, params, workspace);
        if (i > 0) times.push_back(now() - begin);
    }
    std::ranges::sort(times);
    return times[times.size() / 2];
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc != 8 && argc != 9) return 2;
    const auto number = [&](int i) { return static_cast<std::uint32_t>(std::atoi(argv[i])); };
    const lowkv::Scheme scheme = lowkv::parse_scheme(argv[1]);
    const Size size{number(2), number(3), number(4), number(5), number(6), std::max(number(7), 1u)};
    const double begin = now();
#ifdef LOWKV_BENCH_CUDA
    const auto device = lowkv::cuda_device("cuda");
#else
    const auto device = lowkv::opencl_device("opencl");
#endif
    const double made = now() - begin;
    std::vector<float> host, there;
    const double device_ms =
        measure(scheme, size, std::make_shared<lowkv::Store>(0, device), there);
    if (argc == 9) {
        std::printf("%s: %s %.3f ms\n", argv[1], std::string(device->name()).c_str(), device_ms);
        return 0;
    }
    const double host_ms = measure(scheme, size, std::make_shared<lowkv::Store>(), host);
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < host.size(); ++i) {
        difference += std::pow(host[i] - there[i], 2);
        norm += std::pow(host[i], 2);
    }
    std::printf("%s: CPU %.2f ms, %s %.2f ms (made in %.0f ms), difference %.1e\n", argv[1],
                host_ms, std::string(device->name()).c_str(), device_ms, made,
                std::sqrt(difference / norm));
} catch (const lowkv::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
