// Images that earlier versions have saved can be read (docs/compatibility.md): tests/saved/ holds
// one of each kind of codec for each version whose files are to be read. Those of this version,
// made anew:
//
//     LOWKV_WRITE_SAVED=tests/saved/0.2 build/release/bin/test_saved_images

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"
#include "lowkv/serial.h"

using namespace lowkv;

namespace {

constexpr Shape shape{1, 64};
constexpr const char* names[] = {"lowkv2.8", "lowkv1.5",    "lowkv4", "kivi2",
                                 "int8",     "turboquant3", "exact"};
// Images whose schemes have a word that is no longer in lowkv.
struct Refused {
    const char *name, *word;
};
constexpr Refused refused[] = {{"kivi2,rows=8", "rows"}, {"kvarn3", "varnorm"}};

struct Saved {
    std::shared_ptr<const Plan> plan;
    Retention retention{.window = 8, .sinks = 0};
    std::vector<float> keys, values;

    explicit Saved(const std::string& name) {
        plan = std::make_shared<const Plan>(parse_scheme(name).base, shape);
        // Multiples of 1/256: the same on every machine. Channels differ in spread, some are
        // biased.
        std::mt19937 random(97);
        for (std::vector<float>* rows : {&keys, &values})
            for (std::uint32_t i = 0; i < tokens() * shape.channels(); ++i) {
                const int noise = static_cast<int>(random() % 1024) - 512;
                const int spread = 1 + static_cast<int>(i % 64 % 5), bias = i % 31 == 7 ? 900 : 0;
                rows->push_back(static_cast<float>(noise * spread + bias) / 256.0f);
            }
    }
    // A packed block, and rows that are exact.
    std::uint32_t tokens() const { return plan->block_tokens() + 12; }
    std::vector<std::byte> image() const {
        Sequence sequence(std::make_shared<Store>(), plan, retention);
        sequence.append(keys.data(), values.data(), tokens());
        sequence.pack();
        return save_sequence(sequence);
    }
};

std::vector<std::byte> read(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    const auto* begin = reinterpret_cast<const std::byte*>(bytes.data());
    return {begin, begin + bytes.size()};
}

// Squared, in parts of the squares.
double error_of(const std::vector<float>& was, const std::vector<float>& is) {
    double error = 0, size = 0;
    for (std::size_t i = 0; i < was.size(); ++i) {
        error += static_cast<double>(was[i] - is[i]) * (was[i] - is[i]);
        size += static_cast<double>(was[i]) * was[i];
    }
    return error / size;
}

}  // namespace

TEST_CASE("images of earlier versions are read") {
    if (const char* folder = std::getenv("LOWKV_WRITE_SAVED")) {
        for (const char* name : names) {
            const std::vector<std::byte> image = Saved(name).image();
            std::ofstream(std::filesystem::path(folder) / (std::string(name) + ".img"),
                          std::ios::binary)
                .write(reinterpret_cast<const char*>(image.data()),
                       static_cast<std::streamsize>(image.size()));
        }
        return;
    }
    unsigned versions = 0;
    for (const auto& folder : std::filesystem::directory_iterator(SAVED_IMAGES)) {
        if (!folder.is_directory()) continue;
        ++versions;
        for (const char* name : names) {
            const std::filesystem::path path = folder.path() / (std::string(name) + ".img");
            CAPTURE(path);
            const Saved saved(name);
            const std::vector<std::byte> image = read(path);
            REQUIRE_FALSE(image.empty());
            const Sequence sequence =
                load_sequence(image, std::make_shared<Store>(), saved.plan, saved.retention);
            CHECK(sequence.size() == saved.tokens());
            CHECK(sequence.packed(0) == (std::string(name) != "exact"));
            std::vector<float> keys(saved.keys.size()), values(keys.size());
            for (std::uint32_t cell = 0; cell < saved.tokens(); ++cell) {
                sequence.read_key(cell, keys.data() + cell * shape.channels());
                sequence.read_value(cell, values.data() + cell * shape.channels());
            }
            // Uniform noise is hard on few bits; what means something else errs by 1 and more.
            CHECK(error_of(saved.keys, keys) < 0.25);
            CHECK(error_of(saved.values, values) < 0.45);
            CHECK(save_sequence(sequence) == image);
        }
    }
    CHECK(versions > 0);
}

TEST_CASE("images of schemes that are no longer served are refused by the word") {
    const Saved other("kivi2");
    for (const auto& folder : std::filesystem::directory_iterator(SAVED_IMAGES)) {
        if (!folder.is_directory()) continue;
        for (const auto& [name, word] : refused) {
            CAPTURE(name);
            const std::vector<std::byte> image = read(folder.path() / (std::string(name) + ".img"));
            REQUIRE_FALSE(image.empty());
            std::string said;
            try {
                load_sequence(image, std::make_shared<Store>(), other.plan, other.retention);
            } catch (const Error& error) {
                CHECK(error.code() == ErrorCode::invalid_image);
                said = error.what();
            }
            CHECK(said.find("\"" + std::string(word) + "\"") != std::string::npos);
            CHECK(said.find("is no longer in lowkv") != std::string::npos);
        }
    }
}
