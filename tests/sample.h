#pragma once
// Where LOWKV_TEST_SAMPLE is n, tests that go over all codecs and shapes take each n-th case,
// as under an emulator (preset aarch64) or a sanitizer all of them take too long for every run.

#include <algorithm>
#include <cstdlib>

namespace lowkv::test {

inline bool in_sample(unsigned number) {
    static const char* const text = std::getenv("LOWKV_TEST_SAMPLE");
    static const int each = text == nullptr ? 1 : std::max(std::atoi(text), 1);
    return number % static_cast<unsigned>(each) == 0;
}

}  // namespace lowkv::test
