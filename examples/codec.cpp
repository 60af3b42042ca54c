// A quantizer from outside the library: E5M2, the upper half of each f16, rounded. Stores,
// sequences, forks and attention take it as they take the library's quantizers.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "lowkv/attention.h"
#include "lowkv/batch.h"
#include "lowkv/quantizer.h"

namespace {

std::uint8_t rounded(std::uint16_t half) {
    const unsigned magnitude = half & 0x7fffu;
    if (magnitude > 0x7c00) return 0;  // NaN
    const unsigned upper = std::min((magnitude + 0x7f + (magnitude >> 8 & 1)) >> 8, 0x7bu);
    return static_cast<std::uint8_t>((half >> 8 & 0x80) | upper);
}

float value_of(std::uint8_t byte) {
    const int exponent = byte >> 2 & 31, mantissa = byte & 3;
    const int significand = exponent == 0 ? mantissa : mantissa + 4;
    const float magnitude = std::ldexp(static_cast<float>(significand), std::max(exponent, 1) - 17);
    return byte >> 7 != 0 ? -magnitude : magnitude;
}

// The plain kernel: 32 tokens from first_token on, tile[step][lane]. Attention does the rest.
void expand(const lowkv::PackedHead& x, unsigned first_token, float* tile) noexcept {
    const bool keys = x.part->shape().part == lowkv::Part::keys;
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(x.section);
    const unsigned lanes = keys ? lowkv::tile_tokens : x.lane_count;
    const unsigned steps = keys ? x.step_count : lowkv::tile_tokens;
    bytes += first_token * (keys ? 1 : x.lane_count);
    for (unsigned step = 0; step < steps; ++step) {
        for (unsigned lane = 0; lane < lanes; ++lane) {
            tile[step * lanes + lane] = value_of(bytes[step * x.lane_count + lane]);
        }
    }
}

// A head's section: its bytes, steps of lanes.
class E5M2Part final : public lowkv::PackedPart {
  public:
    explicit E5M2Part(const lowkv::PartShape& of) : PackedPart(of) {
        set_bytes(std::size_t{of.lanes()} * of.steps());
        set_kernels({.name = "e5m2", .expand = expand});
    }
    void encode_head(const std::uint16_t* exact, std::uint32_t head, std::byte* packed,
                     const lowkv::EncodeHints&) const noexcept override {
        each(head, [&](std::size_t from, std::size_t to) {
            packed[to] = static_cast<std::byte>(rounded(exact[from]));
        });
    }
    void decode_head(const std::byte* packed, std::uint32_t head,
                     std::uint16_t* exact) const noexcept override {
        each(head, [&](std::size_t to, std::size_t from) {
            exact[to] = static_cast<std::uint16_t>(static_cast<unsigned>(packed[from]) << 8);
        });
    }

  private:
    // f(place in the exact part, place in the packed part) for all of a head.
    template <class F>
    void each(std::uint32_t head, F f) const {
        const lowkv::PartShape& of = shape();
        for (std::size_t step = 0; step < of.steps(); ++step) {
            for (std::size_t lane = 0; lane < of.lanes(); ++lane) {
                f(of.exact_offset(head) + step * of.exact_stride() + lane,
                  section_offset(head) + step * of.lanes() + lane);
            }
        }
    }
};

class E5M2 final : public lowkv::Quantizer {
    std::string_view name() const noexcept override { return "e5m2"; }
    std::uint32_t block_tokens(const lowkv::Codec&) const noexcept override { return 32; }
    std::shared_ptr<const lowkv::PackedPart> compile(const lowkv::Codec&,
                                                     const lowkv::PartShape& shape,
                                                     const lowkv::PartInputs&) const override {
        return std::make_shared<E5M2Part>(shape);
    }
};

}  // namespace

int main() {
    static const E5M2 quantizer;
    const lowkv::Codec codec{.quantizer = &quantizer};
    const lowkv::LayerScheme scheme{.key = codec, .value = codec};
    const auto plan = std::make_shared<lowkv::Plan>(scheme, lowkv::Shape{1, 64});
    lowkv::Sequence sequence(std::make_shared<lowkv::Store>(), plan, {.window = 32, .sinks = 0});

    const std::uint32_t cells = 320;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> keys(cells * 64), values(keys.size()), q(40 * 64), out(q.size()), row(64);
    for (float& x : keys) x = normal(random);
    for (float& x : values) x = normal(random);
    for (float& x : q) x = normal(random);
    sequence.append(keys.data(), values.data(), cells);
    sequence.pack();
    // Its laws: a byte a number, none off by more than an eighth, and attention is that over what
    // is read, for one query (decoding) as for 40 (a prompt).
    bool holds = sequence.packed(0) && plan->bits_per_element() == 8;
    for (std::uint32_t cell = 0; cell < cells; ++cell) {
        const auto check = [&](std::vector<float>& written) {
            for (std::size_t c = 0; c < 64; ++c) {
                float& x = written[cell * 64 + c];
                holds &= std::fabs(row[c] - x) <= std::fabs(x) / 8 + 0x1p-16f;
                x = row[c];
            }
        };
        sequence.read_key(cell, row.data());
        check(keys);
        sequence.read_value(cell, row.data());
        check(values);
    }
    double worst = 0;
    lowkv::AttentionWorkspace workspace;
    lowkv::AttentionParams params;
    params.scale = 0.125f;
    lowkv::AttentionIO io{.q = q.data(), .q_token_stride = 64, .out = out.data()};
    io.out_token_stride = 64;
    io.heads = 1;
    io.n_cells = cells;
    for (io.tokens = 1; io.tokens <= 40; io.tokens += 39) {
        lowkv::attend(sequence, io, params, workspace);
        for (std::size_t t = 0; t < io.tokens; ++t) {
            double sum = 0, plain[64] = {};
            for (std::size_t cell = 0; cell < cells; ++cell) {
                double score = 0;
                for (std::size_t c = 0; c < 64; ++c) score += q[t * 64 + c] * keys[cell * 64 + c];
                const double weight = std::exp(0.125 * score);
                sum += weight;
                for (std::size_t c = 0; c < 64; ++c) plain[c] += weight * values[cell * 64 + c];
            }
            for (std::size_t c = 0; c < 64; ++c) {
                worst = std::max(worst, std::fabs(plain[c] / sum - out[t * 64 + c]));
            }
        }
    }
    std::printf("e5m2: 8 bits a number, attention off by %.1e at most\n", worst);
    // Prompts may be multiplied as bf16, whose numbers have 8 bits (AMX).
    return holds && worst < 2e-3 ? 0 : 1;
}
