// What rope_of reads from a ROPE node, against what ggml's CPU backend computes from that node.

#include "rope_params.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ggml-cpu.h"
#include "ggml.h"
#include "lowkv/error.h"

namespace {

using lowkv::Rope;

constexpr int head_dim = 96, heads = 3, tokens = 40;

struct Parameters {
    std::string name;
    int turned = head_dim, mode = GGML_ROPE_TYPE_NEOX, original_context = 8192;
    float base = 10000, scale = 1, mix = 0, attention = 1, fast = 32, slow = 1;
    bool factors = false;
};

class Node {
  public:
    explicit Node(const Parameters& p) {
        input_ = ggml_new_tensor_3d(get(), GGML_TYPE_F32, head_dim, heads, tokens);
        ggml_tensor* positions = ggml_new_tensor_1d(get(), GGML_TYPE_I32, tokens);
        std::mt19937 random(7);
        std::normal_distribution<float> normal;
        for (int i = 0; i < head_dim * heads * tokens; ++i) data(input_)[i] = normal(random);
        for (int i = 0; i < tokens; ++i) {
            position_.push_back(i);  // ggml's own rounding grows with the position
            std::memcpy(static_cast<std::int32_t*>(positions->data) + i, &position_.back(), 4);
        }
        ggml_tensor* factors = nullptr;
        if (p.factors) {
            factors = ggml_new_tensor_1d(get(), GGML_TYPE_F32, p.turned / 2);
            for (int i = 0; i < p.turned / 2; ++i)
                data(factors)[i] = 1.0f + 0.25f * static_cast<float>(i);
        }
        output_ =
            ggml_rope_ext(get(), input_, positions, factors, p.turned, p.mode, p.original_context,
                          p.base, p.scale, p.mix, p.attention, p.fast, p.slow);
    }

    ggml_tensor& node() { return *output_; }

    // The largest difference between ggml's result and `rope` applied in double precision.
    double error(const Rope& rope) {
        ggml_cgraph* graph = ggml_new_graph(get());
        ggml_build_forward_expand(graph, output_);
        REQUIRE(ggml_graph_compute_with_ctx(get(), graph, 1) == GGML_STATUS_SUCCESS);
        double worst = 0;
        for (int t = 0; t < tokens; ++t) {
            for (int h = 0; h < heads; ++h) {
                const std::size_t at = static_cast<std::size_t>(t * heads + h) * head_dim;
                std::vector<double> x(data(input_) + at, data(input_) + at + head_dim);
                turn(rope, position_[static_cast<std::size_t>(t)], x);
                for (std::size_t c = 0; c < head_dim; ++c)
                    worst = std::max(worst,
                                     std::abs(x[c] - static_cast<double>(data(output_)[at + c])));
            }
        }
        return worst;
    }

  private:
    static void turn(const Rope& rope, int position, std::vector<double>& x) {
        const std::size_t pairs = rope.frequencies.size();
        for (std::size_t i = 0; i < pairs; ++i) {
            const bool halves = rope.pairs == Rope::Pairs::halves;
            double& a = x[halves ? i : 2 * i];
            double& b = x[halves ? i + pairs : 2 * i + 1];
            const double angle = position * static_cast<double>(rope.frequencies[i]);
            const double c = std::cos(angle) * static_cast<double>(rope.magnitude);
            const double s = std::sin(angle) * static_cast<double>(rope.magnitude);
            const double first = a * c - b * s;
            b = a * s + b * c;
            a = first;
        }
    }

    static float* data(ggml_tensor* tensor) { return static_cast<float*>(tensor->data); }
    ggml_context* get() { return context_.get(); }

    struct Free {
        void operator()(ggml_context* context) const { ggml_free(context); }
    };
    std::unique_ptr<ggml_context, Free> context_{ggml_init({1 << 22, nullptr, false})};
    ggml_tensor *input_ = nullptr, *output_ = nullptr;
    std::vector<int> position_;
};

lowkv::ErrorCode refusal(const ggml_tensor& node, const std::string& words) {
    try {
        lowkv::ggml::rope_of(node);
    } catch (const lowkv::Error& error) {
        CHECK(std::string(error.what()).find(words) != std::string::npos);
        return error.code();
    }
    FAIL("accepted");
    return {};
}

}  // namespace

