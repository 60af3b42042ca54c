// What the host takes for a decode step's attention on a device whose kernels and copies take no
// time, in us a layer: the median of steps that append a token to each sequence, attend and pack.
// Arguments: scheme, tokens, sequences, layers, steps. 32 query heads, 8 kv heads of 128 channels.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "devices/host/device.h"
#include "devices/null_queue.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"

namespace {

double now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::micro>(time).count();
}

double median(std::vector<double>& times) {
    std::ranges::sort(times);
    return times[times.size() / 2];
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc != 6) return 2;
    const auto number = [&](int i) { return static_cast<std::uint32_t>(std::atoi(argv[i])); };
    const lowkv::Scheme scheme = lowkv::parse_scheme(argv[1]);
    const std::uint32_t tokens = number(2), sequences = number(3), layers = number(4);
    const lowkv::Shape shape{.kv_heads = 8, .head_dim = 128};
    const auto device =
        lowkv::devices::make_device(std::make_unique<lowkv::test::NullQueue>(), "null");
    const auto store = std::make_shared<lowkv::Store>(0, device);
    const auto plan = std::make_shared<lowkv::Plan>(scheme.layer(0), shape);
    std::vector<lowkv::Batch> batches;
    float data[1] = {};
    const auto append = [&](lowkv::Batch& batch, std::uint32_t count) {
        const lowkv::BatchRows rows{data, lowkv::RowType::f16, {shape.channels(), 128, 0}};
        batch.append(rows, rows, count);
    };
    for (std::uint32_t layer = 0; layer < layers; ++layer)
        batches.emplace_back(store, plan, scheme.retention, sequences);
    for (std::uint32_t done = 0; done < tokens; done += 512) {
        for (lowkv::Batch& batch : batches) {
            append(batch, 512);
            batch.pack();
        }
    }
    lowkv::BatchAttention a;
    a.io.q = data;
    a.io.out = data;
    a.io.q_head_stride = a.io.out_head_stride = 128;
    a.q_sequence_stride = a.out_sequence_stride = 32 * 128;
    a.io.tokens = 1;
    a.io.heads = 32;
    a.params.mask.kind = lowkv::Mask::Kind::causal;
    lowkv::AttentionWorkspace workspace;
    std::vector<double> appends, attends, packs;
    for (std::uint32_t step = 0; step < number(5); ++step) {
        for (lowkv::Batch& batch : batches) {
            const double begin = now();
            append(batch, 1);
            const double appended = now();
            batch.attend(a, workspace);
            const double attended = now();
            batch.pack();
            appends.push_back(appended - begin);
            attends.push_back(attended - appended);
            packs.push_back(now() - attended);
        }
    }
    std::printf("%-12s append %7.1f us, attend %7.1f us, pack %6.1f us\n", argv[1], median(appends),
                median(attends), median(packs));
} catch (const lowkv::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
