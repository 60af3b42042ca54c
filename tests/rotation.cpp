// Rotations: the laws of an orthogonal matrix for every kind, what makes each kind the matrix that
// it is, and that a seed always means the same matrix.

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "lowkv/error.h"
#include "lowkv/rotation.h"

using lowkv::codec::Rotation;

namespace {

using Vector = std::vector<float>;

constexpr std::uint32_t head_dims[] = {16,  32,  64,  80,  96,  112, 128,
                                       160, 192, 240, 256, 320, 512, 576};

Vector one_hot(std::uint32_t head_dim, std::uint32_t i, float value = 1.0f) {
    Vector x(head_dim);
    x[i] = value;
    return x;
}

// R in row order.
Vector matrix_of(const Rotation& rotation) {
    Vector matrix;
    for (std::uint32_t i = 0; i < rotation.head_dim(); ++i) {
        Vector row = one_hot(rotation.head_dim(), i);
        rotation.apply(row.data());
        matrix.insert(matrix.end(), row.begin(), row.end());
    }
    return matrix;
}

Vector normal_vector(std::uint32_t head_dim, std::mt19937& random) {
    std::normal_distribution<float> normal;
    Vector x(head_dim);
    for (float& value : x) value = normal(random);
    return x;
}

double dot(const Vector& a, const Vector& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * double{b[i]};
    return sum;
}

double norm(const Vector& x) { return std::sqrt(dot(x, x)); }

double distance(const Vector& a, const Vector& b) {
    Vector difference(a.size());
    for (std::size_t i = 0; i < a.size(); ++i) difference[i] = a[i] - b[i];
    return norm(difference);
}

Vector rotated(const Rotation& rotation, Vector x) {
    rotation.apply(x.data());
    return x;
}

// Every kind at every head_dim.
template <class F>
void for_all_rotations(F f) {
    for (const std::uint32_t head_dim : head_dims) {
        CAPTURE(head_dim);
        f(Rotation::hadamard(head_dim));
        f(Rotation::random(head_dim, 1042));
    }
}

// The blocks of a Hadamard rotation, written out by hand.
struct Blocks {
    std::uint32_t head_dim;
    std::vector<std::uint32_t> sizes;
};
const Blocks blocks[] = {
    {16, {16}},          {32, {32}},   {64, {64}},       {80, {64, 16}},   {96, {64, 32}},
    {112, {64, 32, 16}}, {128, {128}}, {160, {128, 32}}, {192, {128, 64}}, {240, {128, 64, 32, 16}},
    {256, {256}},
};

}  // namespace

TEST_CASE("a rotation keeps norms and inner products, and its inverse undoes it") {
    std::mt19937 random(7);
    for_all_rotations([&](const Rotation& rotation) {
        for (int i = 0; i < 4; ++i) {
            const Vector q = normal_vector(rotation.head_dim(), random);
            const Vector k = normal_vector(rotation.head_dim(), random);
            const Vector rotated_q = rotated(rotation, q), rotated_k = rotated(rotation, k);
            REQUIRE(std::abs(norm(rotated_q) - norm(q)) <= 1e-5 * norm(q));
            const double tolerance = 1e-6 * norm(q) * norm(k);
            REQUIRE(std::abs(dot(rotated_q, rotated_k) - dot(q, k)) <= tolerance);

            Vector back = rotated_q, forth = q;
            rotation.apply_inverse(back.data());
            rotation.apply_inverse(forth.data());
            rotation.apply(forth.data());
            REQUIRE(distance(back, q) <= 1e-6 * norm(q));
            REQUIRE(distance(forth, q) <= 1e-6 * norm(q));
        }
    });
}

TEST_CASE("every rotation is orthogonal") {
    for_all_rotations([](const Rotation& rotation) {
        const std::uint32_t n = rotation.head_dim();
        const Vector matrix = matrix_of(rotation);
        std::vector<double> product(std::size_t{n} * n);  // R^T R: the columns' inner products
        for (std::uint32_t row = 0; row < n; ++row) {
            const float* values = matrix.data() + std::size_t{row} * n;
            for (std::uint32_t i = 0; i < n; ++i) {
                for (std::uint32_t j = 0; j < n; ++j) {
                    product[std::size_t{i} * n + j] += double{values[i]} * double{values[j]};
                }
            }
        }
        double worst = 0;
        for (std::uint32_t i = 0; i < n; ++i) {
            for (std::uint32_t j = 0; j < n; ++j) {
                const double expected = i == j ? 1.0 : 0.0;
                worst = std::max(worst, std::abs(product[std::size_t{i} * n + j] - expected));
            }
        }
        CHECK(worst < 1e-5);
    });
}

