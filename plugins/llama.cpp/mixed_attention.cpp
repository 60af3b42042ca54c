#include "mixed_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "key_shift.h"

namespace lowkv::ggml {
namespace {

// Rows [first, first + rows) of what `whole` attends to.
void cut(SequenceAttention& attention, const Plan& plan, std::size_t first, std::size_t rows) {
    const std::size_t block = plan.block_tokens();
    attention.blocks = attention.blocks.subspan(first / block, rows / block);
    attention.io.n_cells = static_cast<std::uint32_t>(rows);
    attention.mask.data = static_cast<const std::uint16_t*>(attention.mask.data) + first;
}

}  // namespace

MixedAttention::Part& MixedAttention::next() {
    if (used_ == parts_.size()) parts_.emplace_back();
    Part& part = parts_[used_++];
    part.remainder = false;
    return part;
}

void MixedAttention::take(const LayerCache& layer, std::uint32_t stream,
                          std::span<const std::uint32_t> units, SequenceAttention& whole,
                          Executor& executor) {
    const auto kind = [&](std::size_t i) {
        return Kind{layer.tier(stream, units[i]), layer.moved_by(stream, units[i])};
    };
    const Kind plain{static_cast<std::uint8_t>(layer.plans().size() - 1), 0};
    std::size_t taken = units.size();
    while (taken > 0 && kind(taken - 1) == plain) --taken;
    if (taken == 0) return;
    const std::size_t unit_rows = layer.unit_rows(stream);
    for (std::size_t first = 0, end = 0; first < taken; first = end) {
        while (end < taken && kind(end) == kind(first)) ++end;
        add(layer, whole, first * unit_rows, (end - first) * unit_rows, kind(first), executor);
    }
    Part& remainder = next();
    remainder.remainder = true;
    remainder.lse.resize(std::size_t{whole.io.tokens} * whole.io.heads);
    cut(whole, layer.plan(), taken * unit_rows, whole.io.n_cells - taken * unit_rows);
    whole.io.lse = remainder.lse.data();
    remainder.attention = whole;
}

void MixedAttention::add(const LayerCache& layer, const SequenceAttention& whole,
                         std::size_t first_row, std::size_t rows, Kind kind, Executor& executor) {
    Part& part = next();
    part.tier = kind.tier;
    part.attention = whole;
    cut(part.attention, layer.plan(), first_row, rows);
    AttentionIO& io = part.attention.io;
    const std::size_t queries = std::size_t{io.tokens} * io.heads;
    const std::size_t head_dim = layer.shape().head_dim;
    part.out.resize(queries * head_dim);
    part.lse.resize(queries);
    if (kind.moved != 0) {
        part.queries.resize(queries * head_dim);
        const KeyShift back(layer.shift_rope(), layer.shape(), -kind.moved);
        executor.parallel_for(io.tokens, [&](std::size_t token, unsigned) {
            for (std::size_t head = 0; head < io.heads; ++head) {
                float* q = part.queries.data() + (token * io.heads + head) * head_dim;
                std::copy_n(io.q + token * io.q_token_stride + head * io.q_head_stride, head_dim,
                            q);
                back.turn(q);
            }
        });
        io.q = part.queries.data();
        io.q_token_stride = io.heads * head_dim;
        io.q_head_stride = head_dim;
    }
    io.out = part.out.data();
    io.out_token_stride = io.heads * head_dim;
    io.out_head_stride = head_dim;
    io.lse = part.lse.data();
}

void MixedAttention::attend(const LayerCache& layer, AttentionParams params,
                            AttentionWorkspace& workspace, Executor& executor) {
    if (used_ == 0) return;
    params.sink_logits = nullptr;  // the remainder has met them
    for (std::size_t tier = 0; tier < layer.plans().size(); ++tier) {
        attended_.clear();
        for (std::size_t i = 0; i < used_; ++i)
            if (!parts_[i].remainder && parts_[i].tier == tier)
                attended_.push_back(parts_[i].attention);
        if (attended_.empty()) continue;
        lowkv::attend(layer.device(), *layer.plans()[tier], attended_, params, workspace, executor);
    }
    std::size_t first = 0;
    for (std::size_t i = 0; i < used_; ++i) {
        if (!parts_[i].remainder) continue;
        join(std::span(parts_).subspan(first, i - first), parts_[i], layer.shape(), executor);
        first = i + 1;
    }
    // A prompt's are large.
    constexpr std::size_t most_floats = std::size_t{1} << 22;
    for (Part& part : parts_)
        if (part.out.capacity() > most_floats) part = {};
}

void MixedAttention::join(std::span<const Part> parts, const Part& remainder, const Shape& shape,
                          Executor& executor) {
    const AttentionIO& io = remainder.attention.io;
    executor.parallel_for(io.tokens, [&](std::size_t token, unsigned) {
        for (std::size_t head = 0; head < io.heads; ++head) {
            const std::size_t i = token * io.heads + head;
            float top = remainder.lse[i];
            for (const Part& part : parts) top = std::max(top, part.lse[i]);
            if (top == -std::numeric_limits<float>::infinity()) continue;  // zeros
            float total = std::exp(remainder.lse[i] - top);
            for (const Part& part : parts) total += std::exp(part.lse[i] - top);
            float* out = io.out + token * io.out_token_stride + head * io.out_head_stride;
            const auto weight = [&](float lse) { return std::exp(lse - top) / total; };
            const float own = weight(remainder.lse[i]);
            for (std::size_t c = 0; c < shape.out_dim(); ++c) out[c] *= own;
            for (const Part& part : parts) {
                const float its = weight(part.lse[i]);
                const float* from = part.out.data() + i * shape.head_dim;
                for (std::size_t c = 0; c < shape.out_dim(); ++c) out[c] += its * from[c];
            }
        }
    });
}

}  // namespace lowkv::ggml
