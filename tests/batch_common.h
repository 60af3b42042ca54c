#pragma once
// What the tests of batches share: rows that every type holds exactly, and how they are laid out.

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"

namespace batch_test {

using Rng = std::mt19937;
using Row = std::vector<float>;

inline std::uint16_t bf16_bits(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t half = bits & 0xffffu, odd = (bits >> 16) & 1u;
    const bool up = half > 0x8000u || (half == 0x8000u && odd == 1);
    return static_cast<std::uint16_t>((bits >> 16) + (up ? 1 : 0));
}

inline float bf16_value(std::uint16_t bits) {
    return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

// Of multiples of 1/16 below 8: normal in f16.
inline std::uint16_t f16_bits(float x) {
    if (x == 0) return 0;
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t exponent = ((bits >> 23) & 0xffu) - 112;
    return static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | exponent << 10 |
                                      (bits >> 13 & 0x3ffu));
}

inline float f16_value(std::uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float magnitude = exponent == 0
                                ? std::ldexp(static_cast<float>(mantissa), -24)
                                : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// Multiples of 1/16 in [-8, 8): the same number in f32, f16 and bf16.
inline Row random_row(Rng& rng, std::size_t channels) {
    Row row(channels);
    for (std::size_t c = 0; c < channels; ++c)
        row[c] = static_cast<float>(static_cast<int>(rng() % 256) - 128) / 16.0f;
    return row;
}

// [sequence][head][token][channel] with room between, as a host's buffers have.
class Buffer {
  public:
    Buffer(lowkv::RowType type, lowkv::Shape shape, std::size_t sequences, std::size_t tokens)
        : type_(type), shape_(shape) {
        strides_.token = shape.head_dim;
        strides_.head = (tokens + 3) * strides_.token;
        strides_.sequence = shape.kv_heads * strides_.head + 16;
        bytes_.resize(sequences * strides_.sequence * lowkv::element_bytes(type), std::byte{0x5a});
    }

    lowkv::BatchRows rows() const { return {bytes_.data(), type_, strides_}; }
    lowkv::BatchRowsOut out() { return {bytes_.data(), strides_}; }
    const lowkv::BatchStrides& strides() const { return strides_; }

    void set(std::size_t sequence, std::size_t token, const Row& row) {
        each(sequence, token, [&](std::size_t channel, std::byte* at) {
            const float x = row[channel];
            const std::uint16_t half = type_ == lowkv::RowType::f16 ? f16_bits(x) : bf16_bits(x);
            if (type_ == lowkv::RowType::f32)
                std::memcpy(at, &x, sizeof x);
            else
                std::memcpy(at, &half, sizeof half);
        });
    }
    Row get(std::size_t sequence, std::size_t token) {
        Row row(shape_.channels());
        each(sequence, token, [&](std::size_t channel, const std::byte* at) {
            std::uint16_t half = 0;
            if (type_ == lowkv::RowType::f32)
                std::memcpy(&row[channel], at, sizeof(float));
            else
                std::memcpy(&half, at, sizeof half);
            if (type_ == lowkv::RowType::f16) row[channel] = f16_value(half);
            if (type_ == lowkv::RowType::bf16) row[channel] = bf16_value(half);
        });
        return row;
    }

  private:
    lowkv::RowType type_;
    lowkv::Shape shape_;
    lowkv::BatchStrides strides_;
    std::vector<std::byte> bytes_;

    template <class F>
    void each(std::size_t sequence, std::size_t token, F f) {
        for (std::size_t c = 0; c < shape_.channels(); ++c) {
            const std::size_t at = sequence * strides_.sequence +
                                   c / shape_.head_dim * strides_.head + token * strides_.token +
                                   c % shape_.head_dim;
            f(c, bytes_.data() + at * lowkv::element_bytes(type_));
        }
    }
};

inline std::shared_ptr<const lowkv::Plan> make_plan(const std::string& scheme, lowkv::Shape shape,
                                                    lowkv::RowType rows) {
    const lowkv::Scheme parsed = lowkv::parse_scheme(scheme);
    return std::make_shared<const lowkv::Plan>(parsed.layer(0), shape, std::string_view{}, 0,
                                               lowkv::LayerInputs{.rows = rows});
}

// Appends random rows to every sequence and returns them, [sequence][token], keys then values.
struct Appended {
    std::vector<std::vector<Row>> keys, values;
};
inline Appended random_rows(Rng& rng, std::size_t sequences, std::size_t tokens,
                            std::size_t channels) {
    Appended rows;
    for (auto* part : {&rows.keys, &rows.values}) {
        part->resize(sequences);
        for (auto& sequence : *part) {
            for (std::size_t t = 0; t < tokens; ++t) sequence.push_back(random_row(rng, channels));
        }
    }
    return rows;
}
inline void append(lowkv::Batch& batch, const Appended& rows, lowkv::RowType type) {
    const auto tokens = static_cast<std::uint32_t>(rows.keys.front().size());
    Buffer keys(type, batch.plan().shape(), batch.size(), tokens), values = keys;
    for (std::size_t s = 0; s < batch.size(); ++s) {
        for (std::size_t t = 0; t < tokens; ++t) {
            keys.set(s, t, rows.keys[s][t]);
            values.set(s, t, rows.values[s][t]);
        }
    }
    batch.append(keys.rows(), values.rows(), tokens);
}

inline constexpr lowkv::RowType types[] = {lowkv::RowType::f32, lowkv::RowType::f16,
                                           lowkv::RowType::bf16};
inline constexpr lowkv::Shape shape{2, 32};

struct Held {
    std::shared_ptr<const lowkv::Plan> plan;
    std::shared_ptr<lowkv::Store> store = std::make_shared<lowkv::Store>();
    lowkv::Retention retention;
    lowkv::Batch batch;

    Held(const std::string& scheme, lowkv::RowType rows, std::uint32_t sequences)
        : plan(make_plan(scheme, shape, rows)),
          retention(lowkv::parse_scheme(scheme).retention),
          batch(store, plan, retention, sequences) {}
};

inline std::vector<Row> all_rows(const lowkv::Batch& batch) {
    const std::uint32_t count = batch.tokens() - batch.first();
    Buffer keys(batch.plan().rows(), batch.plan().shape(), batch.size(), count), values = keys;
    batch.read(batch.first(), count, keys.out(), values.out());
    std::vector<Row> rows;
    for (std::uint32_t s = 0; s < batch.size(); ++s) {
        for (std::uint32_t t = 0; t < count; ++t) {
            rows.push_back(keys.get(s, t));
            rows.push_back(values.get(s, t));
        }
    }
    return rows;
}

inline void fill(lowkv::Batch& batch, unsigned seed, std::uint32_t tokens) {
    Rng rng(seed);
    append(batch, random_rows(rng, batch.size(), tokens, batch.plan().shape().channels()),
           batch.plan().rows());
}

inline bool refused(lowkv::ErrorCode code, const std::string& word, const auto& f) {
    try {
        f();
    } catch (const lowkv::Error& error) {
        INFO(error.what());
        CHECK(error.code() == code);
        CHECK(std::string(error.what()).find(word) != std::string::npos);
        return true;
    }
    return false;
}

}  // namespace batch_test
