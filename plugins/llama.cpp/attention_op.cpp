#include "attention_op.h"

#include <cmath>
#include <cstring>

#include "host.h"
#include "lowkv/error.h"
#include "rope_params.h"

namespace lowkv::ggml {

AttentionOp::AttentionOp(const ggml_tensor& node)
    : q(node.src[0]), k(node.src[1]), v(node.src[2]), mask(node.src[3]), sinks(node.src[4]) {
    const auto parameter = [&](int i) {
        float value = 0;
        std::memcpy(&value, node.op_params + i, sizeof value);
        return value;
    };
    scale = parameter(0);
    max_bias = parameter(1);
    softcap = parameter(2);
}

Shape AttentionOp::shape() const {
    const bool latent = root(k) == root(v) && k->ne[2] == 1 && v->view_offs == k->view_offs &&
                        v->nb[1] == k->nb[1] && v->nb[3] == k->nb[3];
    return {.kv_heads = static_cast<std::uint32_t>(k->ne[2]),
            .head_dim = static_cast<std::uint32_t>(k->ne[0]),
            .value_dim = latent ? static_cast<std::uint32_t>(v->ne[0]) : 0};
}

std::string AttentionOp::unsupported_heads() const {
    if (shape().latent()) return {};
    if (root(k) == root(v)) return "its values are part of its keys (multi-head latent attention)";
    if (k->ne[0] != v->ne[0])
        return concat("its keys have ", k->ne[0], " channels per head and its values ", v->ne[0]);
    if (k->ne[2] != v->ne[2]) return "its keys and values differ in heads";
    return {};
}

std::string AttentionOp::unsupported_mask() const {
    const ggml_tensor* source = behind_views(mask);
    if (source == nullptr || operation(*source) == op_name::none) return {};
    return concat("its attention mask is computed in the graph by ", ggml_op_desc(source),
                  " (sparse attention)");
}

bool AttentionOp::served_layout() const {
    const ggml_tensor* keys = root(k);
    const ggml_tensor* values = root(v);
    const auto views_all_rows = [](const ggml_tensor* view, const ggml_tensor* whole) {
        return view->type == GGML_TYPE_F16 && view->nb[1] == whole->nb[1] &&
               view->nb[2] == static_cast<std::size_t>(view->ne[0]) * view->nb[0] &&
               (view->ne[3] == 1 || view->nb[3] == whole->nb[2]) &&
               view->view_offs % whole->nb[2] == 0 && view->ne[0] * view->ne[2] == whole->ne[0];
    };
    if (!views_all_rows(k, keys) || !(shape().latent() || views_all_rows(v, values))) return false;
    if (k->view_offs / keys->nb[2] != v->view_offs / values->nb[2]) return false;
    if (k->ne[1] != v->ne[1] || k->ne[3] != v->ne[3] || q->ne[3] != k->ne[3]) return false;
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) || q->ne[2] % k->ne[2] != 0)
        return false;
    if (sinks != nullptr && sinks->type != GGML_TYPE_F32) return false;
    if (mask == nullptr) return max_bias == 0.0f;
    return mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(ggml_fp16_t) && mask->ne[2] == 1 &&
           (mask->ne[3] == 1 || mask->ne[3] == q->ne[3]) && mask->ne[1] >= q->ne[1] &&
           mask->ne[0] >= k->ne[1];
}

MaskRows AttentionOp::mask_rows(std::int64_t stream) const {
    const ggml_tensor* source = behind_views(mask);
    // Without the flag it may be the scheduler's copy of a computed mask.
    const bool input = source == nullptr || (operation(*source) == op_name::none &&
                                             (source->flags & GGML_TENSOR_FLAG_INPUT) != 0);
    MaskRows rows{.data = nullptr,
                  .stride = 0,
                  .visible = static_cast<std::uint32_t>(k->ne[1]),
                  .tensor = input ? mask : nullptr};
    if (mask == nullptr) return rows;
    rows.data = reinterpret_cast<const std::uint16_t*>(static_cast<const std::byte*>(mask->data) +
                                                       (stream % mask->ne[3]) * mask->nb[3]);
    rows.stride = mask->nb[1] / sizeof(ggml_fp16_t);
    return rows;
}

std::vector<float> AttentionOp::slopes() const {
    if (max_bias <= 0.0f) return {};
    const auto heads = static_cast<std::uint32_t>(q->ne[2]);
    const std::uint32_t power = 1u << static_cast<std::uint32_t>(std::floor(std::log2(heads)));
    const float m0 = std::pow(2.0f, -max_bias / static_cast<float>(power));
    const float m1 = std::pow(2.0f, -(max_bias / 2.0f) / static_cast<float>(power));
    std::vector<float> slopes(heads);
    for (std::uint32_t h = 0; h < heads; ++h)
        slopes[h] = h < power ? std::pow(m0, static_cast<float>(h + 1))
                              : std::pow(m1, static_cast<float>(2 * (h - power) + 1));
    return slopes;
}

QueryRows AttentionOp::queries(std::int64_t stream) const {
    const auto* data = static_cast<const std::byte*>(q->data) + stream * q->nb[3];
    return {reinterpret_cast<const float*>(data), q->nb[1] / sizeof(float),
            q->nb[2] / sizeof(float), static_cast<std::uint32_t>(q->ne[1]),
            static_cast<std::uint32_t>(q->ne[2])};
}

std::uint32_t AttentionOp::first_stream(const LayerCache& layer) const {
    return static_cast<std::uint32_t>(k->view_offs / (layer.row_bytes(Part::keys) * layer.cells()));
}

}  // namespace lowkv::ggml