TEST_CASE("a node's rope is what ggml computes") {
    for (const Parameters& p :
         {Parameters{.name = "NeoX"},
          Parameters{.name = "neighbours", .mode = GGML_ROPE_TYPE_NORMAL},
          Parameters{.name = "partial", .turned = 32},
          Parameters{.name = "partial neighbours", .turned = 64, .mode = GGML_ROPE_TYPE_NORMAL},
          Parameters{.name = "large base", .base = 1e6f},
          Parameters{.name = "frequency factors", .factors = true},
          Parameters{.name = "partial factors", .turned = 64, .factors = true},
          Parameters{.name = "linear", .scale = 0.25f},
          Parameters{.name = "YaRN", .original_context = 4096, .scale = 0.25f, .mix = 1},
          Parameters{.name = "half YaRN",
                     .mode = GGML_ROPE_TYPE_NORMAL,
                     .scale = 0.125f,
                     .mix = 0.5f,
                     .attention = 1.5f},
          Parameters{.name = "YaRN with factors",
                     .base = 500000,
                     .scale = 0.5f,
                     .mix = 1,
                     .attention = 0.9f,
                     .factors = true},
          Parameters{.name = "YaRN of a short context",
                     .original_context = 128,
                     .scale = 0.5f,
                     .mix = 1,
                     .fast = 8,
                     .slow = 2}}) {
        CAPTURE(p.name);
        Node node(p);
        const Rope rope = lowkv::ggml::rope_of(node.node());
        CHECK(rope.frequencies.size() == static_cast<std::size_t>(p.turned / 2));
        CHECK(node.error(rope) <= 1e-5 * static_cast<double>(std::max(1.0f, rope.magnitude)));
        // The parameters that matter are seen: another base is far off.
        Parameters other = p;
        other.base *= 1.5f;
        Node different(other);
        CHECK(node.error(lowkv::ggml::rope_of(different.node())) > 0.01);
    }
}

TEST_CASE("what has no single angle per token is refused by name") {
    Node node({});
    const auto mode = [&](int value) -> const ggml_tensor& {
        node.node().op_params[2] = value;
        return node.node();
    };
    CHECK(refusal(mode(GGML_ROPE_TYPE_MROPE), "M-RoPE") == lowkv::ErrorCode::unsupported);
    CHECK(refusal(mode(GGML_ROPE_TYPE_IMROPE), "M-RoPE") == lowkv::ErrorCode::unsupported);
    CHECK(refusal(mode(GGML_ROPE_TYPE_VISION), "vision") == lowkv::ErrorCode::unsupported);
    CHECK(refusal(mode(77), "mode 77") == lowkv::ErrorCode::unsupported);
    static_cast<void>(mode(GGML_ROPE_TYPE_NEOX));
    node.node().op_params[15] = 16;
    CHECK(refusal(node.node(), "from channel 16") == lowkv::ErrorCode::unsupported);
    CHECK(refusal(*node.node().src[0], "no ROPE node") == lowkv::ErrorCode::invalid_argument);
}

TEST_CASE("a RoPE behind a norm is found, one behind a product with weights is not") {
    Node node({});
    ggml_tensor norm{}, scaled{}, product{}, position{};
    norm.op = GGML_OP_RMS_NORM;
    norm.src[0] = &node.node();
    scaled.op = GGML_OP_MUL;
    scaled.src[0] = &position;
    scaled.src[1] = &norm;
    CHECK(lowkv::ggml::rope_above(&scaled) == nullptr);
    CHECK(lowkv::ggml::rotated_before(&scaled));
    product.op = GGML_OP_MUL_MAT;
    product.src[1] = &scaled;
    norm.src[0] = &product;
    CHECK_FALSE(lowkv::ggml::rotated_before(&scaled));
    CHECK_FALSE(lowkv::ggml::rotated_before(nullptr));
    norm.src[0] = &scaled;  // too deep to tell
    CHECK(lowkv::ggml::rotated_before(&scaled));
}
