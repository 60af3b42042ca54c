#include "attention/query.h"

#include <algorithm>
#include <cmath>

namespace lowkv::attention {

void check_arguments(const Shape& shape, const AttentionIO& io, const Mask& mask,
                     const AttentionParams& params) {
    if (io.heads == 0 || io.heads % shape.kv_heads != 0)
        refuse(io.heads, " query heads are not a multiple of ", shape.kv_heads, " kv heads");
    if (io.tokens > 0 && (io.q == nullptr || io.out == nullptr)) refuse("q or out is null");
    if (io.first_cell > io.n_cells)
        refuse("the first cell, ", io.first_cell, ", is past the ", io.n_cells, " cells there are");
    const std::uint32_t cells = io.n_cells - io.first_cell;
    const bool additive = kernels::is_additive(mask.kind);
    const bool causal = mask.kind == Mask::Kind::causal;
    if (additive && mask.data == nullptr) refuse("the additive mask has no data");
    if (additive && io.tokens > 1 && mask.row_stride != 0 && mask.row_stride < cells)
        refuse("mask rows of ", mask.row_stride, " values do not cover ", cells, " cells");
    if (causal && io.n_cells < io.tokens)
        refuse("a causal mask needs at least as many cells (", io.n_cells, ") as query tokens (",
               io.tokens, ")");
    if (!causal && mask.window != 0) refuse("a window of ", mask.window, " needs a causal mask");
    if (!std::isfinite(params.scale) || !std::isfinite(params.softcap) || params.softcap < 0)
        refuse("scale must be finite, softcap finite and not negative");
    if (additive) check_slopes(io, params);
}

void check_slopes(const AttentionIO& io, const AttentionParams& params) {
    for (std::uint32_t head = 0; params.alibi_slopes != nullptr && head < io.heads; ++head)
        if (!(params.alibi_slopes[head] > 0))
            refuse("the ALiBi slope of head ", head,
                   " is not above 0, and multiplies a mask's -inf");
}

kernels::Row make_row(const AttentionIO& io, const Mask& mask, const float* alibi_slopes,
                      std::uint32_t token, std::uint32_t head) {
    kernels::Row row;
    row.q = io.q + token * io.q_token_stride + head * io.q_head_stride;
    row.packed_q = row.q;
    row.begin = io.first_cell;
    row.limit = io.n_cells;
    const std::size_t mask_offset = token * mask.row_stride + head * mask.head_stride;
    switch (mask.kind) {
        case Mask::Kind::none: break;
        case Mask::Kind::causal:
            row.limit = io.n_cells - io.tokens + token + 1;
            if (mask.window != 0 && row.limit > mask.window)
                row.begin = std::max(row.begin, row.limit - mask.window);
            break;
        case Mask::Kind::additive_f16:
            row.mask = static_cast<const std::uint16_t*>(mask.data) + mask_offset;
            break;
        case Mask::Kind::additive_f32:
            row.mask = static_cast<const float*>(mask.data) + mask_offset;
            break;
    }
    if (alibi_slopes != nullptr) row.slope = alibi_slopes[head];
    return row;
}

void set_task(kernels::Task& task, const AttentionIO& io, const Mask& mask,
              const AttentionParams& params) {
    task.mask = mask.kind;
    task.mask_cell = io.first_cell;
    task.causal_alibi = params.alibi_slopes != nullptr && mask.kind == Mask::Kind::causal;
    task.scale = params.scale;
    task.softcap = params.softcap;
    task.f32 = params.decode_rows == 0;
}

void rotate_queries(const AttentionIO& io, const codec::Rotation& rotation, std::size_t first,
                    std::size_t last, float* rotated) {
    const std::uint32_t head_dim = rotation.head_dim();
    for (std::size_t token = first; token < last; ++token) {
        for (std::uint32_t head = 0; head < io.heads; ++head) {
            float* q = rotated + (token * io.heads + head) * head_dim;
            std::copy_n(io.q + token * io.q_token_stride + head * io.q_head_stride, head_dim, q);
            rotation.apply(q);
        }
    }
}

}  // namespace lowkv::attention
