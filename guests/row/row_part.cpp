#include "row/row_part.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/small_floats.h"
#include "codec/uniform.h"
#include "codec/units.h"
#include "lowkv/error.h"
#include "quantizers/metadata.h"
#include "quantizers/packing.h"
#include "row/outliers.h"

namespace lowkv::codec {
namespace {

constexpr std::uint32_t max_tokens = max_block_tokens;
constexpr std::uint32_t most_channels_by_row = 256;  // an outlier's channel is one byte

// A part of a block as tokens of channels, whichever way it lies.
class Rows {
  public:
    explicit Rows(const RowPart& layout)
        : layout_(layout),
          head_dim_(layout.head_dim),
          heads_(layout.shape().layer.kv_heads),
          tokens_(layout.tokens),
          token_stride_(layout.shape().part == Part::keys ? 1 : channels()),
          channel_stride_(layout.shape().part == Part::keys ? tokens_ : 1) {}

    std::uint32_t head_dim() const noexcept { return head_dim_; }
    std::uint32_t heads() const noexcept { return heads_; }
    std::uint32_t tokens() const noexcept { return tokens_; }
    std::uint32_t channels() const noexcept { return heads_ * head_dim_; }
    const RopeTable* rope() const noexcept { return layout_.row->rope.get(); }

    // A head's row as it is quantized. Infinities end at +-65504; a NaN is stored as 0.
    void load(const std::uint16_t* rows, std::uint32_t token, std::uint32_t head,
              std::int32_t position, float* x) const noexcept {
        const std::uint16_t* from = rows + place(token, head);
        for (std::uint32_t c = 0; c < head_dim_; ++c) {
            const float value = f16_to_f32(from[c * channel_stride_]);
            x[c] = value == value ? std::clamp(value, -f16_max, f16_max) : 0.0f;
        }
        if (rope() != nullptr) rope()->undo(position, x);
    }
    void store(float* x, std::uint32_t token, std::uint32_t head, std::int32_t position,
               std::uint16_t* rows) const noexcept {
        if (rope() != nullptr) rope()->apply(position, x);
        std::uint16_t* to = rows + place(token, head);
        for (std::uint32_t c = 0; c < head_dim_; ++c) to[c * channel_stride_] = f32_to_f16(x[c]);
    }

  private:
    const RowPart& layout_;
    std::uint32_t head_dim_, heads_, tokens_;
    std::size_t token_stride_, channel_stride_;

