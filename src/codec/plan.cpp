#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include "codec/head.h"
#include "codec/inputs_hash.h"
#include "codec/lloyd_max.h"
#include "codec/metadata.h"
#include "codec/outliers.h"
#include "codec/rotation.h"
#include "codec/row_tables.h"
#include "kernels/table.h"
#include "kernels/units.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

constexpr std::uint32_t least_block_tokens = 32;
constexpr std::uint32_t tokens_of_statistics = 128;  // no group is longer
constexpr std::size_t cache_line = 64;
constexpr std::uint32_t most_channels_by_row = 256;  // an outlier's channel is one byte
constexpr std::size_t fp8_header_bytes = 16;  // two f32, padded so that metadata stays aligned

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

void check_shape(const Shape& shape) {
    constexpr std::uint32_t max_kv_heads = 4096;
    if (shape.head_dim < 16 || shape.head_dim > codec::max_lanes || shape.head_dim % 16 != 0) {
        throw Error(ErrorCode::invalid_argument, "head_dim " + std::to_string(shape.head_dim) +
                                                     " is not supported; legal: a multiple of 16 "
                                                     "from 16 to 576");
    }
    if (shape.kv_heads < 1 || shape.kv_heads > max_kv_heads) {
        throw Error(ErrorCode::invalid_argument, "kv_heads " + std::to_string(shape.kv_heads) +
                                                     " is not supported; legal: 1 to " +
                                                     std::to_string(max_kv_heads));
    }
}

// Levels on a grid of 8 bits, from the lowest to the highest. Ternary levels are even: the code is
// the level.
void set_levels(PartLayout& layout, std::span<const float> levels) {
    const float steps = layout.codec.bits == Codec::ternary_bits ? 2.0f : 255.0f;
    layout.level_zero = levels.front();
    layout.level_step = (levels.back() - levels.front()) / steps;
    for (std::size_t i = 0; i < levels.size(); ++i) {
        layout.levels[i] = static_cast<std::uint8_t>(
            std::lround((levels[i] - layout.level_zero) / layout.level_step));
    }
}

std::shared_ptr<const codec::Rotation> make_rotation(Rotate kind, std::uint32_t head_dim,
                                                     std::uint32_t layer) {
    using codec::Rotation;
    switch (kind) {
        case Rotate::none: break;
        case Rotate::hadamard:
            return std::make_shared<const Rotation>(Rotation::hadamard(head_dim));
        case Rotate::random:
            return std::make_shared<const Rotation>(
                Rotation::random(head_dim, 42 + std::uint64_t{1000} * layer));
    }
    return nullptr;
}

void lay_out_rows(PartLayout& layout, const Shape& shape, std::uint32_t tokens, bool keys) {
    const Codec& codec = layout.codec;
    const codec::RowTables& row = *layout.row;
    layout.group = shape.head_dim;
    if (row.groups > 0) {
        const bool by_group = keys || row.groups == 1;
        layout.group_rows = by_group ? row.groups : tokens;
        layout.row_entries = by_group ? tokens : row.groups;
        layout.metadata_offset = codec.metadata == Metadata::fp16 ? 0 : fp8_header_bytes;
    }
    const std::size_t metadata = std::size_t{2} * layout.group_rows * layout.row_entries *
                                 codec::metadata_bytes(codec.metadata);
    layout.outliers_offset = round_up(layout.metadata_offset + metadata, sizeof(std::int32_t));
    const std::size_t most = std::size_t{row.outliers} * tokens;
    const std::size_t begins = most > 0 ? sizeof(std::uint16_t) * (shape.kv_heads + 1) : 0;
    layout.places_offset = layout.outliers_offset + round_up(begins, sizeof(std::int32_t));
    layout.residuals_offset = layout.places_offset + sizeof(codec::OutlierPlace) * most;
    layout.positions_offset = layout.residuals_offset + sizeof(std::uint16_t) * most;
    const std::size_t positions = codec.stage == Stage::pre ? std::size_t{4} * tokens : 0;
    layout.row_bytes = round_up(layout.positions_offset + positions, cache_line);
    layout.head_bytes =
        round_up(kernels::codes_bytes(codec.bits, shape.head_dim, tokens), cache_line);
    layout.bytes = layout.row_bytes + layout.head_bytes * shape.kv_heads;
}

struct PartInputs {
    const PartCalibration* calibration;
    const Rope* rope;
    bool keys;
};

