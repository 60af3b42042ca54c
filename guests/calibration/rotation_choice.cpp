#include "lowkv/calibrate.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include "calibration/attention_output.h"
#include "codec/small_floats.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "round.h"

namespace lowkv::calibration {
namespace {

bool is_legal(const LayerScheme& scheme) {
    try {
        validate(Scheme{.base = scheme, .retention = {}, .overrides = {}});
        return true;
    } catch (const Error&) {
        return false;
    }
}

// The first position of a block without sinks.
std::uint32_t first_packed(std::uint32_t block, const Retention& retention) noexcept {
    return round_up(retention.sinks, block);
}

// What attention reads of a part, [rows][channels]: blocks as they come back from their codec.
std::vector<float> read_back(const LayerSamples& samples, const Plan& plan, bool keys,
                             const Retention& retention) {
    const std::vector<std::uint16_t>& rows = keys ? samples.keys : samples.values;
    const std::size_t channels = samples.shape.channels(), tokens = plan.block_tokens();
    std::vector<float> out(rows.size());
    std::ranges::transform(rows, out.begin(), codec::f16_to_f32);
    std::vector<std::uint16_t> exact(plan.exact_bytes() / sizeof(std::uint16_t));
    std::vector<std::byte> packed(plan.packed_bytes());
    const std::span<std::uint16_t> part =
        std::span(exact).subspan(keys ? 0 : plan.exact_part_bytes() / sizeof(std::uint16_t));
    // Keys lie by channel, values by token.
    const std::size_t token_stride = keys ? 1 : channels, channel_stride = keys ? tokens : 1;
    for (std::size_t window = 0; window < samples.rows(); window += samples.context) {
        for (std::size_t t = first_packed(plan.block_tokens(), retention);
             t + tokens <= samples.context; t += tokens) {
            const std::size_t first = (window + t) * channels;
            for (std::size_t i = 0; i < tokens * channels; ++i) {
                part[i / channels * token_stride + i % channels * channel_stride] = rows[first + i];
            }
            encode_block(plan, std::as_bytes(std::span(exact)).data(), packed.data(), 0,
                         plan.shape().kv_heads);
            decode_block(plan, packed.data(), std::as_writable_bytes(std::span(exact)).data());
            for (std::size_t i = 0; i < tokens * channels; ++i) {
                out[first + i] = codec::f16_to_f32(
                    part[i / channels * token_stride + i % channels * channel_stride]);
            }
        }
    }
    return out;
}

// Squared errors of the first and the second half of the queries.
struct Halves {
    double first, second;
    double sum() const { return first + second; }
};

Halves halves(const std::vector<double>& errors) {
    const auto middle = errors.begin() + static_cast<std::ptrdiff_t>(errors.size() / 2);
    return {std::accumulate(errors.begin(), middle, 0.0),
            std::accumulate(middle, errors.end(), 0.0)};
}

bool gains(const Halves& other, const Halves& own) {
    constexpr double most = (1 - noticeable_gain) * (1 - noticeable_gain);
    return other.first < most * own.first && other.second < most * own.second;
}

}  // namespace

RotationChoice choose_rotations(const LayerSamples& samples, const LayerScheme& scheme,
                                const Retention& retention, std::uint32_t layer) {
    const AttentionOutput output(samples, retention);
    RotationChoice choice{.scheme = scheme, .key = {}, .value = {}};
    const auto choose = [&](Codec LayerScheme::* part) {
        const bool keys = part == &LayerScheme::key;
        const auto tried = [&](Rotate rotation) -> std::optional<Halves> {
            // The other part is exact, but the blocks are as long as the scheme's.
            LayerScheme other = scheme;
            (other.*part).rotation = rotation;
            if (!is_legal(other)) return std::nullopt;
            const Plan plan(other, samples.shape, {}, layer);
            const std::vector<float> read = read_back(samples, plan, keys, retention);
            return halves(keys ? output.query_errors(read, {}) : output.query_errors({}, read));
        };
        const Halves own = *tried((scheme.*part).rotation);
        double least = own.sum();
        RotationErrors errors;
        for (std::size_t i = 0; i < all_rotations.size(); ++i) {
            const bool is_own = all_rotations[i] == (scheme.*part).rotation;
            const std::optional<Halves> found = is_own ? own : tried(all_rotations[i]);
            if (!found) continue;
            errors[i] = found->sum();
            if (*errors[i] >= least || !gains(*found, own)) continue;
            least = *errors[i];
            (choice.scheme.*part).rotation = all_rotations[i];
        }
        return errors;
    };
    if (scheme.key.rotation != Rotate::none) choice.key = choose(&LayerScheme::key);
    if (scheme.value.rotation != Rotate::none) choice.value = choose(&LayerScheme::value);
    return choice;
}

std::uint32_t first_packed_query(const LayerScheme& scheme, const Retention& retention) noexcept {
    const std::uint32_t block = block_tokens(scheme);
    return first_packed(block, retention) + block + std::max(retention.window, 1u) - 1;
}

}  // namespace lowkv::calibration
