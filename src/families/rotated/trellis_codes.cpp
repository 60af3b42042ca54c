#include "families/rotated/trellis_codes.h"

#include <algorithm>

namespace lowkv::codec {
namespace {

constexpr std::uint32_t codes_of_word = LOWKV_WORD_CODES;

// `codes` are a word's, `stride` apart; calls f(number, window).
template <class F>
void for_windows(const std::uint8_t* codes, std::uint32_t stride, F f) {
    for (std::uint32_t i = 0; i < codes_of_word; ++i) {
        const std::uint32_t next = (i + 1) % codes_of_word, last = (i + 2) % codes_of_word;
        f(i, static_cast<std::uint8_t>(codes[i * stride] | codes[next * stride] << 2 |
                                       codes[last * stride] << 4));
    }
}

}  // namespace

TrellisCodes::TrellisCodes(const kernels::Table& table, const CodesPart& layout) noexcept
    : encode_(table.encode_trellis) {
    for (std::uint32_t window = 0; window < levels_.size(); ++window)
        levels_[window] =
            static_cast<float>(layout.level_of(window)) * layout.level_step + layout.level_zero;
}

void TrellisCodes::encode(Part part, const float (*y)[max_lanes], std::uint32_t channels,
                          std::uint8_t (*windows)[max_lanes]) const noexcept {
    constexpr std::uint32_t words_at_a_time = kernels::trellis_words;
    // Calls f(number, word of this turn, token, channel) for the codes of words from `first` on.
    // Keys: a word is 4 tokens x 16 channels. Values: 16 tokens x 4 channels.
    const std::uint32_t words = channels / LOWKV_WORD_LANES;
    const auto for_codes = [&](std::uint32_t first, auto f) {
        for (std::uint32_t w = first; w < std::min(first + words_at_a_time, words); ++w) {
            for (std::uint32_t i = 0; i < codes_of_word; ++i) {
                const std::uint32_t lane = lowkv_word_lane(i), step = lowkv_word_step(i);
                if (part == Part::keys)
                    f(i, w - first, w % 4 * LOWKV_WORD_LANES + lane,
                      w / 4 * LOWKV_UNIT_STEPS + step);
                else
                    f(i, w - first, step, w * LOWKV_WORD_LANES + lane);
            }
        }
    };
    for (std::uint32_t first = 0; first < words; first += words_at_a_time) {
        alignas(64) float samples[codes_of_word][words_at_a_time] = {};
        std::uint8_t codes[codes_of_word][words_at_a_time];
        for_codes(first, [&](auto i, auto word, auto token, auto channel) {
            samples[i][word] = y[token][channel];
        });
        encode_(samples[0], levels_.data(), codes[0]);
        std::uint8_t found[codes_of_word][words_at_a_time];
        for (std::uint32_t word = 0; word < words_at_a_time; ++word)
            for_windows(&codes[0][word], words_at_a_time,
                        [&](std::uint32_t i, std::uint8_t window) { found[i][word] = window; });
        for_codes(first, [&](auto i, auto word, auto token, auto channel) {
            windows[token][channel] = found[i][word];
        });
    }
}

void open_windows(CodeTile& tile, std::uint32_t lanes) noexcept {
    for (std::uint32_t lane = 0; lane < lanes; lane += LOWKV_WORD_LANES) {
        std::uint8_t codes[codes_of_word];
        const auto at = [&](std::uint32_t i) -> std::uint8_t& {
            return tile.row[lowkv_word_step(i)][lane + lowkv_word_lane(i)];
        };
        for (std::uint32_t i = 0; i < codes_of_word; ++i) codes[i] = at(i);
        for_windows(codes, 1, [&](std::uint32_t i, std::uint8_t window) { at(i) = window; });
    }
}

}  // namespace lowkv::codec
