// Which quantizer and which kernels each preset gets, as docs/internals-blocks.md's table says.

#include <doctest/doctest.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "lowkv/codec.h"
#include "lowkv/quantizer.h"

using namespace lowkv;

namespace {

struct Row {
    std::string quantizer, value_quantizer, keys, values;
    friend bool operator==(const Row&, const Row&) = default;
};

// The words of a table's cell between backquotes.
std::vector<std::string> quoted(const std::string& cell) {
    std::vector<std::string> words;
    std::istringstream in(cell);
    std::string word;
    for (bool inside = false; std::getline(in, word, '`'); inside = !inside) {
        if (inside) words.push_back(word);
    }
    return words;
}

std::map<std::string, Row> documented() {
    std::map<std::string, Row> rows;
    std::ifstream in(BLOCKS_PAGE);
    REQUIRE(in.good());
    bool inside = false;
    for (std::string line; std::getline(in, line);) {
        if (line.starts_with("| preset | quantizer")) inside = true;
        if (!line.starts_with("|")) inside = false;
        if (!inside) continue;
        std::vector<std::string> cells;
        std::istringstream split(line);
        for (std::string cell; std::getline(split, cell, '|');) cells.push_back(cell);
        const auto quantizer = quoted(cells.at(2)), kernels = quoted(cells.at(3));
        for (const std::string& preset : quoted(cells.at(1))) {
            rows[preset] = {quantizer.front(), quantizer.back(),
                            kernels.empty() ? "" : kernels.front(),
                            kernels.empty() ? "" : kernels.back()};
        }
    }
    return rows;
}

}  // namespace

TEST_CASE("the documented quantizer and kernels of every preset are those of its plan") {
    const std::map<std::string, Row> table = documented();
    // Without guests the presets of theirs are missing.
    const auto is_served = [](const auto& row) {
        return std::ranges::any_of(presets(),
                                   [&](const Preset& preset) { return preset.name == row.first; });
    };
    CHECK(std::size_t(std::ranges::count_if(table, is_served)) == presets().size());
#ifdef LOWKV_GUESTS
    CHECK(table.size() == presets().size());
#endif
    const Rope rope{.frequencies = std::vector<float>(32, 0.5f)};
    for (const Preset& preset : presets()) {
        CAPTURE(preset.name);
        const LayerScheme& layer = preset.scheme.base;
        const Plan plan = neutral_plan(layer, {2, 64}, &rope);
        REQUIRE(table.contains(std::string(preset.name)));
        const Row& row = table.at(std::string(preset.name));
        CHECK(row.quantizer == quantizer_of(layer.key).name());
        CHECK(row.value_quantizer == quantizer_of(layer.value).name());
        CHECK(row.keys == plan.keys().kernels().name);
        CHECK(row.values == plan.values().kernels().name);
    }
}
