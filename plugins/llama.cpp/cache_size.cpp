#include "cache_size.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "cache_name.h"
#include "ggml.h"
#include "host.h"
#include "lowkv/calibration.h"
#include "lowkv/error.h"

namespace lowkv::ggml {
namespace {

bool packable(const ggml_tensor& tensor, const Setting& setting) {
    return !setting.delegate && tensor.type == GGML_TYPE_F16 && tensor.view_src == nullptr;
}

// The keys that were asked for last.
struct LastKeys {
    std::string tag;
    int layer = -1;
    std::int64_t channels = 0;
    std::size_t missing = 0;  // bytes that were not announced for them
};

}  // namespace

// The heads are not known when llama.cpp asks for the size, and the padding of a packed block
// depends on them a little: take the worst of the head sizes that fit.
std::size_t packed_bytes(const ggml_tensor& tensor, const Setting& setting) {
    const std::size_t nominal = ggml_nbytes(&tensor);
    const auto name = parse_cache_name(tensor.name);
    if (!name || !packable(tensor, setting) || host_asserts()) return nominal;
    const auto layer = static_cast<std::uint32_t>(name->layer);
    const LayerScheme& scheme = setting.scheme.layer(layer);
    if (scheme.exact()) return nominal;

    const auto channels = static_cast<std::uint32_t>(tensor.ne[0]);
    const std::size_t tokens = block_tokens(scheme);
    std::size_t packed = 0, exact = 0;
    for (const std::uint32_t head_dim : {64u, 80u, 96u, 128u, 256u, 320u, 512u, 576u}) {
        if (channels % head_dim != 0) continue;
        try {
            // A calibration changes no size.
            const Plan plan =
                neutral_plan(scheme, {.kv_heads = channels / head_dim, .head_dim = head_dim},
                             nullptr, setting.scheme.byte_rows(layer));
            exact = std::max(exact, plan.exact_part_bytes());
            packed = std::max(
                packed, name->part == Part::keys ? plan.keys().bytes() : plan.values().bytes());
        } catch (const Error&) {
            continue;  // the layer will say so when it decides
        }
    }
    if (packed == 0) return nominal;
    const std::size_t blocks = (static_cast<std::size_t>(tensor.ne[1]) + tokens - 1) / tokens;
    const Retention& keep = setting.scheme.retention;
    const std::size_t exact_tokens = std::size_t{keep.window} + keep.sinks + keep.flush;
    const std::size_t exact_blocks = std::min(blocks, (exact_tokens + tokens - 1) / tokens + 1);
    const std::size_t per_stream = blocks * packed + exact_blocks * exact;
    return std::min(nominal, per_stream * static_cast<std::size_t>(tensor.ne[2]));
}

std::size_t alloc_bytes(const ggml_tensor& tensor, const Setting& setting) {
    const std::size_t nominal = ggml_nbytes(&tensor);
    const std::size_t packed = packed_bytes(tensor, setting);
    const auto name = parse_cache_name(tensor.name);
    if (!name || tensor.view_src != nullptr) return packed;

    static thread_local LastKeys last;
    const std::size_t missing = last.missing;
    if (name->part == Part::values) {
        const bool apart =
            name->tag == last.tag && name->layer == last.layer && tensor.ne[0] != last.channels;
        last = {};
        return apart ? nominal + missing : packed;
    }
    // Keys after the keys of a lower layer: that one has no values, so this one has none either.
    const bool alone = name->tag == last.tag && last.layer >= 0 && name->layer > last.layer;
    last = {.tag = name->tag,
            .layer = name->layer,
            .channels = tensor.ne[0],
            .missing = alone ? 0 : nominal - packed};
    return alone ? nominal + missing : packed;
}

}  // namespace lowkv::ggml
