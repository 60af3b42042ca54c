// Which kernels run: the best that this CPU has, or the one that is named.

#include "lowkv/implementation.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "isa/table.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "lowkv/quantizer.h"
#include "lowkv/scheme.h"
#include "platform/system.h"

using namespace lowkv;

namespace {

// What LOWKV_IMPLEMENTATION=name leads to: the implementation's name, or the error's message.
std::string forced(const char* name) {
    lowkv::platform::set_environment("LOWKV_IMPLEMENTATION", name);
    std::string result;
    try {
        result = active_implementation().name;
    } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::unsupported);
        result = error.what();
    }
    lowkv::platform::set_environment("LOWKV_IMPLEMENTATION", "");
    return result;
}

std::string names_that_run() {
    std::string names;
    for (const Implementation& i : implementations()) {
        if (i.supported) names += (names.empty() ? "" : ", ") + std::string(i.name);
    }
    return names;
}

}  // namespace

TEST_CASE("all keys and values of presets have a product of their own") {
    for (const Implementation& i : implementations()) {
        if (!i.supported) continue;
        for (const Preset& preset : presets()) {
            // Of several groups in a row, and of one (RowPart::dense).
            for (const Shape shape :
                 {Shape{.kv_heads = 8, .head_dim = 128}, Shape{.kv_heads = 1, .head_dim = 64}}) {
                const LayerScheme& codecs = preset.scheme.base;
                const LayerCalibration calibration = neutral_calibration(codecs, shape);
                const Plan plan(codecs, shape, i.name, 0, {.calibration = &calibration});
                for (const Part part : {Part::keys, Part::values}) {
                    const PartKernels& kernels = plan.part(part).kernels();
                    if (kernels.name.empty()) continue;  // exact
                    CAPTURE(i.name);
                    CAPTURE(preset.name);
                    CAPTURE(kernels.name);
                    CHECK((kernels.multiply != nullptr));
                }
            }
        }
    }
}

TEST_CASE("the best that this CPU has runs, and any of them when it is named") {
    const std::string best = forced("");
    const auto first = std::ranges::find_if(implementations(), &Implementation::supported);
    REQUIRE(first != implementations().end());
    CHECK(first->name == best);
    CHECK(implementations().back().name == "scalar");
    CHECK(implementations().back().supported);
    for (const Implementation& i : implementations()) {
        CAPTURE(i.name);
        CHECK_FALSE(i.description.empty());
        if (i.supported) {
            CHECK(forced(std::string(i.name).c_str()) == i.name);
            CHECK(kernels::select(i.name).name == i.name);
        } else {
            CHECK(forced(std::string(i.name).c_str()) ==
                  "LOWKV_IMPLEMENTATION=" + std::string(i.name) + " needs " +
                      std::string(i.description) +
                      ", which this CPU lacks; it runs: " + names_that_run());
        }
    }
}

TEST_CASE("one that this build lacks is refused, with those that run") {
    for (const char* other : {"avx512", "avx2", "neon", "vax"}) {
        const auto is_other = [&](const Implementation& i) { return i.name == other; };
        if (std::ranges::any_of(implementations(), is_other)) continue;
        CHECK(forced(other) == "LOWKV_IMPLEMENTATION=" + std::string(other) +
                                   " is not in this build; this CPU runs: " + names_that_run());
    }
}
