#include "scheme/fields.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace lowkv::scheme {
namespace {

char lower(char c) noexcept { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Levenshtein's, upper and lower case being alike.
std::size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 0; i < a.size(); ++i) {
        std::size_t diagonal = row[0];
        row[0] = i + 1;
        for (std::size_t j = 0; j < b.size(); ++j) {
            const std::size_t replaced = diagonal + (lower(a[i]) == lower(b[j]) ? 0 : 1);
            diagonal = row[j + 1];
            row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
        }
    }
    return row.back();
}

}  // namespace

std::string_view closest(std::string_view word, std::span<const std::string_view> legal) {
    // A long word of garbage is near to nothing, and would only cost time.
    constexpr std::size_t longest_word = 32;
    if (word.size() > longest_word) return {};
    std::string_view best;
    std::size_t best_distance = 3;  // three errors are no longer the same word
    for (const std::string_view candidate : legal) {
        const std::size_t distance = edit_distance(word, candidate);
        if (distance < best_distance && distance < candidate.size()) {
            best = candidate;
            best_distance = distance;
        }
    }
    return best;
}

}  // namespace lowkv::scheme
