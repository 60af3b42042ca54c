// Codecs that first change a token's channels: centring, rotation, normal levels or a trellis'
// (lowkv, TurboQuant). Per token and head: y = x R - mean, then codes of y.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "codec/small_floats.h"
#include "codec/uniform.h"
#include "isa/table.h"
#include "lowkv/codebook.h"
#include "lowkv/rotation.h"
#include "quantizers/grouped/grouped.h"
#include "quantizers/metadata.h"
#include "quantizers/packing.h"

namespace lowkv::codec {
namespace {

using kernels::unit_steps;

class TokenPart final : public CodesPart {
  public:
    TokenPart(const Codec& its_codec, const PartShape& its_shape, const PartInputs& inputs)
        : CodesPart(its_codec, its_shape),
          table_(*inputs.table),
          rotation_(inputs.rotations->of(its_codec.rotation)) {
        set_on_devices();
        by_token = 1;
        has_mean = codec.centred;
        has_zeros = codec.levels == Levels::uniform;
        if (codec.levels == Levels::normal) {
            const NormalCodebook& book = normal_codebook(codec.level_count());
            set_levels(std::span(book.level).first(book.count));
        } else if (codec.levels == Levels::trellis) {
            set_trellis();
        }
        const std::uint32_t count = codec.levels == Levels::trellis  ? LOWKV_WINDOWS
                                    : codec.levels == Levels::normal ? codec.level_count()
                                                                     : 0;
        for (std::uint32_t code = 0; code < count; ++code)
            level_values_[code] = static_cast<float>(level_of(code)) * level_step + level_zero;
        lay_out(*inputs.table);
    }

    const Rotation* rotation() const noexcept override { return rotation_.get(); }

    // A token's channels as they are. Infinities end at +-65504; a NaN is stored as 0.
    void load_as_it_is(const std::uint16_t* from, std::uint32_t token, float* x) const noexcept {
        if (keys == 0) return table_.from_f16(from + token * head.row_stride, x, head_dim);
        for (std::uint32_t c = 0; c < head_dim; ++c) {
            const float value = f16_to_f32(from[c * head.row_stride + token]);
            x[c] = value == value ? std::clamp(value, -f16_max, f16_max) : 0.0f;
        }
    }
    // The same, rotated.
    void load(const std::uint16_t* from, std::uint32_t token, float* x) const noexcept {
        load_as_it_is(from, token, x);
        if (rotation_ != nullptr) rotation_->apply(x);
    }
    // The inverse; x is overwritten.
    void store(float* x, std::uint32_t token, std::uint16_t* to) const noexcept {
        if (rotation_ != nullptr) rotation_->apply_inverse(x);
        const std::size_t stride = keys != 0 ? head.row_stride : 1;
        to += keys != 0 ? token : token * head.row_stride;
        for (std::uint32_t c = 0; c < head_dim; ++c) to[c * stride] = f32_to_f16(x[c]);
    }
    // What a code, of a trellis a window, stands for, in units of a group's scale.
    float level_value(std::uint8_t code) const noexcept { return level_values_[code]; }
    const kernels::Table& table() const noexcept { return table_; }
    void encode_head(const std::uint16_t* exact, std::uint32_t h, std::byte* packed,
                     const EncodeHints&) const noexcept override;
    void decode_head(const std::byte* packed, std::uint32_t h,
                     std::uint16_t* exact) const noexcept override;

