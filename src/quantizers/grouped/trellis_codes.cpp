#include "quantizers/grouped/trellis_codes.h"

#include <algorithm>

#include "codec/trellis.h"

namespace lowkv::codec {
namespace {

constexpr std::uint32_t codes_of_word = LOWKV_WORD_CODES;

}  // namespace

TrellisCodes::TrellisCodes(const kernels::Table& table, const CodesPart& layout) noexcept
    : encode_(table.encode_trellis[trellis_bits(layout.codec.width) - 1]) {
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
        std::uint8_t found[codes_of_word][words_at_a_time];
        for_codes(first, [&](auto i, auto word, auto token, auto channel) {
            samples[i][word] = y[token][channel];
        });
        encode_(samples[0], levels_.data(), found[0]);
        for_codes(first, [&](auto i, auto word, auto token, auto channel) {
            windows[token][channel] = found[i][word];
        });
    }
}

// From the last code of a word to the first, beginning with those that follow the last one.
void open_windows(CodeTile& tile, Width width, std::uint32_t lanes) noexcept {
    const std::uint32_t number = kernels::number_of(width), own = lowkv_own_bits(number);
    const std::uint32_t following = lowkv_window_codes(number) - 1;
    for (std::uint32_t lane = 0; lane < lanes; lane += LOWKV_WORD_LANES) {
        const auto at = [&](std::uint32_t i) -> std::uint8_t& {
            return tile.row[lowkv_word_step(i)][lane + lowkv_word_lane(i)];
        };
        std::uint32_t window = 0;
        const auto put_before = [&](std::uint32_t code) {
            const std::uint32_t links = window >> own << lowkv_linked_bits(number);
            window = (code | links << own) % LOWKV_WINDOWS;
        };
        for (std::uint32_t i = following; i-- > 0;) put_before(at(i));
        for (std::uint32_t i = codes_of_word; i-- > 0;) {
            put_before(at(i));
            at(i) = static_cast<std::uint8_t>(window);
        }
    }
}

}  // namespace lowkv::codec
