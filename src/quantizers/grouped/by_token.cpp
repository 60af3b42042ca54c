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
#include "quantizers/grouped/grouped.h"
#include "quantizers/metadata.h"
#include "quantizers/packing.h"
#include "quantizers/token_view.h"

namespace lowkv::codec {
namespace {

using kernels::unit_steps;

class TokenPart final : public RotatedPart {
  public:
    TokenPart(const Codec& its_codec, const PartShape& its_shape, const PartInputs& inputs)
        : RotatedPart(its_codec, its_shape, inputs) {
        set_on_devices();
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

    // What a code, of a trellis a window, stands for, in units of a group's scale.
    float level_value(std::uint8_t code) const noexcept { return level_values_[code]; }
    const kernels::Table& table() const noexcept { return table_; }
    void encode_head(const std::uint16_t* exact, std::uint32_t h, std::byte* packed,
                     const EncodeHints&) const noexcept override;
    void decode_head(const std::byte* packed, std::uint32_t h,
                     std::uint16_t* exact) const noexcept override;

  private:
    std::array<float, LOWKV_WINDOWS> level_values_{};
};

// The mean of a block's tokens, rotated as they are and rounded to f16.
void write_mean(const std::uint16_t* rows, const TokenView& view, const TokenPart& layout,
                std::byte* section) noexcept {
    float sum[max_lanes] = {}, x[max_lanes];
    for (std::uint32_t t = 0; t < view.tokens(); ++t) {
        layout.load_as_it_is(view, rows, t, x);
        for (std::uint32_t c = 0; c < view.channels(); ++c) sum[c] += x[c];
    }
    const float share = 1.0f / static_cast<float>(view.tokens());
    for (std::uint32_t c = 0; c < view.channels(); ++c) sum[c] *= share;
    if (layout.rotation() != nullptr) layout.rotation()->apply(sum);
    std::uint16_t halves[max_lanes];
    for (std::uint32_t c = 0; c < view.channels(); ++c) halves[c] = f32_to_f16(sum[c]);
    std::memcpy(section + layout.mean_at, halves, view.channels() * sizeof *halves);
}

// Calls f(first channel, count, group) for a token's groups.
template <class F>
void for_groups(const TokenPart& layout, std::uint32_t channels, std::uint32_t token, F f) {
    for (std::uint32_t r = 0; r < layout.group_rows; ++r) {
        const std::uint32_t first = r * layout.group;
        f(first, std::min(layout.group, channels - first),
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
void correct_mean(const TokenCodes& codes, const TokenView& view, const TokenPart& layout,
                  const float* mean, std::byte* section) noexcept {
    Groups stored;
    read_metadata(layout, section, stored);
    float sum[max_lanes] = {};
    for (std::uint32_t t = 0; t < view.tokens(); ++t)
        for_groups(layout, view.channels(), t,
                   [&](std::uint32_t first, std::uint32_t count, std::size_t g) {
                       for (std::uint32_t c = first; c < first + count; ++c)
                           sum[c] += decoded(codes.token[t][c], layout, stored, g);
                   });
    const float share = 1.0f / static_cast<float>(view.tokens());
    std::uint16_t halves[max_lanes];
    for (std::uint32_t c = 0; c < view.channels(); ++c)
        halves[c] = f32_to_f16(mean[c] - sum[c] * share);
    std::memcpy(section + layout.mean_at, halves, view.channels() * sizeof *halves);
}

// What a head's tokens are less: their mean, or zeros.
void read_mean(const TokenPart& layout, const std::byte* section, std::uint32_t channels,
               float* mean) noexcept {
    std::uint16_t halves[max_lanes] = {};
    if (layout.codec.centred) {
        std::memcpy(halves, section + layout.mean_at, channels * sizeof *halves);
    }
    for (std::uint32_t c = 0; c < channels; ++c) mean[c] = f16_to_f32(halves[c]);
}

// A token's y = x R - mean.
void transform(const std::uint16_t* rows, const TokenView& view, const TokenPart& layout,
               const float* mean, std::uint32_t token, float* y) noexcept {
    layout.load_token(view, rows, token, y);
    if (!layout.codec.centred) return;
    for (std::uint32_t c = 0; c < view.channels(); ++c) y[c] -= mean[c];
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
void quantize_trellis(const std::uint16_t* rows, const TokenView& view, const TokenPart& layout,
                      const float* mean, Groups& groups, TokenCodes& codes) noexcept {
    const std::uint32_t channels = view.channels();
    constexpr std::uint32_t tokens = LOWKV_UNIT_LANES, side_by_side = 8;
    float y[tokens][max_lanes], factor[tokens];
    for (std::uint32_t first = 0; first < view.tokens(); first += tokens) {
        for (std::uint32_t t = 0; t < tokens; ++t)
            transform(rows, view, layout, mean, first + t, y[t]);
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
    const TokenPart& layout = *this;
    const std::uint16_t* from = head_rows(exact, h);
    std::byte* section = packed + section_offset(h);
    const TokenView view(shape().part, head);
    const bool normal = layout.codec.levels == Levels::normal;
    const bool trellis = layout.codec.levels == Levels::trellis;
    std::memset(section, 0, head_bytes());
    float mean[max_lanes], y[max_lanes];
    if (layout.codec.centred) write_mean(from, view, layout, section);
    read_mean(layout, section, view.channels(), mean);

    Groups groups;
    TokenCodes codes;
    if (trellis) quantize_trellis(from, view, layout, mean, groups, codes);
    for (std::uint32_t t = 0; !trellis && t < view.tokens(); ++t) {
        transform(from, view, layout, mean, t, y);
        for_groups(layout, view.channels(), t,
                   [&](std::uint32_t first, std::uint32_t count, std::size_t g) {
                       if (normal) {
                           std::uint8_t* to = codes.token[t] + first;
                           const float squares = squares_of<1>(y + first, count)[0];
                           quantize_normal(y + first, squares, count, layout, to);
                           const auto sums = level_sums<1>(y + first, count, layout, to);
                           groups.scale[g] =
                               fitted_scale(squares, sums.squares[0], sums.products[0], codec.fit);
                       } else {
                           const Grid full = full_grid(y + first, count, top);
                           const Grid grid =
                               search != 0 ? searched_grid(y + first, count, full, top) : full;
                           groups.scale[g] = grid.scale;
                           groups.zero[g] = grid.zero;
                       }
                   });
    }
    write_metadata(layout, section, groups);
    // Uniform codes need the metadata as it is stored. The tokens are transformed once more: their
    // floats would not fit on a thread's stack.
    for (std::uint32_t t = 0; layout.has_zeros && t < view.tokens(); ++t) {
        transform(from, view, layout, mean, t, y);
        for_groups(layout, view.channels(), t,
                   [&](std::uint32_t first, std::uint32_t count, std::size_t g) {
                       quantize_uniform(y + first, count, {groups.scale[g], groups.zero[g]}, top,
                                        codes.token[t] + first);
                   });
    }
    if (layout.codec.centred) correct_mean(codes, view, layout, mean, section);
    pack_tokens(codes, shape().part, layout.codec.width, head,
                reinterpret_cast<std::uint8_t*>(section + layout.codes_at));
}

void TokenPart::decode_head(const std::byte* packed, std::uint32_t h,
                            std::uint16_t* exact) const noexcept {
    const std::byte* section = packed + section_offset(h);
    const TokenView view(shape().part, head);
    float mean[max_lanes], x[max_lanes];
    read_mean(*this, section, view.channels(), mean);
    Groups groups;
    read_metadata(*this, section, groups);
    TokenCodes codes;
    unpack(section, *this, codes);
    for (std::uint32_t t = 0; t < view.tokens(); ++t) {
        for_groups(*this, view.channels(), t,
                   [&](std::uint32_t first, std::uint32_t count, std::size_t g) {
                       for (std::uint32_t c = first; c < first + count; ++c) {
                           x[c] = decoded(codes.token[t][c], *this, groups, g) + mean[c];
                       }
                   });
        store_token(view, x, t, head_rows(exact, h));
    }
}

}  // namespace

std::shared_ptr<const PackedPart> make_by_token(const Codec& codec, const PartShape& shape,
                                                const PartInputs& inputs) {
    return std::make_shared<TokenPart>(codec, shape, inputs);
}

}  // namespace lowkv::codec
