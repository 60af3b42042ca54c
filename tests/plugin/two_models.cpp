// Two models in one process: what is asked about a layer is answered for its own model, also where
// both are made, planned, computed and freed in threads at once (under ThreadSanitizer: make
// test-tsan).

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "ggml_cache.h"

namespace {

using namespace lowkv::test;

constexpr int cells = 256;

void use(const char* scheme) {
    ggml_log_set(
        [](ggml_log_level level, const char* text, void*) {
            if (level >= GGML_LOG_LEVEL_WARN) log_text() += text;
        },
        nullptr);
    ggml_backend_register(lowkv::ggml::backend_reg());
    lowkv::ggml::set_scheme(scheme);
    log_text().clear();
}

// Weights of the norms of a model's queries. Nothing is asserted here: threads make some.
class Norms {
  public:
    explicit Norms(int layers) {
        for (int l = 0; l < layers; ++l)
            weights_.push_back(ggml_new_tensor_1d(context_.get(), GGML_TYPE_F32, head_dim));
    }

    // Whether the norm is taken over, as of layers that store nothing themselves.
    bool takes(int layer) const {
        const Context context = new_context();
        ggml_context* c = context.get();
        ggml_tensor* norm = ggml_mul(c, ggml_new_tensor_3d(c, GGML_TYPE_F32, head_dim, heads, 1),
                                     weights_[static_cast<std::size_t>(layer)]);
        ggml_format_name(norm, "Qcur_normed-%d", layer);
        const bool taken = ggml_backend_dev_offload_op(lowkv::ggml::device(), norm);
        // The scheduler asks more than once.
        return ggml_backend_dev_offload_op(lowkv::ggml::device(), norm) && taken;
    }

    // The layers whose norms are taken, of a graph that stores no rows.
    std::vector<int> plan() const {
        std::vector<int> taken;
        for (int l = 0; l < static_cast<int>(weights_.size()); ++l)
            if (takes(l)) taken.push_back(l);
        return taken;
    }

  private:
    Context context_ = new_context();
    std::vector<ggml_tensor*> weights_;
};

// A model's caches: of its first layers, in one cache or, by turns, in two.
class Model {
  public:
    Model(int layers, int stored, int caches = 1) : norms_(layers), layers_(layers) {
        for (int cache = 0; cache < caches; ++cache) {
            Context context = new_context();
            for (int l = cache; l < stored; l += caches)
                for (const char part : {'k', 'v'}) {
                    ggml_tensor* t =
                        ggml_new_tensor_3d(context.get(), GGML_TYPE_F16, channels, cells, 1);
                    ggml_format_name(t, "cache_%c_l%d", part, l);
                    (part == 'k' ? keys_ : values_)[l] = t;
                }
            buffers_.emplace_back(ggml_backend_alloc_ctx_tensors_from_buft(
                context.get(), ggml_backend_dev_buffer_type(lowkv::ggml::device())));
            made_ &= buffers_.back() != nullptr;
            if (made_) ggml_backend_buffer_clear(buffers_.back().get(), 0);
            contexts_.push_back(std::move(context));
        }
    }

    bool made() const { return made_; }

    // As llama.cpp's scheduler asks about a graph of one token, which is then computed if there is
    // a backend. The layers whose norms are taken over.
    std::vector<int> step(ggml_backend_t backend = nullptr) const {
        const Context context = new_context();
        ggml_context* c = context.get();
        ggml_cgraph* graph = ggml_new_graph(c);
        ggml_tensor* numbers = ggml_new_tensor_1d(c, GGML_TYPE_I64, 1);
        ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, cells, 1);
        ggml_set_input(mask);
        std::vector<int> taken;
        const auto ask = [&](ggml_tensor* node) {
            if (!ggml_backend_dev_supports_op(lowkv::ggml::device(), node)) taken.push_back(-1);
            ggml_build_forward_expand(graph, node);
        };
        for (int l = 0; l < layers_; ++l) {
            if (norms_.takes(l)) taken.push_back(l);
            if (!keys_.contains(l)) continue;
            for (ggml_tensor* target : {keys_.at(l), values_.at(l)})
                ask(ggml_set_rows(c, target, ggml_new_tensor_2d(c, GGML_TYPE_F32, channels, 1),
                                  numbers));
            const auto view = [&](ggml_tensor* t) {
                return ggml_permute(
                    c,
                    ggml_view_4d(c, t, head_dim, kv_heads, cells, 1, head_dim * sizeof(ggml_fp16_t),
                                 row_bytes, row_bytes * cells, 0),
                    0, 2, 1, 3);
            };
            ask(ggml_flash_attn_ext(c, ggml_new_tensor_3d(c, GGML_TYPE_F32, head_dim, 1, heads),
                                    view(keys_.at(l)), view(values_.at(l)), mask, 0.125f, 0, 0));
        }
        if (backend == nullptr) return taken;
        const Buffer memory(
            ggml_backend_alloc_ctx_tensors_from_buft(c, ggml_backend_cpu_buffer_type()));
        ggml_backend_buffer_clear(memory.get(), 0);  // a token in cell 0, which sees all
        if (ggml_backend_graph_compute(backend, graph) != fine) taken.push_back(-2);
        return taken;
    }

