// Images of row codecs: positions of keys before RoPE, calibrations and ropes.

#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "batch_common.h"
#include "cache_common.h"
#include "image_case.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "lowkv/serial.h"
#include "sealed_device.h"

using namespace lowkv;
using batch_test::all_rows;
using batch_test::fill;
using cache_test::Rng;
using cache_test::Row;
using image_test::Bytes;

namespace {

constexpr Shape shape{2, 64};
constexpr Retention retention{.window = 40, .sinks = 5};

Sequence sequence_of(const char* scheme) {
    return {lowkv::test::make_store(),
            std::make_shared<const Plan>(image_test::plan_of(parse_scheme(scheme).base, shape)),
            retention};
}

// What load_sequence() throws.
std::string refusal(const Bytes& image, const Plan& plan) {
    try {
        load_sequence(image, lowkv::test::make_store(), std::make_shared<const Plan>(plan),
                      retention);
    } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::invalid_image);
        return error.what();
    }
    return "";
}

}  // namespace

TEST_CASE("positions come back") {
    Rng rng(4);
    Sequence sequence = sequence_of("kvquant2");
    const Row rows = cache_test::random_rows(rng, 200, shape.channels());
    std::vector<std::int32_t> positions(200);
    for (int i = 0; i < 200; ++i) positions[static_cast<std::size_t>(i)] = 3 * i - 7;
    sequence.append(rows.data(), rows.data(), 200, positions);
    sequence.pack();
    const Bytes image = save_sequence(sequence);
    const Sequence again = load_sequence(image, lowkv::test::make_store(),
                                         std::make_shared<const Plan>(sequence.plan()), retention);
    for (std::uint32_t cell = 0; cell < 200; ++cell) CHECK(again.position(cell) == positions[cell]);
    for (std::uint32_t cell = 0; cell < 200; cell += 29)
        CHECK(cache_test::read_key(again, cell) == cache_test::read_key(sequence, cell));
    CHECK(save_sequence(again) == image);
}

TEST_CASE("rows packed by another calibration or another rope are refused") {
    Rng rng(5);
    Sequence sequence = sequence_of("kvquant2");
    cache_test::append(sequence, rng, 300);
    sequence.pack();
    const Bytes image = save_sequence(sequence);
    const LayerScheme scheme = parse_scheme("kvquant2").base;
    CHECK(refusal(image, image_test::plan_of(scheme, shape)).empty());
    const auto is_refused = [&](const LayerCalibration& calibration, const Rope* rope) {
        const std::string said = refusal(image, Plan(scheme, shape, {}, 0, {&calibration, rope}));
        CHECK_MESSAGE(said.find("another calibration or another rope") != std::string::npos, said);
    };
    LayerCalibration calibration = neutral_calibration(scheme, shape);
    const Rope its = image_test::rope(), turned = image_test::rope(0.8f);
    is_refused(calibration, &turned);
    is_refused(calibration, nullptr);
    calibration.key.high[5] = 4.5f;
    is_refused(calibration, &its);
}

TEST_CASE("keys that know their positions keep them") {
    const auto store = lowkv::test::make_store();
    const auto plan =
        std::make_shared<const Plan>(image_test::plan_of(parse_scheme("skvq-k4v4").base, {2, 64}));
    REQUIRE(plan->has_positions());
    const Retention retention{.window = 10, .sinks = 3};
    Batch batch(store, plan, retention, 2);
    fill(batch, 1, 100);
    batch.pack();
    Batch again = Batch::load(batch.save(), store, plan, retention);
    CHECK(again.save() == batch.save());
    CHECK(all_rows(again) == all_rows(batch));
    Sequence sequence(store, plan, retention);
    cache_test::Rng rng(4);
    cache_test::append(sequence, rng, 90);
    sequence.pack();
    CHECK(save_sequence(load_sequence(save_sequence(sequence), store, plan, retention)) ==
          save_sequence(sequence));
}
