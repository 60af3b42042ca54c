#include "cpu/byte_rows.h"

#include <algorithm>
#include <type_traits>

#include "codec/small_floats.h"
#include "cpu/host_rows.h"
#include "cpu/rows.h"
#include "isa/table.h"

namespace lowkv::cpu {
namespace {

// One part of a block. Byte is std::byte or const std::byte.
template <class Byte>
struct ByteRows {
    template <class T>
    using Its = std::conditional_t<std::is_const_v<Byte>, const T, T>;

    Its<std::uint8_t>* codes;
    Its<std::uint16_t>* scales;  // [group][token], bf16
    Its<std::uint8_t>* zeros;    // [group][token]
    std::size_t tokens, channels, head_dim, groups;
    std::size_t token_stride, channel_stride;  // of codes

    ByteRows(const Plan& plan, Part part, Byte* block) noexcept
        : tokens(plan.block_tokens()),
          channels(plan.shape().channels()),
          head_dim(plan.shape().head_dim),
          groups(plan.byte_groups()),
          token_stride(part == Part::keys ? 1 : channels),
          channel_stride(part == Part::keys ? tokens : 1) {
        Byte* const first = part == Part::keys ? block : block + plan.exact_part_bytes();
        codes = reinterpret_cast<Its<std::uint8_t>*>(first);
        scales = reinterpret_cast<Its<std::uint16_t>*>(first + plan.byte_scales_offset());
        zeros = reinterpret_cast<Its<std::uint8_t>*>(first + plan.byte_zeros_offset());
    }

