#pragma once
// Shows what an answer took, with one cache or with two side by side.

#include <cstddef>
#include <string>

#include "common/model.h"

namespace lowkv::cli {

struct Outcome {
    std::size_t prompt = 0, answer = 0;  // tokens
    double prompt_seconds = 0, answer_seconds = 0;
    const char* end = "";
    bool read = false;  // the whole prompt

    // Tokens per second; 0 where nothing was computed.
    double prompt_rate() const;
    double answer_rate() const;
};

struct Bar {
    std::string name;
    Outcome outcome;
    double cache_bytes = 0;
};

// The figures of an answer from our cache.
std::string figures(const Outcome& outcome, const Context& context);

// Lines with bars: decoding speed, prompt speed and bytes of the cache, and how they compare.
std::string bars(const Bar& ours, const Bar& stock);

}  // namespace lowkv::cli