  private:
    Norms norms_;
    int layers_;
    bool made_ = true;
    std::vector<Context> contexts_;
    std::map<int, ggml_tensor*> keys_, values_;
    std::vector<Buffer> buffers_;
};

using Numbers = std::vector<int>;

}  // namespace

TEST_CASE("the layers that store nothing are those of the model whose graph is planned") {
    use("exact");
    const Model small(4, 2);
    CHECK(small.step() == Numbers{2, 3});
    const Model large(8, 6, 2);
    CHECK(large.step() == Numbers{6, 7});
    for (int i = 0; i < 2; ++i) {
        CHECK(small.step() == Numbers{2, 3});
        CHECK(small.step() == Numbers{2, 3});
        CHECK(large.step() == Numbers{6, 7});
    }
}

TEST_CASE("a draft model that reads its target's caches stores nothing in any layer") {
    use("exact");
    const Norms nobodys(2);
    CHECK(nobodys.plan().empty());  // no cache is ours
    std::optional<Model> target(std::in_place, 6, 4, 2);
    CHECK(target->step() == Numbers{4, 5});
    const Norms draft(4);
    for (int i = 0; i < 3; ++i) {
        CHECK(draft.plan() == Numbers{0, 1, 2, 3});
        CHECK(draft.plan() == Numbers{0, 1, 2, 3});
        CHECK(target->step() == Numbers{4, 5});
    }
    CHECK(draft.plan() == Numbers{0, 1, 2, 3});
    const Model other(3, 3);  // an ordinary one, planned behind the draft's graph
    CHECK(other.step() == Numbers{});
    CHECK(draft.plan() == Numbers{0, 1, 2, 3});
    target.reset();
    CHECK(other.step() == Numbers{});
    CHECK(other.step() == Numbers{});
}

TEST_CASE("a scheme's layers are looked for in the model that is planned, then in earlier ones") {
    use("kivi2,layer.4=kivi4");
    {
        const Model small(2, 2);
        small.step();
        CHECK(logged("speaks of layer 4, but the model's last layer with a cache is 1"));
        CHECK_FALSE(Model(2, 2).made());  // nor is there memory for its graphs
    }
    use("kivi2,layer.4=kivi4");
    {
        const Model large(5, 5, 2);
        large.step();
        CHECK(log_text().empty());
        const Model draft(2, 2);  // the scheme was meant for the other one
        draft.step();
        CHECK(logged("it was meant for another model"));
        CHECK(Model(2, 2).made());
    }
    use("kivi2,layer.4=kivi4");
    const Model small(2, 2);
    small.step();
    CHECK_FALSE(Model(2, 2).made());
}

TEST_CASE("models are made, planned, computed and freed in threads at once") {
    use("kivi2,window=32,sinks=0");
    std::atomic<int> wrong = 0;
    const auto work = [&](int stored, int caches) {
        const ggml_backend_ptr backend(ggml_backend_dev_init(lowkv::ggml::device(), nullptr));
        lowkv::ggml::set_threads(backend.get(), 1);
        for (int round = 0; round < 100; ++round) {
            const Model model(stored + 1, stored, caches);
            for (int i = 0; i < 2; ++i)
                if (!model.made() || model.step(backend.get()) != Numbers{stored}) ++wrong;
        }
    };
    std::vector<std::thread> threads;
    threads.emplace_back(work, 2, 1);
    threads.emplace_back(work, 6, 2);
    threads.emplace_back(work, 1, 1);
    threads.emplace_back(work, 8, 1);
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
}