  private:
    const kernels::Table& table_;
    std::shared_ptr<const Rotation> rotation_;
    std::array<float, LOWKV_WINDOWS> level_values_{};
};

void store_mean(const float* mean, const TokenPart& layout, std::byte* section) noexcept {
    std::uint16_t halves[max_lanes];
    std::transform(mean, mean + layout.head_dim, halves, f32_to_f16);
    std::memcpy(section + layout.mean_at, halves, layout.head_dim * sizeof *halves);
}

// The mean of a block's tokens, rotated as they are and rounded to f16.
void write_mean(const std::uint16_t* rows, const TokenPart& layout, std::byte* section) noexcept {
    float sum[max_lanes] = {}, x[max_lanes];
    for (std::uint32_t t = 0; t < layout.tokens; ++t) {
        layout.load_as_it_is(rows, t, x);
        for (std::uint32_t c = 0; c < layout.head_dim; ++c) sum[c] += x[c];
    }
    const float share = 1.0f / static_cast<float>(layout.tokens);
    for (std::uint32_t c = 0; c < layout.head_dim; ++c) sum[c] *= share;
    if (layout.rotation() != nullptr) layout.rotation()->apply(sum);
    store_mean(sum, layout, section);
}

// Calls f(first channel, count, group) for a token's groups.
template <class F>
void for_groups(const TokenPart& layout, std::uint32_t token, F f) {
    for (std::uint32_t r = 0; r < layout.group_rows; ++r) {
        const std::uint32_t first = r * layout.group;
        f(first, std::min(layout.group, layout.head_dim - first),
          std::size_t{r} * layout.row_entries + token);
    }
}

// What a code, of a trellis a window, stands for, less the mean.
float decoded(std::uint8_t code, const TokenPart& layout, const Groups& groups,
              std::size_t group) noexcept {
    const std::uint8_t level =
        layout.codec.levels == Levels::uniform ? code : layout.level_of(code);
    return static_cast<float>(level) * groups.scale[group] + groups.zero[group];
}

// Takes the mean of what the codes lose from the stored one, so that the decoded block has the
// tokens' mean. That errs less, and what was decoded is encoded alike: its mean is the one that the
// codes were made with.
void correct_mean(const TokenCodes& codes, const TokenPart& layout, const float* mean,
                  std::byte* section) noexcept {
    Groups stored;
    read_metadata(layout, section, stored);
    float sum[max_lanes] = {};
    for (std::uint32_t t = 0; t < layout.tokens; ++t)
        for_groups(layout, t, [&](std::uint32_t first, std::uint32_t count, std::size_t g) {
            for (std::uint32_t c = first; c < first + count; ++c)
                sum[c] += decoded(codes.token[t][c], layout, stored, g);
        });
    const float share = 1.0f / static_cast<float>(layout.tokens);
    for (std::uint32_t c = 0; c < layout.head_dim; ++c) sum[c] = mean[c] - sum[c] * share;
    store_mean(sum, layout, section);
}

// What a head's tokens are less: their mean, or zeros.
void read_mean(const TokenPart& layout, const std::byte* section, float* mean) noexcept {
    std::uint16_t halves[max_lanes] = {};
    if (layout.codec.centred)
        std::memcpy(halves, section + layout.mean_at, layout.head_dim * sizeof *halves);
    std::transform(halves, halves + layout.head_dim, mean, f16_to_f32);
}

// A token's y = x R - mean.
void transform(const std::uint16_t* rows, const TokenPart& layout, const float* mean,
               std::uint32_t token, float* y) noexcept {
    layout.load(rows, token, y);
    if (!layout.codec.centred) return;
    for (std::uint32_t c = 0; c < layout.head_dim; ++c) y[c] -= mean[c];
}

// Of `count` numbers of N tokens, rows of max_lanes. A token's sum goes by channel, and each
// addition waits for the one before it: so several tokens' go side by side.
template <std::uint32_t N>
std::array<float, N> squares_of(const float* y, std::uint32_t count) noexcept {
    std::array<float, N> sums{};
    for (std::uint32_t c = 0; c < count; ++c)
        for (std::uint32_t t = 0; t < N; ++t)
            sums[t] += y[t * max_lanes + c] * y[t * max_lanes + c];
    return sums;
}

// What makes channels with this sum of squares close to N(0, 1); 0 if they are 0.
float to_normal(float squares, std::uint32_t count) noexcept {
    const float norm = std::sqrt(squares);
    return norm > 0.0f ? std::sqrt(static_cast<float>(count)) / norm : 0.0f;
}

// Of chosen levels: their squares, and their products with y.
template <std::uint32_t N>
struct LevelSums {
    std::array<float, N> squares{}, products{};
};

template <std::uint32_t N>
LevelSums<N> level_sums(const float* y, std::uint32_t count, const TokenPart& layout,
                        const std::uint8_t* codes) noexcept {
    LevelSums<N> sums;
    for (std::uint32_t c = 0; c < count; ++c) {
        for (std::uint32_t t = 0; t < N; ++t) {
            const float level = layout.level_value(codes[t * max_lanes + c]);
            sums.squares[t] += level * level;
            sums.products[t] += level * y[t * max_lanes + c];
        }
    }
    return sums;
}

// The unit of y's levels, once its codes are chosen: they don't depend on it.
float fitted_scale(float squares, float level_squares, float products, Fit fit) noexcept {
    const float norm = std::sqrt(squares);
    if (!(norm > 0.0f)) return 0.0f;
    switch (fit) {
        case Fit::norm: break;
        case Fit::unbiased: return squares / products;
        case Fit::least: return products / level_squares;
    }
    return norm / std::sqrt(level_squares);
}

// Codes of the direction y / |y|, whose channels are close to N(0, 1/count).
void quantize_normal(const float* y, float squares, std::uint32_t count, const TokenPart& layout,
                     std::uint8_t* codes) noexcept {
    const NormalCodebook& book = normal_codebook(layout.codec.level_count());
    const float factor = to_normal(squares, count);
    std::fill_n(codes, count, std::uint8_t{0});
    if (factor == 0.0f) return;
    for (std::uint32_t b = 0; b + 1 < book.count; ++b) {
        const float boundary = book.boundary[b];
        for (std::uint32_t c = 0; c < count; ++c) {
            codes[c] = static_cast<std::uint8_t>(codes[c] + (y[c] * factor >= boundary ? 1 : 0));
        }
    }
}

// Of all tokens: the windows of their codes, and their scales.
void quantize_trellis(const std::uint16_t* rows, const TokenPart& layout, const float* mean,
                      Groups& groups, TokenCodes& codes) noexcept {
    const std::uint32_t channels = layout.head_dim;
    constexpr std::uint32_t tokens = LOWKV_UNIT_LANES, side_by_side = 8;
    float y[tokens][max_lanes], factor[tokens];
    for (std::uint32_t first = 0; first < layout.tokens; first += tokens) {
        for (std::uint32_t t = 0; t < tokens; ++t) transform(rows, layout, mean, first + t, y[t]);
        for (std::uint32_t at = 0; at < tokens; at += side_by_side) {
            const auto squares = squares_of<side_by_side>(y[at], channels);
            for (std::uint32_t t = 0; t < side_by_side; ++t) {
                factor[at + t] = to_normal(squares[t], channels);
                for (std::uint32_t c = 0; c < channels; ++c) y[at + t][c] *= factor[at + t];
            }
        }
        layout.table().find_windows(trellis_bits(layout.codec.width), layout.shape().part, y[0],
                                    max_lanes, channels, codes.token[first]);
        for (std::uint32_t at = 0; at < tokens; at += side_by_side) {
            const auto squares = squares_of<side_by_side>(y[at], channels);
            const auto levels =
                level_sums<side_by_side>(y[at], channels, layout, codes.token[first + at]);
            for (std::uint32_t t = 0; t < side_by_side; ++t) {
                const float scale = fitted_scale(squares[t], levels.squares[t], levels.products[t],
                                                 layout.codec.fit);
                groups.scale[first + at + t] = scale > 0.0f ? scale / factor[at + t] : 0.0f;
            }
        }
    }
}

void unpack(const std::byte* section, const TokenPart& layout, TokenCodes& codes) noexcept {
    const HeadShape& head = layout.head;
    const auto* in = reinterpret_cast<const std::uint8_t*>(section + layout.codes_at);
    CodeTile tile;
    for (std::uint32_t step = 0; step < head.steps; ++step) {
        if (step % unit_steps == 0) {
            unpack_tile(in, layout.codec.width, head, step / unit_steps, tile);
            if (layout.codec.levels == Levels::trellis)
                open_windows(tile, layout.codec.width, head.lanes);
        }
        for (std::uint32_t lane = 0; lane < head.lanes; ++lane) {
            std::uint8_t& code =
                layout.keys != 0 ? codes.token[lane][step] : codes.token[step][lane];
            code = tile.row[step % unit_steps][lane];
        }
    }
}

void TokenPart::encode_head(const std::uint16_t* exact, std::uint32_t h, std::byte* packed,
                            const EncodeHints&) const noexcept {
    const std::uint16_t* from = head_rows(exact, h);
    std::byte* section = packed + section_offset(h);
    const bool normal = codec.levels == Levels::normal;
    const bool trellis = codec.levels == Levels::trellis;
    std::memset(section, 0, head_bytes());
    float mean[max_lanes], y[max_lanes];
    if (codec.centred) write_mean(from, *this, section);
    read_mean(*this, section, mean);

    Groups groups;
    TokenCodes codes;
    if (trellis) quantize_trellis(from, *this, mean, groups, codes);
    for (std::uint32_t t = 0; !trellis && t < tokens; ++t) {
        transform(from, *this, mean, t, y);
        for_groups(*this, t, [&](std::uint32_t first, std::uint32_t count, std::size_t g) {
            if (normal) {
                std::uint8_t* to = codes.token[t] + first;
                const float squares = squares_of<1>(y + first, count)[0];
                quantize_normal(y + first, squares, count, *this, to);
                const auto sums = level_sums<1>(y + first, count, *this, to);
                groups.scale[g] =
                    fitted_scale(squares, sums.squares[0], sums.products[0], codec.fit);
            } else {
                const Grid full = full_grid(y + first, count, top);
                const Grid grid = search != 0 ? searched_grid(y + first, count, full, top) : full;
                groups.scale[g] = grid.scale;
                groups.zero[g] = grid.zero;
            }
        });
    }
    write_metadata(*this, section, groups);
    // Uniform codes need the metadata as it is stored. The tokens are transformed once more: their
    // floats would not fit on a thread's stack.
    for (std::uint32_t t = 0; has_zeros != 0 && t < tokens; ++t) {
        transform(from, *this, mean, t, y);
        for_groups(*this, t, [&](std::uint32_t first, std::uint32_t count, std::size_t g) {
            quantize_uniform(y + first, count, {groups.scale[g], groups.zero[g]}, top,
                             codes.token[t] + first);
        });
    }
    if (codec.centred) correct_mean(codes, *this, mean, section);
    pack_tokens(codes, *this, section);
}

void TokenPart::decode_head(const std::byte* packed, std::uint32_t h,
                            std::uint16_t* exact) const noexcept {
    const std::byte* section = packed + section_offset(h);
    float mean[max_lanes], x[max_lanes];
    read_mean(*this, section, mean);
    Groups groups;
    read_metadata(*this, section, groups);
    TokenCodes codes;
    unpack(section, *this, codes);
    for (std::uint32_t t = 0; t < tokens; ++t) {
        for_groups(*this, t, [&](std::uint32_t first, std::uint32_t count, std::size_t g) {
            for (std::uint32_t c = first; c < first + count; ++c)
                x[c] = decoded(codes.token[t][c], *this, groups, g) + mean[c];
        });
        store(x, t, head_rows(exact, h));
    }
}

}  // namespace

std::shared_ptr<const PackedPart> make_by_token(const Codec& codec, const PartShape& shape,
                                                const PartInputs& inputs) {
    return std::make_shared<TokenPart>(codec, shape, inputs);
}

}  // namespace lowkv::codec