PartLayout part_layout(const Codec& codec, const Shape& shape, std::uint32_t tokens,
                       const PartInputs& inputs) {
    PartLayout layout;
    layout.codec = codec;
    if (codec.exact()) {
        layout.bytes = std::size_t{2} * shape.channels() * tokens;
        return layout;
    }
    if (codec.by_row()) {
        if (shape.head_dim > most_channels_by_row) {
            throw Error(ErrorCode::unsupported,
                        "head_dim " + std::to_string(shape.head_dim) +
                            " is not supported by codecs whose groups span the heads (row, static, "
                            "reorder); legal: up to " +
                            std::to_string(most_channels_by_row));
        }
        const auto row = codec::make_row_tables(codec, shape, inputs.calibration, inputs.rope,
                                                inputs.keys ? "key codec" : "value codec");
        const bool learned = codec.levels == Levels::learned;
        if (learned) set_levels(layout, inputs.calibration->levels);
        for (std::uint32_t i = 0; i < row->level.size(); ++i) {
            const std::uint32_t code = i % codec.level_count();
            row->level[i] = learned ? static_cast<float>(layout.levels[code]) * layout.level_step +
                                          layout.level_zero
                                    : static_cast<float>(code);
        }
        layout.row = row;
        lay_out_rows(layout, shape, tokens, inputs.keys);
        return layout;
    }
    const bool by_channel = codec.axis == Axis::channel;
    const std::uint32_t grouped = by_channel ? tokens : shape.head_dim;
    layout.group = codec.group == Codec::whole_head ? shape.head_dim
                                                    : std::min<std::uint32_t>(codec.group, grouped);
    layout.group_rows = (grouped + layout.group - 1) / layout.group;
    layout.row_entries = by_channel ? shape.head_dim : tokens;
    layout.metadata_offset = codec.metadata == Metadata::fp16 ? 0 : fp8_header_bytes;
    const std::size_t entries = std::size_t{layout.group_rows} * layout.row_entries;
    const std::size_t metadata =
        (layout.has_zeros() ? 2 : 1) * entries * codec::metadata_bytes(codec.metadata);
    layout.mean_offset = layout.metadata_offset + metadata;
    const std::size_t mean = codec.centre == Centre::block ? std::size_t{2} * shape.head_dim : 0;
    layout.factors_offset = layout.mean_offset + mean;
    const std::size_t factors = codec.balanced ? std::size_t{2} * grouped : 0;
    layout.codes_offset = round_up(layout.factors_offset + factors, cache_line);
    if (codec.levels == Levels::normal) {
        const codec::NormalCodebook& book = codec::normal_codebook(codec.level_count());
        set_levels(layout, std::span(book.level).first(book.count));
    }
    layout.head_bytes = round_up(
        layout.codes_offset + kernels::codes_bytes(codec.bits, shape.head_dim, tokens), cache_line);
    layout.bytes = layout.head_bytes * shape.kv_heads;
    return layout;
}

double bits_per_element(const PartLayout& layout, const Shape& shape, std::uint32_t tokens) {
    return 8.0 * static_cast<double>(layout.bytes) /
           (static_cast<double>(shape.channels()) * tokens);
}

}  // namespace

std::uint32_t block_tokens(const LayerScheme& scheme) noexcept {
    std::uint32_t tokens = least_block_tokens;
    for (const Codec& codec : {scheme.key, scheme.value}) {
        if (!codec.exact() && codec.axis == Axis::channel) {
            tokens = std::max<std::uint32_t>(tokens, codec.group);
        }
        if (codec.centre == Centre::block || codec.balanced) tokens = tokens_of_statistics;
    }
    return tokens;
}

Plan::Plan(const LayerScheme& scheme, const Shape& shape, std::string_view implementation,
           std::uint32_t layer, const LayerInputs& inputs)
    : scheme_(scheme),
      shape_(shape),
      layer_(layer),
      inputs_hash_(codec::inputs_hash(scheme, inputs)) {
    validate(Scheme{.base = scheme, .retention = {}, .overrides = {}});
    check_shape(shape);
    block_tokens_ = lowkv::block_tokens(scheme);
    const LayerCalibration* calibration = inputs.calibration;
    keys_ = part_layout(scheme.key, shape, block_tokens_,
                        {calibration ? &calibration->key : nullptr, inputs.rope, true});
    values_ = part_layout(scheme.value, shape, block_tokens_,
                          {calibration ? &calibration->value : nullptr, nullptr, false});
    keys_.rotation = make_rotation(scheme.key.rotation, shape.head_dim, layer);
    values_.rotation = scheme.value.rotation == scheme.key.rotation
                           ? keys_.rotation
                           : make_rotation(scheme.value.rotation, shape.head_dim, layer);
    kernels_ = &kernels::select(implementation);
}

double Plan::key_bits() const noexcept {
    return lowkv::bits_per_element(keys_, shape_, block_tokens_);
}

double Plan::value_bits() const noexcept {
    return lowkv::bits_per_element(values_, shape_, block_tokens_);
}

std::string_view Plan::implementation() const noexcept { return kernels_->name; }

}  // namespace lowkv
