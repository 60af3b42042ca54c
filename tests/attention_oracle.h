#pragma once
// Attention in double precision on the decoded cache: what every kernel is checked against.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "codec/small_floats.h"
#include "codec_block.h"
#include "lowkv/attention.h"
#include "lowkv/rotation.h"
#include "sealed_device.h"
#include "sorted_reader.h"

namespace lowkv::test {

// A filled sequence and queries, keys with a few outlier channels as real models have them.
struct Problem {
    std::shared_ptr<const Plan> plan;
    std::optional<Sequence> sequence;
    std::uint32_t heads = 0, tokens = 0, n_cells = 0;
    std::uint32_t first_cell = 0;
    std::vector<float> q;

    Problem(const Scheme& scheme, const Shape& shape, std::uint32_t heads_, std::uint32_t tokens_,
            std::uint32_t n_cells_, unsigned seed, const LayerInputs& inputs = {},
            std::span<const std::int32_t> positions = {})
        : plan(std::make_shared<Plan>(scheme.base, shape, std::string_view{}, 0, inputs)),
          heads(heads_),
          tokens(tokens_),
          n_cells(n_cells_) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        sequence.emplace(make_store(), plan, scheme.retention);
        const std::uint32_t channels = shape.channels();
        std::vector<float> keys(std::size_t{n_cells} * channels), values(keys.size());
        for (std::size_t i = 0; i < keys.size(); ++i) {
            const bool outlier = i % channels % 29 == 3;
            keys[i] = normal(random) * (outlier ? 8.0f : 1.0f) + (outlier ? 5.0f : 0.0f);
            values[i] = normal(random);
        }
        sequence->append(keys.data(), values.data(), n_cells, positions);
        sequence->pack();
        q.resize(std::size_t{tokens} * heads * shape.head_dim);
        for (float& x : q) x = normal(random);
    }

    AttentionIO io(std::vector<float>& out) const {
        const std::uint32_t head_dim = plan->shape().head_dim;
        out.assign(q.size(), NAN);
        AttentionIO io;
        io.q = q.data();
        io.out = out.data();
        io.q_token_stride = io.out_token_stride = std::size_t{heads} * head_dim;
        io.q_head_stride = io.out_head_stride = head_dim;
        io.tokens = tokens;
        io.heads = heads;
        io.n_cells = n_cells;
        io.first_cell = first_cell;
        return io;
    }
};

// Attention over blocks of the problem's store.
inline void attend_views(const Problem& p, std::span<const BlockView> views, const AttentionIO& io,
                         const AttentionParams& params, AttentionWorkspace& workspace) {
    const SequenceAttention one{views, io, params.mask};
    attend(p.sequence->device(), *p.plan, std::span(&one, 1), params, workspace);
}

// R in row order: the rotated unit vectors. Empty without a rotation.
inline std::vector<float> matrix_of(const PackedPart& part, std::uint32_t d) {
    if (part.rotation() == nullptr) return {};
    std::vector<float> matrix(std::size_t{d} * d, 0.0f);
    for (std::uint32_t i = 0; i < d; ++i) {
        matrix[std::size_t{i} * d + i] = 1.0f;
        part.rotation()->apply(matrix.data() + std::size_t{i} * d);
    }
    return matrix;
}

// A rope in double precision, of a position as packed keys count it: modulo 2^21. Encoding turned
// the key back by as much.
inline void turn(const Rope& rope, std::int32_t position, std::vector<double>& x) {
    position &= (1 << 21) - 1;
    const std::size_t pairs = rope.frequencies.size();
    for (std::size_t i = 0; i < pairs; ++i) {
        const bool halves = rope.pairs == Rope::Pairs::halves;
        double& a = x[halves ? i : 2 * i];
        double& b = x[halves ? i + pairs : 2 * i + 1];
        const double angle = double(position) * double(rope.frequencies[i]);
        const double c = rope.magnitude * std::cos(angle), s = rope.magnitude * std::sin(angle);
        const double turned = a * c - b * s;
        b = a * s + b * c;
        a = turned;
    }
}

// A token's head in a packed or exact block, straight from the documented layout: unlike
// Sequence::read_key(), not rounded to f16 on the way.
inline std::vector<double> vector_of(const Problem& p, Which which, std::uint32_t cell,
                                     std::uint32_t head, const std::vector<float>& matrix) {
    const Plan& plan = *p.plan;
    if (plan.shape().latent()) which = Which::keys;
    const std::uint32_t d = plan.shape().head_dim, token = cell % plan.block_tokens();
    std::vector<std::byte> copy;
    const BlockView view = readable(*p.sequence, cell / plan.block_tokens(), copy);
    const PartReader part{plan, which, which == Which::keys ? view.keys : view.values};
    std::vector<double> x(d);
    if (!view.packed || plan.part(which).exact()) {
        for (std::uint32_t c = 0; c < d; ++c) {
            const std::size_t wide = std::size_t{head} * d + c;
            const std::size_t at = which == Which::keys ? wide * plan.block_tokens() + token
                                                        : token * plan.shape().channels() + wide;
            const RowType rows = view.packed ? RowType::f16 : plan.rows();
            if (rows == RowType::f32) {
                float value = 0;
                std::memcpy(&value, part.data + 4 * at, sizeof value);
                x[c] = value;
                continue;
            }
            std::uint16_t bits = 0;
            std::memcpy(&bits, part.data + 2 * at, sizeof bits);
            x[c] = rows == RowType::f16 ? codec::f16_to_f32(bits)
                                        : std::bit_cast<float>(std::uint32_t{bits} << 16);
        }
        return x;
    }
    if (const auto* sorted = dynamic_cast<const codec::SortedPart*>(&plan.part(which)))
        return SortedReader(*sorted, part.data, head).key(token);
    for (std::uint32_t c = 0; c < d; ++c) x[c] = part.stored({head, c, token});
    if (const Rope* rope = part.row.rope()) {
        turn(*rope, part.position(token), x);
    }
    if (matrix.empty()) return x;
    std::vector<double> original(d, 0.0);  // x R^T
    for (std::uint32_t i = 0; i < d; ++i) {
        const float* row = matrix.data() + std::size_t{i} * d;
        for (std::uint32_t c = 0; c < d; ++c) original[i] += x[c] * double{row[c]};
    }
    return original;
}

