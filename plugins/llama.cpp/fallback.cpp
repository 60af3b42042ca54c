// Operations on cache tensors that are not done on packed blocks: stock CPU kernels on f16 copies.

#include <algorithm>
#include <cstring>

#include "backend.h"
#include "lowkv/error.h"
#include "report.h"

namespace lowkv::ggml {
namespace {

bool writes(const ggml_tensor& node) { return cache_tensor(&node) != nullptr; }

std::size_t view_offset(const ggml_tensor& tensor) {
    return tensor.view_src != nullptr ? tensor.view_offs : 0;
}

// An f16 image of one packed tensor, nominal layout.
struct Copy {
    CacheTensor* tensor;
    Mapping image;
};

std::byte* image_of(CacheTensor& t, std::vector<Copy>& copies) {
    if (t.layer->mode() == LayerCache::Mode::plain) return t.layer->plain_memory(t.part);
    for (const Copy& copy : copies)
        if (copy.tensor == &t) return copy.image.data();
    const std::size_t bytes = t.layer->nominal_bytes(t.part);
    copies.push_back({&t, Mapping(bytes)});
    t.layer->read(t.part, 0, bytes, copies.back().image.data());
    return copies.back().image.data();
}

// Writes the rows of `image` that differ from what the layer holds.
void write_back(CacheTensor& t, const Mapping& image) {
    const std::size_t row = t.layer->row_bytes(t.part);
    constexpr std::size_t batch = 256;
    std::vector<std::byte> before(row * batch);
    for (std::size_t at = 0; at < image.bytes(); at += row * batch) {
        const std::size_t bytes = std::min(row * batch, image.bytes() - at);
        t.layer->read(t.part, at, bytes, before.data());
        for (std::size_t r = 0; r < bytes; r += row)
            if (std::memcmp(before.data() + r, image.data() + at + r, row) != 0)
                t.layer->write(t.part, at + r, row, image.data() + at + r);
    }
}

}  // namespace

ggml_status Backend::compute_on_copies(const ggml_tensor& node) {
    InnerCpu::Shadow shadow{};
    InnerCpu::shadow(node, shadow);
    std::vector<Copy> copies;
    const auto redirect = [&](const ggml_tensor& original, ggml_tensor& tensor) {
        if (CacheTensor* t = cache_tensor(&original); t != nullptr)
            tensor.data = image_of(*t, copies) + view_offset(original);
    };
    redirect(node, shadow.node);
    for (int i = 0; i < GGML_MAX_SRC; ++i)
        if (node.src[i] != nullptr) redirect(*node.src[i], shadow.sources[i]);

    const ggml_status status = cpu_.compute(&shadow.node);
    if (status == GGML_STATUS_SUCCESS && writes(node)) {
        CacheTensor* target = cache_tensor(&node);
        for (const Copy& copy : copies)
            if (copy.tensor == target) write_back(*target, copy.image);
        for (std::uint32_t s = 0; s < target->layer->streams(); ++s)
            target->layer->repack(s, *executor_);
    }
    return status;
}

// K-shift: an in-place ROPE on a view [n_rot, kv_heads, cells * streams] of a layer's keys, with
// one shift per cell. Done on runs of cells, so that only those that move are decoded, and the
// blocks that were packed are packed again at once.
bool Backend::shift_keys(const ggml_tensor& node, CacheTensor& target, ggml_status& status) {
    LayerCache& layer = *target.layer;
    const ggml_tensor& keys = *node.src[0];
    const ggml_tensor& shifts = *node.src[1];
    const std::size_t row = layer.row_bytes(Part::keys);
    const std::int64_t rows = std::int64_t{layer.cells()} * layer.streams();
    if (target.part != Part::keys || cache_tensor(&keys) != &target || keys.ne[2] != rows ||
        keys.ne[3] != 1 || keys.nb[2] != row || view_offset(keys) >= row || node.ne[2] != rows ||
        node.nb[2] != row || view_offset(node) != view_offset(keys) ||
        shifts.type != GGML_TYPE_I32 || shifts.ne[0] != rows)
        return false;

    const auto* moved = static_cast<const std::int32_t*>(shifts.data);
    const std::uint32_t tokens = layer.plan().block_tokens();
    constexpr std::uint32_t run_blocks = 8;
    const std::uint32_t run = tokens * run_blocks;
    std::vector<std::byte> image(row * run);
    for (std::uint32_t s = 0; s < layer.streams(); ++s) {
        layer.follow(s, *executor_);
        for (std::uint32_t first = 0; first < layer.cells(); first += run) {
            const std::uint32_t count = std::min(run, layer.cells() - first);
            const std::size_t start = std::size_t{s} * layer.cells() + first;
            const auto moves = [](std::int32_t shift) { return shift != 0; };
            if (std::none_of(moved + start, moved + start + count, moves)) continue;

            layer.read(Part::keys, start * row, count * row, image.data());
            InnerCpu::Shadow shadow{};
            InnerCpu::shadow(node, shadow);
            shadow.node.data = shadow.sources[0].data = image.data() + view_offset(keys);
            shadow.node.ne[2] = shadow.sources[0].ne[2] = count;
            shadow.sources[1].data = const_cast<std::int32_t*>(moved + start);
            shadow.sources[1].ne[0] = count;
            status = cpu_.compute(&shadow.node);
            if (status != GGML_STATUS_SUCCESS) return true;
            for (std::uint32_t i = 0; i < count; ++i) {
                if (moved[start + i] == 0) continue;
                layer.write_key(s, first + i, image.data() + i * row,
                                layer.position(s, first + i) + moved[start + i]);
            }
            layer.repack(s, *executor_);
        }
    }
    return true;
}

}  // namespace lowkv::ggml
