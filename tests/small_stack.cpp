// Threads of 512 KB, as macOS gives, can do all that an Executor's tasks do (lowkv/executor.h).

#include <doctest/doctest.h>
#include <pthread.h>

#include <cmath>
#include <memory>
#include <vector>

#include "batch_common.h"
#include "lowkv/attention.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"

using namespace lowkv;

namespace {

// Sanitizers keep more on the stack: there only the run itself is tested.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t stack_bytes = std::size_t{8} << 20;
#else
constexpr std::size_t stack_bytes = std::size_t{448} << 10;
#endif

template <class F>
void on_small_stack(F f) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    REQUIRE(pthread_attr_setstacksize(&attributes, stack_bytes) == 0);
    pthread_t thread;
    const auto run = [](void* its) -> void* {
        (*static_cast<F*>(its))();
        return nullptr;
    };
    REQUIRE(pthread_create(&thread, &attributes, run, &f) == 0);
    pthread_join(thread, nullptr);
    pthread_attr_destroy(&attributes);
}

}  // namespace

TEST_CASE("every preset packs, decodes and attends on a small stack") {
    for (const Preset& preset : presets()) {
        for (const std::uint32_t head_dim : {64u, 128u, 256u, 576u}) {
            std::shared_ptr<const Plan> plan;
            try {
                plan = std::make_shared<const Plan>(preset.scheme.base, Shape{1, head_dim});
            } catch (const Error&) {
                continue;  // with a calibration, or of other head sizes
            }
            Sequence sequence(std::make_shared<Store>(), plan, Retention{.window = 0, .sinks = 0});
            std::vector<float> rows(std::size_t{256} * head_dim), out(std::size_t{20} * head_dim);
            for (std::size_t i = 0; i < rows.size(); ++i)
                rows[i] = std::sin(static_cast<float>(i * i % 10007));
            bool done = false;
            on_small_stack([&] {
                sequence.append(rows.data(), rows.data(), 256);
                sequence.pack();
                std::vector<float> row(head_dim);
                sequence.read_key(3, row.data());
                for (const std::uint32_t tokens : {1u, 20u}) {
                    AttentionIO io;
                    io.q = rows.data();
                    io.out = out.data();
                    io.tokens = tokens;
                    io.heads = 1;
                    io.q_head_stride = io.out_head_stride = head_dim;
                    io.q_token_stride = io.out_token_stride = head_dim;
                    io.n_cells = 256;
                    AttentionWorkspace workspace;
                    attend(sequence, io, {}, workspace);
                }
                done = true;
            });
            CHECK(done);
        }
    }
}