    std::size_t place(std::uint32_t token, std::uint32_t head) const noexcept {
        return token * token_stride_ + std::size_t{head} * head_dim_ * channel_stride_;
    }
};

// A token's outliers as channels of the row, ascending; no_channel where there is none.
constexpr std::uint16_t no_channel = 0xffff;
using Chosen = std::uint16_t[max_outliers];

// Sorts the tokens' outliers by head; encode_head() adds what is missing there.
void write_places(const RowPart& layout, std::uint32_t heads, std::uint32_t head_dim,
                  std::uint32_t tokens, const Chosen* chosen, std::byte* part) noexcept {
    auto* begins = reinterpret_cast<std::uint16_t*>(part + layout.outliers_offset);
    auto* places = reinterpret_cast<OutlierPlace*>(part + layout.places_offset);
    std::uint32_t next[max_tokens] = {};
    std::uint16_t count = 0;
    for (std::uint32_t head = 0; head < heads; ++head) {
        begins[head] = count;
        for (std::uint32_t t = 0; t < tokens; ++t) {
            for (; next[t] < layout.row->outliers; ++next[t]) {
                const std::uint32_t c = chosen[t][next[t]] - head * head_dim;
                if (c >= head_dim) break;
                places[count++] = {static_cast<std::uint8_t>(c), static_cast<std::uint8_t>(t)};
            }
        }
    }
    begins[heads] = count;
}

HeadOutliers outliers_of(const RowPart& layout, const std::byte* part,
                         std::uint32_t head) noexcept {
    return layout.row->outliers > 0 ? head_outliers(layout, part, head) : HeadOutliers{};
}

std::int32_t read_position(const RowPart& layout, const std::byte* part,
                           std::uint32_t token) noexcept {
    std::int32_t position = 0;
    if (layout.has_positions()) {
        std::memcpy(&position, part + layout.positions_offset() + 4 * std::size_t{token},
                    sizeof position);
    }
    return position;
}

// Static ranges: the channels that leave theirs the furthest. Otherwise the row's largest and
// smallest, as many of both (docs/methods/row.md, "Outliers").
void choose_outliers(const RowTables& tables, const float* x, std::uint32_t channels,
                     std::uint16_t* chosen) noexcept {
    std::uint16_t order[max_row_channels];
    std::uint32_t count = 0;
    const std::uint32_t most = tables.outliers;
    std::fill_n(chosen, most, no_channel);
    if (!tables.low.empty()) {
        const auto excess = [&](std::uint16_t c) {
            return std::max(tables.low[c] - x[c], x[c] - tables.high[c]);
        };
        for (std::uint32_t c = 0; c < channels; ++c) {
            if (x[c] < tables.low[c] || x[c] > tables.high[c]) {
                order[count++] = static_cast<std::uint16_t>(c);
            }
        }
        const std::uint32_t kept = std::min(count, most);
        std::partial_sort(order, order + kept, order + count,
                          [&](std::uint16_t a, std::uint16_t b) { return excess(a) > excess(b); });
        std::copy_n(order, kept, chosen);
    } else {
        for (; count < channels; ++count) order[count] = static_cast<std::uint16_t>(count);
        const std::uint32_t large = (most + 1) / 2, small = most - large;
        std::partial_sort(order, order + large, order + channels,
                          [&](std::uint16_t a, std::uint16_t b) { return x[a] > x[b]; });
        std::partial_sort(order + large, order + large + small, order + channels,
                          [&](std::uint16_t a, std::uint16_t b) { return x[a] < x[b]; });
        std::copy_n(order, most, chosen);
    }
    std::sort(chosen, chosen + most);
}

std::uint8_t code_of(const RowPart& layout, float x, float scale, float zero) noexcept {
    if (layout.codec.levels == Levels::uniform) {
        const auto top = static_cast<float>(layout.codec.level_count() - 1);
        return lowkv_uniform_code(x, zero, lowkv_divisor(scale), top);
    }
    const float y = scale > 0.0f ? (x - zero) / scale : 0.0f;
    std::uint8_t code = 0;
    for (const float b : layout.row->boundaries) code = static_cast<std::uint8_t>(code + (y >= b));
    return code;
}

float value_of(const RowPart& layout, std::uint8_t code, float scale, float zero) noexcept {
    const bool learned = layout.codec.levels == Levels::learned;
    return (learned ? layout.row->level[code] : static_cast<float>(code)) * scale + zero;
}

// The range of each of a row's groups, outliers apart.
struct Ranges {
    float low[max_row_groups], high[max_row_groups];
};

void find_ranges(const RowTables& tables, const float* x, std::uint32_t channels,
                 const std::uint16_t* outliers, Ranges& ranges) noexcept {
    std::fill_n(ranges.low, tables.groups, f16_max);
    std::fill_n(ranges.high, tables.groups, -f16_max);
    std::uint32_t next = 0;
    for (std::uint32_t c = 0; c < channels; ++c) {
        if (next < tables.outliers && outliers[next] == c) {
            ++next;
            continue;
        }
        const std::int32_t g = tables.group[c];
        ranges.low[g] = std::min(ranges.low[g], x[c]);
        ranges.high[g] = std::max(ranges.high[g], x[c]);
    }
}

// The share of each group's range with the least squared error (docs/methods/groups.md).
void search_shares(const RowTables& tables, const float* x, std::uint32_t channels,
                   const Ranges& ranges, float top, float* share) noexcept {
    float best[max_row_groups], error[max_row_groups];
    Grid grids[max_row_groups];
    std::fill_n(best, tables.groups, INFINITY);
    for (float candidate = 1.0f; candidate > 0.35f; candidate -= 0.05f) {
        for (std::uint32_t g = 0; g < tables.groups; ++g) {
            grids[g] = clipped_grid(ranges.low[g], ranges.high[g], candidate, top);
            error[g] = 0;
        }
        for (std::uint32_t c = 0; c < channels; ++c) {
            const std::int32_t g = tables.group[c];
            if (!(grids[g].scale > 0.0f)) continue;
            const float y = (x[c] - grids[g].zero) / grids[g].scale;
            const float e = (y - std::clamp(std::nearbyint(y), 0.0f, top)) * grids[g].scale;
            error[g] += e * e;
        }
        for (std::uint32_t g = 0; g < tables.groups; ++g) {
            if (!(error[g] < best[g])) continue;
            best[g] = error[g];
            share[g] = candidate;
        }
    }
}

void set_grids(const RowPart& layout, const float* x, std::uint32_t channels, const Ranges& ranges,
               Grid* grids) noexcept {
    const RowTables& tables = *layout.row;
    const auto top = static_cast<float>(layout.codec.level_count() - 1);
    float share[max_row_groups];
    std::fill_n(share, tables.groups, 1.0f);
    if (layout.codec.clip == Clip::calibrated)
        std::copy_n(tables.clip.data(), tables.groups, share);
    if (layout.codec.clip == Clip::search) search_shares(tables, x, channels, ranges, top, share);
    for (std::uint32_t g = 0; g < tables.groups; ++g) {
        grids[g] = clipped_grid(ranges.low[g], ranges.high[g], share[g], top);
        if (layout.codec.levels != Levels::learned) continue;
        // Learned levels are of [-1, 1].
        const float half = 0.5f * grids[g].scale * top;
        grids[g] = {half, grids[g].zero + half};
    }
}

// A token's scale and zero of a channel, as stored.
struct RowMetadata {
    const Groups& groups;
    const RowTables& tables;
    Part part;
    std::uint32_t tokens;