    std::size_t heads() const noexcept { return channels / head_dim; }
    Its<std::uint8_t>* row(std::size_t head, std::size_t token) const noexcept {
        return codes + head * head_dim * channel_stride + token * token_stride;
    }
    // Calls use(first channel in the head, channels, where a token's scale and zero are).
    template <class Use>
    void each_group(std::size_t head, std::size_t token, Use use) const noexcept {
        const std::size_t in_head = groups / heads();
        for (std::size_t g = 0; g < in_head; ++g) {
            const std::size_t first = g * Plan::byte_group;
            use(first, std::min<std::size_t>(Plan::byte_group, head_dim - first),
                (head * in_head + g) * tokens + token);
        }
    }
};

void store_row(const kernels::Table& table, const ByteRows<std::byte>& its, std::size_t head,
               std::size_t token, const float* row) noexcept {
    std::uint8_t codes[kernels::max_head_dim];
    its.each_group(head, token, [&](std::size_t first, std::size_t count, std::size_t at) {
        const kernels::ByteScale scale = table.to_bytes(row + first, codes + first, count);
        its.scales[at] = codec::f32_to_bf16(scale.scale);
        its.zeros[at] = scale.zero;
    });
    std::uint8_t* const to = its.row(head, token);
    for (std::size_t c = 0; c < its.head_dim; ++c) to[c * its.channel_stride] = codes[c];
}

void load_row(const ByteRows<const std::byte>& its, std::size_t head, std::size_t token,
              float* row) noexcept {
    const std::uint8_t* const from = its.row(head, token);
    its.each_group(head, token, [&](std::size_t first, std::size_t count, std::size_t at) {
        const float scale = codec::bf16_to_f32(its.scales[at]);
        for (std::size_t c = first; c < first + count; ++c)
            row[c] = scale * static_cast<float>(from[c * its.channel_stride] - its.zeros[at]);
    });
}

}  // namespace

std::size_t store_bytes(const Plan& plan, Part part, std::byte* block, std::uint32_t first,
                        std::uint32_t count, const Rows& rows) noexcept {
    const ByteRows<std::byte> its(plan, part, block);
    const std::size_t bytes = cache::bytes_of(rows.type);
    std::size_t changed = 0;
    for (std::size_t t = 0; t < count; ++t) {
        const auto* from = static_cast<const std::byte*>(cache::rows_from(rows, t).data);
        for (std::size_t head = 0; head < its.heads(); ++head) {
            float row[kernels::max_head_dim];
            cache::convert(plan.kernels(), rows.type, from + head * rows.head_stride * bytes,
                           RowType::f32, reinterpret_cast<std::byte*>(row), its.head_dim);
            changed += saturate(RowType::f32, row, its.head_dim);
            store_row(plan.kernels(), its, head, first + t, row);
        }
    }
    return changed;
}

void load_bytes(const Plan& plan, Part part, const std::byte* block, std::uint32_t first,
                std::uint32_t count, const RowsOut& rows) noexcept {
    const Shape& shape = plan.shape();
    const ByteRows<const std::byte> its(plan, shape.latent() ? Part::keys : part, block);
    const std::size_t bytes = cache::bytes_of(plan.rows());
    const std::uint32_t channels = part == Part::keys ? shape.head_dim : shape.out_dim();
    for (std::size_t t = 0; t < count; ++t) {
        for (std::size_t head = 0; head < its.heads(); ++head) {
            float row[kernels::max_head_dim];
            load_row(its, head, first + t, row);
            const std::size_t at = t * rows.token_stride + head * rows.head_stride;
            cache::convert(plan.kernels(), RowType::f32, reinterpret_cast<const std::byte*>(row),
                           plan.rows(), static_cast<std::byte*>(rows.data) + at * bytes, channels);
        }
    }
}

void clear_bytes(const Plan& plan, std::byte* block, std::uint32_t first) noexcept {
    for (const Part part : plan.stored_parts()) {
        const ByteRows<std::byte> its(plan, part, block);
        for (std::size_t group = 0; group < its.groups; ++group) {
            std::fill_n(its.scales + group * its.tokens + first, its.tokens - first, 0);
            std::fill_n(its.zeros + group * its.tokens + first, its.tokens - first, 0);
        }
        for (std::size_t t = first; t < its.tokens; ++t) {
            for (std::size_t c = 0; c < its.channels; ++c)
                its.row(0, t)[c * its.channel_stride] = 0;
        }
    }
}

void copy_bytes(const Plan& plan, std::byte* to, std::uint32_t to_first, const std::byte* from,
                std::uint32_t from_first, std::uint32_t count, bool repeat) noexcept {
    for (const Part part : plan.stored_parts()) {
        const ByteRows<std::byte> its(plan, part, to);
        const ByteRows<const std::byte> other(plan, part, from);
        copy_columns(its.scales + to_first, other.scales + from_first, its.groups, its.tokens,
                     count, repeat);
        copy_columns(its.zeros + to_first, other.zeros + from_first, its.groups, its.tokens, count,
                     repeat);
        if (part == Part::keys)
            copy_columns(its.row(0, to_first), other.row(0, from_first), its.channels, its.tokens,
                         count, repeat);
        else
            copy_tokens(its.row(0, to_first), other.row(0, from_first), its.channels, count,
                        repeat);
    }
}

void bytes_to_f16(const Plan& plan, const std::byte* exact, std::byte* f16) noexcept {
    alignas(64) float line[kernels::max_head_dim];
    const kernels::Table& table = plan.kernels();
    const ByteRows<const std::byte> keys(plan, Part::keys, exact);
    auto* out = reinterpret_cast<std::uint16_t*>(f16);
    for (std::size_t head = 0; head < keys.heads(); ++head) {
        keys.each_group(head, 0, [&](std::size_t first, std::size_t count, std::size_t at) {
            for (std::size_t c = first; c < first + count; ++c, out += keys.tokens) {
                const std::uint8_t* const codes = keys.row(head, 0) + c * keys.channel_stride;
                for (std::size_t t = 0; t < keys.tokens; ++t)
                    line[t] = codec::bf16_to_f32(keys.scales[at + t]) *
                              static_cast<float>(codes[t] - keys.zeros[at + t]);
                table.to_f16(line, out, keys.tokens);
            }
        });
    }
    if (plan.shape().latent()) return;
    const ByteRows<const std::byte> values(plan, Part::values, exact);
    for (std::size_t t = 0; t < values.tokens; ++t) {
        for (std::size_t head = 0; head < values.heads(); ++head, out += values.head_dim) {
            load_row(values, head, t, line);
            table.to_f16(line, out, values.head_dim);
        }
    }
}

void bytes_from_f16(const Plan& plan, const std::byte* f16, std::byte* exact) noexcept {
    const auto* from = reinterpret_cast<const std::uint16_t*>(f16);
    for (const Part part : plan.stored_parts()) {
        const ByteRows<std::byte> its(plan, part, exact);
        for (std::size_t t = 0; t < its.tokens; ++t) {
            for (std::size_t head = 0; head < its.heads(); ++head) {
                float row[kernels::max_head_dim];
                const std::uint16_t* const first =
                    from + head * its.head_dim * its.channel_stride + t * its.token_stride;
                for (std::size_t c = 0; c < its.head_dim; ++c)
                    row[c] = codec::f16_to_f32(first[c * its.channel_stride]);
                store_row(plan.kernels(), its, head, t, row);
            }
        }
        from += its.channels * its.tokens;
    }
}

}  // namespace lowkv::cpu
