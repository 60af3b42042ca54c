#pragma once
// Pseudo-random numbers of about N(0, 1).

#include <cstddef>
#include <random>
#include <vector>

namespace lowkv::test {

inline std::vector<float> numbers(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> all(count);
    for (float& x : all) x = normal(random);
    return all;
}

}  // namespace lowkv::test
