#include "served.h"

#include "attention_op.h"
#include "host.h"

namespace lowkv::ggml {
namespace {

// Rows of f32 into whole rows of the tensor.
bool served_set_rows(const ggml_tensor& op) {
    const CacheTensor* target = cache_tensor(&op);
    if (target == nullptr) return false;
    const ggml_tensor& rows = *op.src[0];
    const ggml_tensor& numbers = *op.src[1];
    const auto width =
        static_cast<std::int64_t>(target->layer->row_bytes(target->part) / sizeof(ggml_fp16_t));
    return rows.type == GGML_TYPE_F32 && rows.nb[0] == sizeof(float) &&
           rows.nb[1] % sizeof(float) == 0 && rows.ne[0] == width && op.ne[0] == width &&
           rows.ne[2] == 1 && rows.ne[3] == 1 && op.view_offs == 0 &&
           (numbers.type == GGML_TYPE_I64 || numbers.type == GGML_TYPE_I32);
}

bool served_attention(const ggml_tensor& op) {
    const AttentionOp attention(op);
    const CacheTensor* keys = cache_tensor(attention.k);
    const CacheTensor* values = cache_tensor(attention.v);
    const Shape shape = attention.shape();
    return keys != nullptr && values != nullptr && keys->layer == values->layer &&
           (keys->part == values->part) == shape.latent() &&
           attention.unsupported_heads().empty() && attention.served_layout() &&
           keys->layer->shape() == shape;
}

// A context shift: in place, on a view [n_rot, kv_heads, cells * streams] of a layer's keys, with
// one shift per cell.
bool served_rope(const ggml_tensor& op) {
    const CacheTensor* target = cache_tensor(&op);
    if (target == nullptr || target->part != Part::keys || cache_tensor(op.src[0]) != target)
        return false;
    const ggml_tensor& keys = *op.src[0];
    const ggml_tensor& shifts = *op.src[1];
    const std::size_t row = target->layer->row_bytes(Part::keys);
    const std::int64_t rows = std::int64_t{target->layer->cells()} * target->layer->streams();
    return keys.ne[2] == rows && keys.ne[3] == 1 && keys.nb[2] == row && keys.view_offs < row &&
           op.ne[2] == rows && op.nb[2] == row && op.view_offs == keys.view_offs &&
           shifts.type == GGML_TYPE_I32 && shifts.ne[0] == rows;
}

}  // namespace

bool is_view(const ggml_tensor& op) noexcept {
    return is_any(
        op, {op_name::none, op_name::view, op_name::reshape, op_name::permute, op_name::transpose});
}

bool served(const ggml_tensor& op) {
    const std::string_view name = operation(op);
    if (name == op_name::set_rows) return served_set_rows(op);
    if (name == op_name::flash_attn_ext) return served_attention(op);
    if (name == op_name::rope) return served_rope(op);
    return is_view(op);
}

}  // namespace lowkv::ggml
