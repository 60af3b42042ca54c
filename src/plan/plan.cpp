#include <algorithm>
#include <atomic>
#include <span>
#include <vector>

#include "isa/table.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "lowkv/quantizer.h"
#include "lowkv/rotation.h"
#include "quantizers/codes_part.h"
#include "xxh64.h"

namespace lowkv {
namespace {

constexpr std::uint32_t least_block_tokens = 32;

std::uint64_t next_number() noexcept {
    static std::atomic<std::uint64_t> last = 0;
    return ++last;
}

// docs/images.md has the order.
struct Bytes {
    std::vector<std::byte> all;

    template <class T>
    void add(const std::vector<T>& array) {
        const std::uint64_t count = array.size();
        append(std::as_bytes(std::span(&count, 1)));
        append(std::as_bytes(std::span(array)));
    }
    void append(std::span<const std::byte> bytes) {
        all.insert(all.end(), bytes.begin(), bytes.end());
    }
};

// What packed bytes depend on beside scheme, shape and layer, as one number; 0: nothing else.
std::uint64_t hash_of(const LayerScheme& scheme, const LayerInputs& inputs) {
    Bytes bytes;
    const auto add_part = [&](const Codec& codec, PartCalibration LayerCalibration::* part) {
        if (!codec.needs_calibration() || inputs.calibration == nullptr) return;
        const PartCalibration& its = inputs.calibration->*part;
        bytes.add(its.group);
        for (const auto* array : {&its.clip, &its.low, &its.high, &its.levels, &its.boundaries})
            bytes.add(*array);
    };
    add_part(scheme.key, &LayerCalibration::key);
    add_part(scheme.value, &LayerCalibration::value);
    if (scheme.key.stage == Stage::pre && inputs.rope != nullptr) {
        bytes.add(inputs.rope->frequencies);
        bytes.add(std::vector{inputs.rope->magnitude});
        bytes.add(std::vector{inputs.rope->pairs});
    }
    return bytes.all.empty() ? 0 : xxh64(bytes.all);
}

void check_shape(const Shape& shape) {
    constexpr std::uint32_t max_kv_heads = 4096;
    if (shape.head_dim < 16 || shape.head_dim > codec::max_lanes || shape.head_dim % 16 != 0) {
        throw Error(ErrorCode::invalid_argument, "head_dim ", shape.head_dim,
                    " is not supported; legal: a multiple of 16 from 16 to 576");
    }
    if (shape.kv_heads < 1 || shape.kv_heads > max_kv_heads) {
        throw Error(ErrorCode::invalid_argument, "kv_heads ", shape.kv_heads,
                    " is not supported; legal: 1 to ", max_kv_heads);
    }
}

void check_latent(const Shape& shape, const PackedPart& keys, const Codec& codec) {
    if (shape.kv_heads != 1 || shape.value_dim > shape.head_dim || shape.value_dim % 16 != 0)
        throw Error(ErrorCode::invalid_argument, "values in ", shape.value_dim, " of ",
                    shape.head_dim, " channels of ", shape.kv_heads,
                    " kv heads' keys are not supported; legal: of one head, a multiple of 16");
    if (keys.rotation() != nullptr || keys.has_positions())
        throw Error(ErrorCode::unsupported, to_string(codec),
                    " turns keys, and in multi-head latent attention they are the values, too; "
                    "use exact, sorted keys, as of lowkv3, or channel keys, as of int8");
}

// The part of values that lie in their keys.
class NoPart final : public PackedPart {
  public:
    explicit NoPart(const PartShape& its_shape) : PackedPart(its_shape) {}
    void encode_head(const std::uint16_t*, std::uint32_t, std::byte*,
                     const EncodeHints&) const noexcept override {}
    void decode_head(const std::byte*, std::uint32_t, std::uint16_t*) const noexcept override {}
};

double bits_per_element(const PackedPart& part) {
    const PartShape& shape = part.shape();
    return 8.0 * static_cast<double>(part.bytes()) /
           (static_cast<double>(shape.layer.channels()) * shape.tokens);
}

}  // namespace

std::size_t element_bytes(RowType type) {
    switch (type) {
        case RowType::f32: return 4;
        case RowType::f16:
        case RowType::bf16: return 2;
    }
    throw Error(ErrorCode::invalid_argument, "rows of type ", static_cast<unsigned>(type),
                "; legal: 1 (f32), 2 (f16), 3 (bf16)");
}

std::uint32_t block_tokens(const LayerScheme& scheme) noexcept {
    return std::max({least_block_tokens, quantizer_of(scheme.key).block_tokens(scheme.key),
                     quantizer_of(scheme.value).block_tokens(scheme.value)});
}

Plan::Plan(const LayerScheme& scheme, const Shape& shape, std::string_view implementation,
           std::uint32_t layer, const LayerInputs& inputs)
    : scheme_(shape.latent() ? latent_scheme(scheme) : scheme),
      shape_(shape),
      layer_(layer),
      number_(next_number()),
      inputs_hash_(hash_of(scheme_, inputs)),
      rows_(inputs.rows),
      element_bytes_(lowkv::element_bytes(inputs.rows)) {
    validate(Scheme{.base = scheme, .retention = {}, .overrides = {}});
    check_shape(shape);
    block_tokens_ = lowkv::block_tokens(scheme_);
    kernels_ = &kernels::select(implementation);
    codec::Rotations rotations(shape.head_dim, layer);
    const LayerCalibration* calibration = inputs.calibration;
    keys_ = quantizer_of(scheme_.key)
                .compile(scheme_.key, {shape, Part::keys, block_tokens_},
                         {.calibration = calibration ? &calibration->key : nullptr,
                          .rope = inputs.rope,
                          .table = kernels_,
                          .rotations = &rotations});
    const PartShape of_values{shape, Part::values, block_tokens_};
    if (shape.latent()) {
        check_latent(shape, *keys_, scheme_.key);
        values_ = std::make_shared<NoPart>(of_values);
    } else {
        values_ = quantizer_of(scheme.value)
                      .compile(scheme.value, of_values,
                               {.calibration = calibration ? &calibration->value : nullptr,
                                .rope = nullptr,
                                .table = kernels_,
                                .rotations = &rotations});
    }
}

double Plan::key_bits() const noexcept { return lowkv::bits_per_element(*keys_); }

double Plan::value_bits() const noexcept { return lowkv::bits_per_element(*values_); }

std::string_view Plan::implementation() const noexcept { return kernels_->name; }

LayerCalibration neutral_calibration(const LayerScheme& scheme, const Shape& shape) {
    const auto of = [&](const Codec& codec) {
        return quantizer_of(codec).neutral_calibration(codec, shape);
    };
    return {.key = of(scheme.key), .value = of(scheme.value)};
}

Plan neutral_plan(const LayerScheme& scheme, const Shape& shape, const Rope* rope) {
    const LayerCalibration calibration = neutral_calibration(scheme, shape);
    return {scheme, shape, {}, 0, {.calibration = &calibration, .rope = rope}};
}

}  // namespace lowkv