TEST_CASE("Hadamard: Sylvester's matrix in blocks, times a sign per row") {
    for (const Blocks& layout : blocks) {
        const std::uint32_t n = layout.head_dim;
        CAPTURE(n);
        const Vector matrix = matrix_of(Rotation::hadamard(n));
        std::vector<float> expected(matrix.size());
        std::uint32_t first = 0;
        for (const std::uint32_t size : layout.sizes) {
            const float magnitude = 1.0f / std::sqrt(static_cast<float>(size));
            for (std::uint32_t i = 0; i < size; ++i) {
                // The first column of Sylvester's matrix is all ones: it shows the row's sign.
                const float* row = matrix.data() + std::size_t{first + i} * n + first;
                const float sign = row[0] < 0 ? -magnitude : magnitude;
                for (std::uint32_t j = 0; j < size; ++j) {
                    const bool odd = std::popcount(i & j) % 2 != 0;
                    expected[std::size_t{first + i} * n + first + j] = odd ? -sign : sign;
                }
            }
            first += size;
        }
        REQUIRE(first == n);
        CHECK(matrix == expected);
    }
}

TEST_CASE("Hadamard: the transform agrees with the matrix product") {
    std::mt19937 random(8);
    for (const std::uint32_t head_dim : head_dims) {
        CAPTURE(head_dim);
        const Rotation rotation = Rotation::hadamard(head_dim);
        const Vector matrix = matrix_of(rotation), x = normal_vector(head_dim, random);
        const Vector fast = rotated(rotation, x);
        Vector plain(head_dim);
        for (std::size_t i = 0; i < matrix.size(); ++i) {
            plain[i % head_dim] += x[i / head_dim] * matrix[i];
        }
        for (std::size_t c = 0; c < x.size(); ++c) REQUIRE(std::abs(fast[c] - plain[c]) < 5e-6f);
    }
}

TEST_CASE("Hadamard: an outlier channel is spread evenly") {
    const Rotation rotation = Rotation::hadamard(128);
    for (std::uint32_t channel = 0; channel < 128; ++channel) {
        for (const float value : rotated(rotation, one_hot(128, channel, 100.0f))) {
            REQUIRE(std::abs(value) == doctest::Approx(100.0 / std::sqrt(128.0)));
        }
    }
}

TEST_CASE("a seed means one matrix, another seed another") {
    for (const std::uint32_t head_dim : head_dims) {
        CAPTURE(head_dim);
        const Vector hadamard = matrix_of(Rotation::hadamard(head_dim, 42));
        CHECK(hadamard == matrix_of(Rotation::hadamard(head_dim)));
        CHECK(hadamard != matrix_of(Rotation::hadamard(head_dim, 43)));
        const Vector random = matrix_of(Rotation::random(head_dim, 42));
        CHECK(random == matrix_of(Rotation::random(head_dim, 42)));
        CHECK(random != matrix_of(Rotation::random(head_dim, 43)));
    }
}

TEST_CASE("a seed means the same matrix on every platform") {
    // From numpy.linalg.qr, with the generator and the signs as documented.
    const Vector small = matrix_of(Rotation::random(16, 42));
    CHECK(std::abs(small[0] - 0.086542647f) < 1e-7f);
    CHECK(std::abs(small[3 * 16 + 7] + 0.617397576f) < 1e-7f);
    CHECK(std::abs(small[15 * 16 + 15] - 0.533036479f) < 1e-7f);
    const Vector large = matrix_of(Rotation::random(128, 1042));
    CHECK(std::abs(large[3 * 128 + 7] + 0.051613624f) < 1e-7f);
    CHECK(std::abs(large[127 * 128 + 127] - 0.007976637f) < 1e-7f);

    // The top bits of splitmix64's first 16 draws for seed 42.
    const bool negative[] = {true,  false, false, false, false, true, false, true,
                             false, true,  false, false, true,  true, true,  false};
    const Vector signs = matrix_of(Rotation::hadamard(16, 42));
    for (std::size_t row = 0; row < 16; ++row) CHECK((signs[row * 16] < 0) == negative[row]);
}

TEST_CASE("a head_dim that no cache can have is refused") {
    for (const std::uint32_t head_dim : {0u, 8u, 24u, 592u}) {
        CAPTURE(head_dim);
        CHECK_THROWS_AS(Rotation::hadamard(head_dim), lowkv::Error);
        CHECK_THROWS_AS(Rotation::random(head_dim, 1), lowkv::Error);
    }
}
