// What stock CPU kernels do to cache tensors: everything on plain layers, and the turning of keys
// that a context shift wants, on f16 copies of packed ones.

#include <algorithm>

#include "backend.h"
#include "rope_params.h"

namespace lowkv::ggml {

ggml_status Backend::compute_on_plain(const ggml_tensor& node) {
    InnerCpu::Shadow shadow(node);
    const auto redirect = [&](const ggml_tensor& original, ggml_tensor& tensor) {
        if (CacheTensor* t = cache_tensor(&original); t != nullptr)
            tensor.data = t->layer->plain_memory(t->part) + original.view_offs;
    };
    redirect(node, shadow.node);
    for (int i = 0; i < GGML_MAX_SRC; ++i)
        if (node.src[i] != nullptr) redirect(*node.src[i], shadow.sources[i]);
    return cpu_.compute(&shadow.node);
}

ggml_status Backend::shift_keys(const ggml_tensor& node, CacheTensor& target) {
    const auto* moved = static_cast<const std::int32_t*>(node.src[1]->data);
    for (std::uint32_t s = 0; s < target.layer->streams(); ++s, moved += target.layer->cells()) {
        const ggml_status status = shift_stream(node, target, s, moved);
        if (status != GGML_STATUS_SUCCESS) return status;
    }
    return GGML_STATUS_SUCCESS;
}

// Packed units that move as one stay packed. The other rows in the order in which they lie, few
// blocks at a time: a packed block is decoded and packed again once, wherever its cells are.
ggml_status Backend::shift_stream(const ggml_tensor& node, CacheTensor& target,
                                  std::uint32_t stream, const std::int32_t* moved) {
    LayerCache& layer = *target.layer;
    layer.follow(stream, *executor_);
    layer.move_units(stream, shift_of(node, layer.shape()), moved, cells_);
    const std::vector<LayerCache::Place> rows = layer.by_place(Part::keys, stream, cells_);

    constexpr std::size_t batch = 1024;
    const std::size_t bytes = layer.row_bytes(Part::keys);
    const std::uint32_t tokens = layer.plan().block_tokens();
    const auto same_block = [&](const LayerCache::Place& a, const LayerCache::Place& b) {
        return a.packed == b.packed && a.row / tokens == b.row / tokens;
    };
    std::vector<std::byte> image;
    std::vector<std::int32_t> shifts;
    for (std::size_t first = 0, last = 0; first < rows.size(); first = last) {
        last = std::min(first + batch, rows.size());
        while (last < rows.size() && same_block(rows[last - 1], rows[last])) ++last;
        const std::size_t count = last - first;
        image.resize(count * bytes);
        shifts.resize(count);
        const std::size_t start = std::size_t{stream} * layer.cells();
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t cell = rows[first + i].cell;
            layer.read(Part::keys, (start + cell) * bytes, bytes, image.data() + i * bytes);
            shifts[i] = moved[cell];
        }
        InnerCpu::Shadow shadow(node);
        shadow.node.data = shadow.sources[0].data = image.data() + node.view_offs;
        shadow.node.ne[2] = shadow.sources[0].ne[2] = static_cast<std::int64_t>(count);
        shadow.sources[1].data = shifts.data();
        shadow.sources[1].ne[0] = static_cast<std::int64_t>(count);
        const ggml_status status = cpu_.compute(&shadow.node);
        if (status != GGML_STATUS_SUCCESS) return status;
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t cell = rows[first + i].cell;
            layer.write_key(stream, cell, image.data() + i * bytes,
                            layer.position(stream, cell) + shifts[i]);
        }
        layer.repack(stream, *executor_);
    }
    return GGML_STATUS_SUCCESS;
}

}  // namespace lowkv::ggml