    std::size_t entry(std::uint32_t token, std::int32_t group) const noexcept {
        const auto g = static_cast<std::size_t>(group);
        return part == Part::keys || tables.groups == 1 ? g * tokens + token
                                                        : std::size_t{token} * tables.groups + g;
    }
    Grid of(std::uint32_t token, std::uint32_t channel) const noexcept {
        if (tables.groups == 0) return {tables.scale[channel], tables.zero[channel]};
        const std::size_t e = entry(token, tables.group[channel]);
        return {groups.scale[e], groups.zero[e]};
    }
};

}  // namespace

RowPart::RowPart(const Codec& its_codec, const PartShape& its_shape, const PartInputs& inputs,
                 const PartKernels& its_kernels)
    : CodesPart(its_codec, its_shape) {
    if (head_dim > most_channels_by_row) {
        throw Error(ErrorCode::unsupported, "head_dim ", head_dim,
                    " is not supported by codecs whose groups span the heads (row, static, "
                    "reorder); legal: up to ",
                    most_channels_by_row);
    }
    const auto tables = make_row_tables(codec, shape().layer, inputs.calibration, inputs.rope,
                                        keys != 0 ? "key codec" : "value codec");
    const bool learned = codec.levels == Levels::learned;
    if (learned) set_levels(inputs.calibration->levels);
    for (std::uint32_t i = 0; i < tables->level.size(); ++i) {
        const std::uint32_t code = i % codec.level_count();
        tables->level[i] = learned ? static_cast<float>(level[code]) * level_step + level_zero
                                   : static_cast<float>(code);
    }
    row = tables;
    group = head_dim;
    if (row->groups > 0) {
        const bool by_group = keys != 0 || row->groups == 1;
        group_rows = by_group ? row->groups : tokens;
        row_entries = by_group ? tokens : row->groups;
    }
    const std::size_t stored =
        std::size_t{2} * group_rows * row_entries * metadata_bytes(codec.metadata);
    outliers_offset = round_up(metadata_at + stored, sizeof(std::int32_t));
    const std::size_t most = std::size_t{row->outliers} * tokens;
    const std::size_t begins = most > 0 ? sizeof(std::uint16_t) * (shape().layer.kv_heads + 1) : 0;
    places_offset = outliers_offset + round_up(begins, sizeof(std::int32_t));
    residuals_offset = places_offset + sizeof(OutlierPlace) * most;
    std::size_t shared = residuals_offset + sizeof(std::uint16_t) * most;
    if (codec.stage == Stage::pre) {
        set_positions(shared);
        shared += sizeof(std::int32_t) * tokens;
    }
    set_bytes(kernels::codes_bytes(codec.width, head.lanes, head.steps), shared);
    set_kernels(its_kernels);
    if (keys == 0 && row->groups == 1) dense = &code_kernels(*inputs.table);
}

void RowPart::encode_shared(const std::uint16_t* exact, const std::int32_t* positions,
                            std::byte* packed) const noexcept {
    const RowTables& tables = *row;
    const Rows view(*this);
    std::memset(packed, 0, shared_bytes());
    if (has_positions()) {
        std::memcpy(packed + positions_offset(), positions, 4 * std::size_t{view.tokens()});
    }
    Groups groups;
    const RowMetadata stored{groups, tables, shape().part, view.tokens()};
    Chosen outliers[max_tokens];
    float x[max_row_channels];
    for (std::uint32_t t = 0; t < view.tokens(); ++t) {
        const std::int32_t position = read_position(*this, packed, t);
        for (std::uint32_t h = 0; h < view.heads(); ++h) {
            view.load(exact, t, h, position, x + std::size_t{h} * view.head_dim());
        }
        if (tables.outliers > 0) choose_outliers(tables, x, view.channels(), outliers[t]);
        if (tables.groups == 0) continue;
        Ranges ranges;
        Grid grids[max_row_groups];
        find_ranges(tables, x, view.channels(), outliers[t], ranges);
        set_grids(*this, x, view.channels(), ranges, grids);
        for (std::uint32_t g = 0; g < tables.groups; ++g) {
            const std::size_t e = stored.entry(t, static_cast<std::int32_t>(g));
            groups.scale[e] = grids[g].scale;
            groups.zero[e] = grids[g].zero;
        }
    }
    if (tables.groups > 0) write_metadata(*this, packed, groups);
    if (tables.outliers > 0) {
        write_places(*this, view.heads(), view.head_dim(), view.tokens(), outliers, packed);
    }
}

void RowPart::encode_head(const std::uint16_t* exact, std::uint32_t h, std::byte* packed,
                          const EncodeHints&) const noexcept {
    const RowTables& tables = *row;
    const Rows view(*this);
    std::byte* section = packed + section_offset(h);
    std::memset(section, 0, head_bytes());
    Groups groups;
    if (tables.groups > 0) read_metadata(*this, packed, groups);
    const RowMetadata stored{groups, tables, shape().part, view.tokens()};
    const std::uint32_t first = h * view.head_dim();
    const HeadOutliers outliers = outliers_of(*this, packed, h);
    std::uint32_t next = 0;
    TokenCodes codes;
    for (std::uint32_t t = 0; t < view.tokens(); ++t) {
        float x[max_lanes];
        view.load(exact, t, h, read_position(*this, packed, t), x);
        for (std::uint32_t c = 0; c < view.head_dim(); ++c) {
            const Grid grid = stored.of(t, first + c);
            codes.token[t][c] = code_of(*this, x[c], grid.scale, grid.zero);
        }
        for (; next < outliers.count && outliers.places[next].token == t; ++next) {
            const std::uint32_t c = outliers.places[next].channel;
            const Grid grid = stored.of(t, first + c);
            const float coded = value_of(*this, codes.token[t][c], grid.scale, grid.zero);
            const std::uint16_t residual = f32_to_f16(x[c] - coded);
            const auto at = reinterpret_cast<const std::byte*>(outliers.residuals + next) - packed;
            std::memcpy(packed + at, &residual, sizeof residual);
        }
    }
    pack_tokens(codes, *this, section);
}

void RowPart::decode_head(const std::byte* packed, std::uint32_t h,
                          std::uint16_t* exact) const noexcept {
    const RowTables& tables = *row;
    const Rows view(*this);
    const auto* in = reinterpret_cast<const std::uint8_t*>(packed + section_offset(h));
    Groups groups;
    if (tables.groups > 0) read_metadata(*this, packed, groups);
    const RowMetadata stored{groups, tables, shape().part, view.tokens()};
    const std::uint32_t first = h * view.head_dim();
    const HeadOutliers outliers = outliers_of(*this, packed, h);
    std::uint32_t next = 0;
    for (std::uint32_t t = 0; t < view.tokens(); ++t) {
        float x[max_lanes];
        for (std::uint32_t c = 0; c < view.head_dim(); ++c) {
            const Grid grid = stored.of(t, first + c);
            const std::uint8_t code = kernels::load_code(in, codec.width, head.steps,
                                                         keys != 0 ? t : c, keys != 0 ? c : t);
            x[c] = value_of(*this, code, grid.scale, grid.zero);
        }
        for (; next < outliers.count && outliers.places[next].token == t; ++next) {
            x[outliers.places[next].channel] += f16_to_f32(outliers.residuals[next]);
        }
        view.store(x, t, h, read_position(*this, packed, t), exact);
    }
}

}  // namespace lowkv::codec
