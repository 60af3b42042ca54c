#pragma once
// Orthogonal matrices R of head_dim x head_dim that spread a head's outliers over its channels.
// Vectors are rows: x R. Because R is orthogonal, (q R).(k R) = q.k.

#include <cstdint>
#include <memory>
#include <vector>

#include "lowkv/scheme.h"

namespace lowkv::codec {

// head_dim is a multiple of 16 from 16 to 576; anything else throws invalid_argument.
class Rotation {
  public:
    // diag(signs) H / sqrt(n), H being Sylvester's matrix of n x n. Of a head_dim that is no power
    // of two: a diagonal of such blocks, the largest first (80 = 64 + 16). Channel i's sign is
    // minus where the i-th draw of splitmix64(seed) has its top bit set.
    static Rotation hadamard(std::uint32_t head_dim, std::uint64_t seed = 42);

    // Uniform over the orthogonal matrices (Haar): the Q of the QR decomposition, with a positive
    // diagonal of R, of a matrix of standard normal draws in row order. Draws come in pairs by
    // Box-Muller from two draws a, b of splitmix64(seed): u = ((a >> 11) + 1) / 2^53, v =
    // (b >> 11) / 2^53, then sqrt(-2 ln u) cos(2 pi v) and sqrt(-2 ln u) sin(2 pi v). In double:
    // platforms differ by their mathematics library's last bit at most.
    static Rotation random(std::uint32_t head_dim, std::uint64_t seed);

    std::uint32_t head_dim() const noexcept { return head_dim_; }

    void apply(float* x) const noexcept;          // x <- x R
    void apply_inverse(float* x) const noexcept;  // x <- x R^T

    // What it is made of, for devices that multiply by it themselves: of a Hadamard rotation the
    // signs over sqrt(n), of any other R and R^T in row order; empty: it has none.
    const std::vector<float>& scaled_signs() const noexcept { return scaled_signs_; }
    const std::vector<float>& matrix() const noexcept { return matrix_; }
    const std::vector<float>& transposed() const noexcept { return transposed_; }

  private:
    explicit Rotation(std::uint32_t head_dim);

    bool is_hadamard() const noexcept { return !scaled_signs_.empty(); }

    std::uint32_t head_dim_;
    std::vector<float> scaled_signs_;  // Hadamard: signs / sqrt(n)
    std::vector<float> matrix_;        // otherwise: R in row order
    std::vector<float> transposed_;    // and R^T, so that the inverse reads it in order, too
};

// A layer's rotations, each made when it is first asked for. A random one's seed is the layer's.
class Rotations {
  public:
    Rotations(std::uint32_t head_dim, std::uint32_t layer) : head_dim_(head_dim), layer_(layer) {}
    std::shared_ptr<const Rotation> of(Rotate kind);  // null: none

  private:
    std::uint32_t head_dim_, layer_;
    std::shared_ptr<const Rotation> hadamard_, random_;
};

}  // namespace lowkv::codec
