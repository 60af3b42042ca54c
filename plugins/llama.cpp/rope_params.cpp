// The arithmetic of ggml's CPU backend (ggml_rope_cache_init in ops.cpp): every angle is the
// position times a constant, so a node's parameters are one frequency per pair and one magnitude.

#include "rope_params.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <numbers>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "host.h"
#include "lowkv/error.h"

namespace lowkv::ggml {
namespace {

// Places in op_params, see ggml_rope_impl in ggml.c.
enum Place {
    dimensions = 1,
    mode,
    original_context = 4,
    base,
    scale,
    mix,
    attention,
    fast,
    slow,
    offset = 15
};

std::int32_t whole(const ggml_tensor& node, Place at) { return node.op_params[at]; }

float real(const ggml_tensor& node, Place at) {
    float value = 0;
    std::memcpy(&value, node.op_params + at, sizeof value);
    return value;
}

[[noreturn]] void unsupported(const ggml_tensor& node, const std::string& what) {
    throw Error(ErrorCode::unsupported, "the rotary embedding ", ggml_get_name(&node), " is ", what,
                "; lowkv knows normal and NeoX pairs: use a scheme without pre");
}

Rope::Pairs pairs_of(const ggml_tensor& node) {
    switch (whole(node, mode)) {
        case GGML_ROPE_TYPE_NORMAL: return Rope::Pairs::neighbours;
        case GGML_ROPE_TYPE_NEOX: return Rope::Pairs::halves;
        case GGML_ROPE_TYPE_MROPE: unsupported(node, "M-RoPE (several positions per token)");
        case GGML_ROPE_TYPE_IMROPE:
            unsupported(node, "interleaved M-RoPE (several positions per token)");
        case GGML_ROPE_TYPE_VISION: unsupported(node, "vision RoPE (positions in two dimensions)");
        default: unsupported(node, concat("of ggml's mode ", whole(node, mode)));
    }
}

std::vector<float> frequency_factors(const ggml_tensor& node, std::size_t pairs) {
    std::vector<float> factors(pairs, 1.0f);
    const ggml_tensor* source = node.src[2];
    if (source == nullptr) return factors;
    if (source->data == nullptr)
        throw Error(ErrorCode::invalid_argument, "the frequency factors of ", ggml_get_name(&node),
                    " have no data yet");
    const std::size_t bytes = pairs * sizeof(float);
    if (source->buffer != nullptr)
        ggml_backend_tensor_get(source, factors.data(), 0, bytes);
    else
        std::memcpy(factors.data(), source->data, bytes);
    return factors;
}

// The pair that turns `turns` times over the original context (YaRN).
double pair_of_turns(const ggml_tensor& node, double turns) {
    const double wavelength = whole(node, original_context) / (turns * 2 * std::numbers::pi);
    return whole(node, dimensions) * std::log(wavelength) /
           (2 * std::log(static_cast<double>(real(node, base))));
}

}  // namespace

Rope rope_of(const ggml_tensor& node) {
    if (operation(node) != op_name::rope)
        throw Error(ErrorCode::invalid_argument, ggml_get_name(&node), " is no ROPE node but ",
                    ggml_op_desc(&node));
    Rope rope{.pairs = pairs_of(node), .frequencies = {}, .magnitude = real(node, attention)};
    if (whole(node, offset) != 0)
        unsupported(node, concat("partial from channel ", whole(node, offset), " on"));

    const int turned = whole(node, dimensions);
    const auto pairs = static_cast<std::size_t>(turned / 2);
    const std::vector<float> factors = frequency_factors(node, pairs);
    const double linear = real(node, scale), extrapolated = real(node, mix);
    double low = 0, high = 0;
    if (extrapolated != 0) {
        low = std::max(0.0, std::floor(pair_of_turns(node, real(node, fast))));
        high = std::min(turned - 1.0, std::ceil(pair_of_turns(node, real(node, slow))));
        rope.magnitude *= 1.0f + 0.1f * static_cast<float>(std::log(1 / linear));
    }
    for (std::size_t i = 0; i < pairs; ++i) {
        const double plain = std::pow(static_cast<double>(real(node, base)),
                                      -2.0 * static_cast<double>(i) / turned) /
                             static_cast<double>(factors[i]);
        const double ramp = (static_cast<double>(i) - low) / std::max(0.001, high - low);
        const double kept = (1 - std::clamp(ramp, 0.0, 1.0)) * extrapolated;
        rope.frequencies.push_back(static_cast<float>(plain * (linear * (1 - kept) + kept)));
    }
    return rope;
}

const ggml_tensor* behind_views(const ggml_tensor* tensor) {
    while (tensor != nullptr &&
           is_any(*tensor, {op_name::reshape, op_name::view, op_name::permute, op_name::transpose,
                            op_name::cont, op_name::cpy, op_name::dup}))
        tensor = tensor->src[0];
    return tensor;
}

const ggml_tensor* rope_above(const ggml_tensor* tensor) {
    const ggml_tensor* source = behind_views(tensor);
    return source != nullptr && operation(*source) == op_name::rope ? source : nullptr;
}

bool rotated_before(const ggml_tensor* tensor, int depth) {
    if (tensor == nullptr || is_any(*tensor, {op_name::mul_mat, op_name::mul_mat_id})) return false;
    if (operation(*tensor) == op_name::rope || depth == 0)
        return true;  // too far to tell: taken for one
    return std::any_of(std::begin(tensor->src), std::end(tensor->src),
                       [=](const ggml_tensor* s) { return rotated_before(s, depth - 1); });
}

std::optional<Rope> shift_of(const ggml_tensor& node, const Shape& shape) {
    constexpr float rounding = 1e-5f;  // of YaRN's magnitude and what llama.cpp divides it by
    const std::size_t first = shape.value_dim * sizeof(ggml_fp16_t);
    if (node.view_offs % node.nb[2] != first) return std::nullopt;
    try {
        Rope rope = rope_of(node);
        if (std::abs(rope.magnitude - 1.0f) > rounding) return std::nullopt;
        return rope;
    } catch (const Error& error) {
        if (error.code() != ErrorCode::unsupported) throw;
        return std::nullopt;
    }
}

}  // namespace lowkv::ggml
