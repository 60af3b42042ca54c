#pragma once
// What `lowkv compare` found, and how it is shown: table, sentence, JSON.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/metrics.h"
#include "common/terminal.h"

namespace lowkv::cli {

struct ComparedRow {
    std::string name;    // a scheme, or "stock q8_0"
    bool stock = false;  // llama.cpp's own cache on the CPU backend
    bool idle = false;   // a scheme that packs, and nothing packed was ever read
    Estimate kld;
    double kld_999 = 0, same_top = 0, perplexity = 0;
    double cache_bytes = 0;                    // at the end of the text
    double bytes_per_token = 0;                // cache_bytes / tokens, window and metadata included
    double compression = 0;                    // f16 bytes / cache_bytes
    double prefill_rate = 0, decode_rate = 0;  // tokens/s; 0: not measured
    std::vector<double> klds;                  // by position, where they are asked for
};

struct CompareOptions {
    std::string model, file, json;
    std::vector<std::string> calibrations;
    std::vector<std::string> schemes = {"exact", "lowkv4", "lowkv2.8", "lowkv2", "kivi2"};
    std::vector<std::string> stock = {"f16", "q8_0", "q4_0"};
    std::uint64_t tokens = 0, windows = 1, skip = 256, decode = 48;
    std::uint32_t chunk = 512;
    unsigned threads = 0;
    bool speed = true, positions = false, verbose = false;
};

struct Comparison {
    std::string model;
    CompareOptions options;
    std::size_t positions = 0;
    std::vector<ComparedRow> rows;  // the first is the reference, "exact"
};

// The table, which is shown row by row.
Table comparison_table();
std::vector<std::string> cells(const Comparison& comparison, const ComparedRow& row);
std::string notes(const Comparison& comparison);    // what the columns are
std::string summary(const Comparison& comparison);  // one sentence: the best trade
std::string json(const Comparison& comparison);

}  // namespace lowkv::cli
