#pragma once
// What a block of a codec that centres, rotates or takes normal levels should have stored,
// recomputed in double from its f16 input (docs/methods.md, "Laws").

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "codec_block.h"
#include "lowkv/codebook.h"
#include "lowkv/rotation.h"

namespace lowkv::test {

// R in row order, in double; the identity where there is none.
inline std::vector<double> matrix_of(const codec::Rotation* rotation, std::uint32_t head_dim) {
    std::vector<double> matrix;
    for (std::uint32_t i = 0; i < head_dim; ++i) {
        std::vector<float> row(head_dim);
        row[i] = 1.0f;
        if (rotation != nullptr) rotation->apply(row.data());
        matrix.insert(matrix.end(), row.begin(), row.end());
    }
    return matrix;
}

// The vectors of a part of one head, by token.
using Tokens = std::vector<std::vector<double>>;

inline Tokens tokens_of(const Block& block, Which w) {
    Tokens x(block.plan.block_tokens(), std::vector<double>(block.plan.shape().head_dim));
    block.each([&](Place p) { x[p.token][p.channel] = block.get(w, p); });
    return x;
}

// x R, or x R^T.
inline Tokens rotate(const Tokens& x, const std::vector<double>& matrix, bool back = false) {
    const std::size_t n = x.front().size();
    Tokens y(x.size(), std::vector<double>(n));
    for (std::size_t t = 0; t < x.size(); ++t) {
        for (std::size_t i = 0; i < n; ++i) {
            for (std::size_t j = 0; j < n; ++j) {
                if (back) y[t][i] += matrix[i * n + j] * x[t][j];
                if (!back) y[t][j] += x[t][i] * matrix[i * n + j];
            }
        }
    }
    return y;
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
}
inline double norm(const std::vector<double>& x) { return std::sqrt(dot(x, x)); }

// How far the metadata type may move a value: half a unit in its last place, or half its smallest
// step; a scale above 0 may be raised to the whole smallest step.
inline double rounding(Metadata type, double value, double multiplier) {
    const bool half = type == Metadata::fp16;
    const double smallest = half                         ? 0x1p-24
                            : type == Metadata::fp8_e4m3 ? LOWKV_E4M3_SMALLEST * multiplier
                                                         : LOWKV_E5M3_SMALLEST;
    return std::max(std::fabs(value) * (half ? 0x1p-11 : 0x1p-4), smallest);
}

struct Faults {
    std::size_t codes = 0, scales = 0, zeros = 0;
};

// One group: y is what should have been stored from channel p.channel on, and the codec's floats
// may have been `noise` away from it.
inline void check_group(const Block& block, Which w, Place p, const std::vector<double>& y,
                        double noise, Faults& faults) {
    const codec::CodesPart& layout = block.layout(w);
    const Metadata type = layout.codec.metadata;
    const double scale = block.scale(w, p);
    const double scale_rounding = rounding(type, scale, block.multiplier(w, p.head, 0));
    const auto code = [&](std::size_t i) {
        return block.code(w, {p.head, p.channel + static_cast<std::uint32_t>(i), p.token});
    };
    if (layout.has_zeros) {
        const double top = layout.codec.level_count() - 1, zero = block.zero(w, p);
        const auto [low, high] = std::minmax_element(y.begin(), y.end());
        const double zero_rounding = rounding(type, zero, block.multiplier(w, p.head, 1));
        if (!(std::fabs(zero - *low) <= zero_rounding + noise)) ++faults.zeros;
        if (!(std::fabs(scale - (*high - *low) / top) <= scale_rounding + noise)) ++faults.scales;
        for (std::size_t i = 0; i < y.size(); ++i) {
            const double exact = std::clamp((y[i] - zero) / scale, 0.0, top);
            if (!(std::fabs(exact - code(i)) <= 0.5 + noise / scale)) ++faults.codes;
        }
        return;
    }
    const codec::NormalCodebook& book = codec::normal_codebook(layout.codec.level_count());
    const double to_normal = std::sqrt(static_cast<double>(y.size())) / norm(y);
    std::vector<double> levels;
    for (std::size_t i = 0; i < y.size(); ++i) {
        levels.push_back(layout.level_of(code(i)) * double{layout.level_step} + layout.level_zero);
        if (layout.codec.levels == Levels::trellis) continue;  // its path: trellis_codes.cpp
        double nearest = std::numeric_limits<double>::infinity();
        for (std::uint32_t l = 0; l < book.count; ++l) {
            nearest = std::min(nearest, std::fabs(y[i] * to_normal - book.level[l]));
        }
        const std::uint8_t own = code(i);
        const double chosen = std::fabs(y[i] * to_normal - book.level[own]);
        // Within 1e-6 of a boundary, two levels are as near.
        if (!(chosen <= nearest + 2 * (1e-6 + noise * to_normal))) ++faults.codes;
    }
    // Each fit is one equation: scale * moment = wanted.
    double moment = norm(levels), wanted = norm(y);
    if (layout.codec.fit == Fit::unbiased) moment = dot(y, levels), wanted = dot(y, y);
    if (layout.codec.fit == Fit::least) moment = dot(levels, levels), wanted = dot(y, levels);
    if (!(std::fabs(scale * moment - wanted) <= (scale_rounding + noise) * moment)) ++faults.scales;
}

// The mean of a channel that the codes are made with, and how far it may be off: where the codec's
// floats may fall on the other side of a tie between two halves, by one of their places.
struct Mean {
    double value = 0, slack = 0;
};

// A head's means: of the block, rounded to f16. A block stores them less the
// mean of what the codes stand for, so that the decoded block has the tokens' mean.
inline std::vector<Mean> check_means(const Block& block, Which w, const Tokens& rotated) {
    const std::uint32_t head_dim = block.plan.shape().head_dim;
    const auto count = static_cast<double>(rotated.size());
    std::vector<Mean> means(head_dim);
    if (!codec_of(block.plan, w).centred) return means;
    double size = 0;
    for (const auto& y : rotated) size += norm(y);
    std::size_t wrong = 0;
    for (std::uint32_t c = 0; c < head_dim; ++c) {
        double mean = 0, decoded = 0;
        for (std::uint32_t t = 0; t < rotated.size(); ++t) {
            mean += rotated[t][c] / count;
            decoded += block.part(w).stored({0, c, t}) / count;
        }
        const double stored = block.part(w).mean({0, c, 0}), noise = 1e-6 * size / count;
        const double rounding = (std::fabs(mean) + std::fabs(stored)) * 0x1p-11;
        if (!(std::fabs(decoded - mean) <= rounding + noise)) ++wrong;
        const double half = codec::f16_to_f32(codec::f32_to_f16(static_cast<float>(mean)));
        const double place = std::ldexp(1.0, std::max(std::ilogb(half), -14) - 10);
        const bool tie = std::fabs(mean - half) >= place / 2 - noise;
        means[c] = {half, tie ? place : 0};
    }
    CHECK(wrong == 0);
    return means;
}

// `rotated` is the input times R.
inline void check_laws(const Block& block, Which w, const Tokens& rotated) {
    const codec::CodesPart& layout = block.layout(w);
    const std::uint32_t head_dim = block.plan.shape().head_dim;
    Faults faults;
    const std::vector<Mean> means = check_means(block, w, rotated);
    for (std::uint32_t t = 0; t < rotated.size(); ++t) {
        const double noise = 1e-6 * norm(rotated[t]) / std::sqrt(head_dim);
        for (std::uint32_t first = 0; first < head_dim; first += layout.group) {
            std::vector<double> y;
            double slack = 0;
            for (std::uint32_t c = first; c < std::min(first + layout.group, head_dim); ++c) {
                y.push_back(rotated[t][c] - means[c].value);
                slack += means[c].slack;
            }
            check_group(block, w, {0, first, t}, y, noise + slack, faults);
        }
    }
    CHECK(faults.codes == 0);
    CHECK(faults.scales == 0);
    CHECK(faults.zeros == 0);
}

}  // namespace lowkv::test
