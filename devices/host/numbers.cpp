#include "numbers.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "lowkv/error.h"

namespace lowkv::devices {

bool reached(const Queue& queue, const SequenceAttention& sequence, const AttentionParams& params) {
    const AttentionIO& io = sequence.io;
    const Whose there = queue.whose(io.q);
    const bool additive = sequence.mask.kind == Mask::Kind::additive_f16 ||
                          sequence.mask.kind == Mask::Kind::additive_f32;
    const void* const others[] = {io.out, io.lse, params.alibi_slopes, params.sink_logits,
                                  additive ? sequence.mask.data : nullptr};
    for (const void* other : others) {
        if (there == Whose::others || (other != nullptr && queue.whose(other) != there))
            throw Error(ErrorCode::invalid_argument,
                        "attend: queries, results, masks and numbers of the heads must all be in "
                        "the host's memory, or all in that of the ",
                        queue.title());
    }
    return there == Whose::own;
}

std::uint32_t Numbers::reserve(std::size_t count) {
    const auto at = static_cast<std::uint32_t>(size());
    if (fetched_)
        reserved_ += count;
    else
        floats_.resize(at + count);
    return at;
}

std::uint32_t Numbers::add(const Numbers3& numbers) {
    const auto [xs, ys, zs] = numbers.count;
    const std::uint32_t at = reserve(xs * ys * zs);
    if (fetched_) {
        const auto number = [](std::size_t value) { return static_cast<std::uint32_t>(value); };
        fetches_.push_back({wide(numbers.from), wide(std::uint64_t{numbers.x_stride}),
                            wide(std::uint64_t{numbers.y_stride}),
                            static_cast<std::uint32_t>(numbers.type), number(ys), number(zs),
                            number(xs * ys * zs), at});
        return at;
    }
    float* to = floats_.data() + at;
    for (std::size_t x = 0; x < xs; ++x) {
        for (std::size_t y = 0; y < ys; ++y, to += zs) {
            const std::size_t first = x * numbers.x_stride + y * numbers.y_stride;
            if (numbers.type == RowType::f32) {
                std::copy_n(static_cast<const float*>(numbers.from) + first, zs, to);
            } else {
                const auto* row = static_cast<const std::uint16_t*>(numbers.from) + first;
                std::transform(row, row + zs, to, lowkv_f16_to_f32);
            }
        }
    }
    return at;
}

// A mask's: most of a long history is seen by all queries of a step. Some hundred bytes at a time.
std::size_t skip_zeros(Numbers3& numbers) noexcept {
    constexpr std::array<std::byte, 256> zeros{};
    const std::size_t bytes = element_bytes(numbers.type);
    std::size_t all = numbers.count[2] * bytes / zeros.size() * zeros.size();
    for (std::size_t row = 0; row < numbers.count[0] * numbers.count[1] && all > 0; ++row) {
        const std::size_t first =
            row / numbers.count[1] * numbers.x_stride + row % numbers.count[1] * numbers.y_stride;
        const auto* from = static_cast<const std::byte*>(numbers.from) + first * bytes;
        std::size_t skipped = 0;
        while (skipped < all && std::memcmp(from + skipped, zeros.data(), zeros.size()) == 0)
            skipped += zeros.size();
        all = skipped;
    }
    numbers.from = static_cast<const std::byte*>(numbers.from) + all;
    numbers.count[2] -= all / bytes;
    return all / bytes;
}

const float* give_results(const AttentionIO& io, std::uint32_t first, std::uint32_t tokens,
                          std::uint32_t head_dim, const float* from) {
    for (std::uint32_t t = first; t < first + tokens; ++t) {
        for (std::uint32_t h = 0; h < io.heads; ++h) {
            std::copy_n(from, head_dim, io.out + t * io.out_token_stride + h * io.out_head_stride);
            if (io.lse != nullptr) io.lse[std::size_t{t} * io.heads + h] = from[head_dim];
            from += head_dim + 1;
        }
    }
    return from;
}

Handle Numbers::upload(State& state, Handle words, std::uint32_t fetches) const {
    if (!fetched_) return state.numbers.holding(state.queue, floats_);
    const Handle buffer = state.numbers.of(state.queue, reserved_ * sizeof(float));
    std::uint32_t most = 0;
    for (const lowkv_fetch& fetch : fetches_) most = std::max(most, fetch.count);
    state.queue.launch(Kernel::fetch, grid_of(most, fetches_.size()), words, fetches, buffer);
    return buffer;
}

}  // namespace lowkv::devices
