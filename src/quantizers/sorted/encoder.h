#pragma once
// A head of a block of sorted keys on its way into codes, and what decoding shares with it. A block
// is worked on as it lies: a row of tokens for each channel or place, so that compilers vectorize
// over tokens.

#include <algorithm>

#include "quantizers/packing.h"
#include "quantizers/sorted/sorted_part.h"

namespace lowkv::codec {

// A group's codes, 16 channels of a block's tokens, in their bytes (lowkv/format.h).

inline constexpr std::uint32_t sorted_tokens = max_block_tokens;

// A tile's row is a channel. Codes are 0 to 2^bits - 1; of a trellis what is read are windows, and
// what is written are their low bits. The bytes are zero before.
void pack_group(const CodeTile& tile, std::uint32_t bits, std::uint8_t* codes) noexcept;
void unpack_group(const std::uint8_t* codes, std::uint32_t bits, bool trellis,
                  CodeTile& tile) noexcept;

// What damped keys are less, by channel.
void read_means(const SortedPart& part, const std::byte* section, float* mean) noexcept;
void read_scales(const SortedPart& part, const std::byte* section, float* scale) noexcept;
// A row's token, and what it lacks of a damped channel.
std::uint32_t row_token(const SortedPart& part, const std::byte* section,
                        std::uint32_t row) noexcept;
float residual(const SortedPart& part, const std::byte* section, std::uint32_t row,
               std::uint32_t channel) noexcept;

// What the codes of a place, of a trellis windows, stand for, before the tokens' scales.
void read_levels(const SortedPart& part, const SortedStatistics& statistics, std::uint32_t place,
                 const std::uint8_t* codes, float* y) noexcept;

// y <- y H across the 16 rows of a group.
void hadamard_rows(float (*y)[sorted_tokens]) noexcept;

// The tokens with residuals, ascending.
struct ExactRows {
    std::uint8_t token[max_exact_rows] = {};
    std::uint32_t count = 0;

    bool has(std::uint32_t t) const noexcept {
        return std::find(token, token + count, t) != token + count;
    }
};

// One head of a block on its way into codes. Numbers are damped as they are loaded.
class SortedEncoder {
  public:
    SortedEncoder(const SortedPart& part, const std::uint16_t* keys) noexcept
        : part_(part), keys_(keys) {}

    // First of all: what the section says.
    void set_damping(const std::byte* section) noexcept;
    // Rows count for nothing else: not for the mean, nor for what follows from it.
    void set_rows(const ExactRows& rows) noexcept;
    void find_energy(float* energy) const noexcept;
    void find_codes(const SortedStatistics& statistics) noexcept;
    // Of keys that were decoded from a section: the codes that they had.
    void find_codes_again(const SortedStatistics& statistics, const std::byte* section) noexcept;
    // The tokens of the shortest keys: attention goes to them whatever the query.
    ExactRows shortest() const noexcept;

    // Into the section, in this order: each needs what the one before has rounded.
    void write_scales(std::byte* section) noexcept;
    void write_means(const SortedStatistics& statistics, std::byte* section) const noexcept;
    void write_rows(const SortedStatistics& statistics, std::byte* section) const noexcept;
    void write_codes(std::byte* section) const noexcept;

  private:
    const SortedPart& part_;
    const std::uint16_t* keys_;
    ExactRows rows_;
    float kept_[sorted_tokens];   // 0 of a row, 1 of all others
    float mean_[max_sorted_dim];  // of the others, rounded to f16
    float scale_[sorted_tokens];
    float damping_[max_sorted_dim];                      // by channel, at most 1
    std::uint8_t codes_[max_sorted_dim][sorted_tokens];  // by place; of a trellis windows

    std::uint32_t channels() const noexcept { return part_.head.head_dim; }
    std::uint32_t coded() const noexcept { return part_.coded_groups * sorted_group; }
    float share() const noexcept { return 1.0f / static_cast<float>(sorted_tokens - rows_.count); }
    void load(std::uint32_t channel, float* x) const noexcept;
    void load_undamped(std::uint32_t channel, float* x) const noexcept;
    // Of the places' numbers: a factor for each token that makes them N(0, 1).
    void find_reaches(const SortedStatistics& statistics, const float (*y)[sorted_tokens],
                      float* to_normal) const noexcept;
    // Of the places' numbers, each token's times such a factor.
    void choose_codes(const SortedStatistics& statistics, const float (*y)[sorted_tokens],
                      const float* to_normal) noexcept;
    // Of a group's.
    void choose_nearest(std::uint32_t group, const float (*x)[sorted_tokens]) noexcept;
    void choose_path(std::uint32_t group, const float (*x)[sorted_tokens]) noexcept;
};

// What decoded keys carry: all that their block says of them beside the codes, so that encoding
// them again, wherever they have been meanwhile (in a saved state, in a host's memory), finds the
// codes that they had. Without it the channels' energies would sort otherwise, other keys would be
// the shortest, and all would be rounded once more.
//
// It stands in one low bit of f16 numbers: a change of 2^-9 of a number at most. The two bits below
// may have the llama.cpp plug-in's marks (row_mark.h).

// `exact`: the head's rows.
void carry(const SortedPart& part, const std::byte* section, std::uint16_t* exact) noexcept;

// Into the section, its codes apart. False, and nothing is written, if these rows carry nothing, or
// rows of several blocks do.
bool take_carried(const SortedPart& part, const std::uint16_t* exact, std::byte* section) noexcept;

}  // namespace lowkv::codec
