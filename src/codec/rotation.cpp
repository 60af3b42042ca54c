#include "lowkv/rotation.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <span>

#include "codec/hadamard16.h"
#include "lowkv/error.h"

namespace lowkv::codec {
namespace {

constexpr std::uint32_t max_head_dim = 576;
constexpr std::uint32_t tile = 16;  // divides every head_dim

// G. Steele, D. Lea, S. Flood, "Fast splittable pseudorandom number generators", 2014.
class SplitMix64 {
  public:
    explicit SplitMix64(std::uint64_t seed) : state_(seed) {}

    std::uint64_t next() {
        state_ += 0x9e3779b97f4a7c15u;
        std::uint64_t z = state_;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }

  private:
    std::uint64_t state_;
};

// f(first channel, size) for each power-of-two block, the largest first.
template <class F>
void for_each_block(std::uint32_t head_dim, F f) {
    for (std::uint32_t first = 0; first < head_dim;) {
        const std::uint32_t size = std::bit_floor(head_dim - first);
        f(first, size);
        first += size;
    }
}

// `stride` and twice `stride` in one pass over the 4 * stride numbers at x.
inline void transform_two_strides(float* x, std::uint32_t stride) noexcept {
    for (float* end = x + stride; x < end; x += 4) {
        Four a = load_four(x), b = load_four(x + stride), c = load_four(x + 2 * stride),
             d = load_four(x + 3 * stride);
        transform_4(a, b, c, d);
        store_four(x, a);
        store_four(x + stride, b);
        store_four(x + 2 * stride, c);
        store_four(x + 3 * stride, d);
    }
}

inline void transform_stride(float* x, std::uint32_t stride) noexcept {
    for (float* end = x + stride; x < end; x += 4) {
        const Four low = load_four(x), high = load_four(x + stride);
        store_four(x, low + high);
        store_four(x + stride, low - high);
    }
}

// x <- x H, H being Sylvester's matrix of size x size; size is a power of two, 16 to 512. It is the
// product of one butterfly per stride, in any order.
void walsh_hadamard(float* x, std::uint32_t size) noexcept {
    for (std::uint32_t i = 0; i < size; i += tile) hadamard_16(x + i);
    std::uint32_t stride = tile;
    for (; 4 * stride <= size; stride *= 4) {
        for (std::uint32_t i = 0; i < size; i += 4 * stride) transform_two_strides(x + i, stride);
    }
    if (stride < size) transform_stride(x, stride);
}

void multiply_elements(float* x, const float* factors, std::uint32_t count) noexcept {
    for (std::uint32_t i = 0; i < count; i += 4)
        store_four(x + i, load_four(x + i) * load_four(factors + i));
}

// x <- x M, M in row order.
void multiply_matrix(float* x, const float* matrix, std::uint32_t head_dim) noexcept {
    float product[max_head_dim];
    for (std::uint32_t column = 0; column < head_dim; column += tile) {
        Four a{}, b{}, c{}, d{};
        for (std::uint32_t row = 0; row < head_dim; ++row) {
            const float* part = matrix + std::size_t{row} * head_dim + column;
            a += x[row] * load_four(part);
            b += x[row] * load_four(part + 4);
            c += x[row] * load_four(part + 8);
            d += x[row] * load_four(part + 12);
        }
        store_16(product + column, a, b, c, d);
    }
    std::copy_n(product, head_dim, x);
}

double dot(const double* a, const double* b, std::uint32_t count) {
    double sum = 0;
    for (std::uint32_t i = 0; i < count; ++i) sum += a[i] * b[i];
    return sum;
}

// The transpose of a matrix of standard normal draws: draws in row order, columns contiguous.
std::vector<double> normal_columns(std::uint32_t head_dim, std::uint64_t seed) {
    std::vector<double> columns(std::size_t{head_dim} * head_dim);
    SplitMix64 generator(seed);
    for (std::uint32_t row = 0; row < head_dim; ++row) {
        for (std::uint32_t column = 0; column < head_dim; column += 2) {
            const double u = static_cast<double>((generator.next() >> 11) + 1) * 0x1p-53;
            const double v = static_cast<double>(generator.next() >> 11) * 0x1p-53;
            const double radius = std::sqrt(-2.0 * std::log(u));
            const double angle = 2.0 * std::numbers::pi * v;
            columns[std::size_t{column} * head_dim + row] = radius * std::cos(angle);
            columns[std::size_t{column + 1} * head_dim + row] = radius * std::sin(angle);
        }
    }
    return columns;
}

// Modified Gram-Schmidt. It divides by a column's norm, so that R's diagonal is positive.
void orthonormalize(std::vector<double>& columns, std::uint32_t head_dim) {
    for (std::uint32_t j = 0; j < head_dim; ++j) {
        double* column = columns.data() + std::size_t{j} * head_dim;
        for (std::uint32_t i = 0; i < j; ++i) {
            const double* earlier = columns.data() + std::size_t{i} * head_dim;
            const double along = dot(earlier, column, head_dim);
            for (std::uint32_t k = 0; k < head_dim; ++k) column[k] -= along * earlier[k];
        }
        const double norm = std::sqrt(dot(column, column, head_dim));
        for (std::uint32_t k = 0; k < head_dim; ++k) column[k] /= norm;
    }
}

std::vector<float> transpose(std::span<const float> matrix, std::uint32_t head_dim) {
    std::vector<float> result(matrix.size());
    for (std::size_t row = 0; row < head_dim; ++row) {
        for (std::size_t column = 0; column < head_dim; ++column) {
            result[column * head_dim + row] = matrix[row * head_dim + column];
        }
    }
    return result;
}

}  // namespace

Rotation::Rotation(std::uint32_t head_dim) : head_dim_(head_dim) {
    if (head_dim == 0 || head_dim % tile != 0 || head_dim > max_head_dim) {
        throw Error(ErrorCode::invalid_argument, "head_dim ", head_dim,
                    " of a rotation must be a multiple of 16, from 16 to 576");
    }
}

Rotation Rotation::hadamard(std::uint32_t head_dim, std::uint64_t seed) {
    Rotation rotation(head_dim);
    SplitMix64 generator(seed);
    for_each_block(head_dim, [&](std::uint32_t, std::uint32_t size) {
        const float scale = 1.0f / std::sqrt(static_cast<float>(size));
        for (std::uint32_t i = 0; i < size; ++i) {
            rotation.scaled_signs_.push_back(generator.next() >> 63 != 0 ? -scale : scale);
        }
    });
    return rotation;
}

Rotation Rotation::random(std::uint32_t head_dim, std::uint64_t seed) {
    Rotation rotation(head_dim);
    std::vector<double> columns = normal_columns(head_dim, seed);
    orthonormalize(columns, head_dim);
    for (const double value : columns) rotation.transposed_.push_back(static_cast<float>(value));
    rotation.matrix_ = transpose(rotation.transposed_, head_dim);
    return rotation;
}

void Rotation::apply(float* x) const noexcept {
    if (!is_hadamard()) return multiply_matrix(x, matrix_.data(), head_dim_);
    multiply_elements(x, scaled_signs_.data(), head_dim_);
    for_each_block(head_dim_, [x](std::uint32_t first, std::uint32_t size) {
        walsh_hadamard(x + first, size);
    });
}

void Rotation::apply_inverse(float* x) const noexcept {
    if (!is_hadamard()) return multiply_matrix(x, transposed_.data(), head_dim_);
    for_each_block(head_dim_, [x](std::uint32_t first, std::uint32_t size) {
        walsh_hadamard(x + first, size);
    });
    multiply_elements(x, scaled_signs_.data(), head_dim_);
}

std::shared_ptr<const Rotation> Rotations::of(Rotate kind) {
    switch (kind) {
        case Rotate::none: break;
        case Rotate::hadamard:
            if (!hadamard_) {
                hadamard_ = std::make_shared<const Rotation>(Rotation::hadamard(head_dim_));
            }
            return hadamard_;
        case Rotate::random:
            if (!random_) {
                const std::uint64_t seed = 42 + std::uint64_t{1000} * layer_;
                random_ = std::make_shared<const Rotation>(Rotation::random(head_dim_, seed));
            }
            return random_;
    }
    return nullptr;
}

}  // namespace lowkv::codec