// What is added to a score, or -inf.
inline double bias(const Problem& p, const AttentionParams& params, std::uint32_t token,
                   std::uint32_t head, std::uint32_t cell) {
    const double slope = params.alibi_slopes != nullptr ? params.alibi_slopes[head] : 1.0;
    if (cell < p.first_cell) return -INFINITY;
    const std::size_t at = token * params.mask.row_stride + (cell - p.first_cell);
    switch (params.mask.kind) {
        case Mask::Kind::none: return 0;
        case Mask::Kind::causal: {
            const double distance = double(p.n_cells - p.tokens + token) - double(cell);
            if (distance < 0) return -INFINITY;
            if (params.mask.window != 0 && distance >= params.mask.window) return -INFINITY;
            return params.alibi_slopes != nullptr ? -slope * distance : 0;
        }
        case Mask::Kind::additive_f16:
            return slope *
                   codec::f16_to_f32(static_cast<const std::uint16_t*>(params.mask.data)[at]);
        case Mask::Kind::additive_f32:
            return slope * static_cast<const float*>(params.mask.data)[at];
    }
    return 0;
}

// mass and lse, if asked for: as attention_mass() and AttentionIO have them.
inline std::vector<double> oracle(const Problem& p, const AttentionParams& params,
                                  std::vector<double>* mass = nullptr,
                                  std::vector<double>* lse = nullptr) {
    if (mass != nullptr) mass->assign(p.n_cells, 0.0);
    if (lse != nullptr) {
        lse->assign(std::size_t{p.tokens} * p.heads, -INFINITY);
    }
    const Shape shape = p.plan->shape();
    const std::uint32_t d = shape.head_dim, repeat = p.heads / shape.kv_heads;
    const std::vector<float> matrices[] = {matrix_of(p.plan->keys(), d),
                                           matrix_of(p.plan->values(), d)};
    std::vector<double> keys, values;
    for (std::uint32_t c = 0; c < p.n_cells; ++c) {
        for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
            for (const Which which : both) {
                const std::vector<double> x =
                    vector_of(p, which, c, h, matrices[which == Which::keys ? 0 : 1]);
                std::vector<double>& all = which == Which::keys ? keys : values;
                all.insert(all.end(), x.begin(), x.end());
            }
        }
    }
    std::vector<double> out(p.q.size(), 0.0), scores(p.n_cells);
    for (std::uint32_t t = 0; t < p.tokens; ++t) {
        for (std::uint32_t h = 0; h < p.heads; ++h) {
            const float* q = p.q.data() + (std::size_t{t} * p.heads + h) * d;
            double top = params.sink_logits != nullptr ? params.sink_logits[h] : -INFINITY;
            for (std::uint32_t c = 0; c < p.n_cells; ++c) {
                const double* k = keys.data() + std::size_t{c} * shape.channels() + h / repeat * d;
                double s = 0;
                for (std::uint32_t i = 0; i < d; ++i) s += q[i] * k[i];
                s *= params.scale;
                if (params.softcap > 0) s = params.softcap * std::tanh(s / params.softcap);
                scores[c] = s + bias(p, params, t, h, c);
                top = std::max(top, scores[c]);
            }
            if (top == -INFINITY) continue;
            double sum =
                params.sink_logits != nullptr ? std::exp(params.sink_logits[h] - top) : 0.0;
            double* o = out.data() + (std::size_t{t} * p.heads + h) * d;
            for (std::uint32_t c = 0; c < p.n_cells; ++c) {
                const double w = std::exp(scores[c] - top);
                const double* v =
                    values.data() + std::size_t{c} * shape.channels() + h / repeat * d;
                sum += w;
                for (std::uint32_t i = 0; i < d; ++i) o[i] += w * v[i];
            }
            for (std::uint32_t i = 0; i < d; ++i) o[i] /= sum;
            if (lse != nullptr) {
                (*lse)[std::size_t{t} * p.heads + h] = top + std::log(sum);
            }
            for (std::uint32_t c = 0; mass != nullptr && c < p.n_cells; ++c) {
                (*mass)[c] += std::exp(scores[c] - top) / sum;
            }
        }
    }
    return out;
}

// Largest error of an output vector (one token's head, its first `channels`) over that vector's
// largest element, worst over all vectors. Infinite when anything is not finite.
inline double relative_error(const std::vector<float>& got, const std::vector<double>& want,
                             std::uint32_t head_dim, std::uint32_t channels) {
    double worst = 0;
    for (std::size_t at = 0; at < got.size(); at += head_dim) {
        double error = 0, size = 0;
        for (std::size_t i = at; i < at + channels; ++i) {
            if (!std::isfinite(got[i])) return INFINITY;
            error = std::max(error, std::fabs(got[i] - want[i]));
            size = std::max(size, std::fabs(want[i]));
        }
        worst = std::max(worst, size > 0 ? error / size : error);
    }
    return worst;
}
inline double relative_error(const std::vector<float>& got, const std::vector<double>& want,
                             std::uint32_t head_dim) {
    return relative_error(got, want, head_dim, head_dim);
}

}  // namespace lowkv::test
