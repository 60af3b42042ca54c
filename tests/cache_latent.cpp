// Layers of multi-head latent attention store keys alone: what is read as values is in them.

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <vector>

#include "cache_common.h"
#include "image_case.h"
#include "lowkv/error.h"
#include "lowkv/paged.h"
#include "lowkv/serial.h"
#include "sealed_device.h"

using namespace lowkv;
using cache_test::Rng;
using cache_test::Row;

namespace {

constexpr Shape shape{1, 96, 80};
constexpr Retention retention{.window = 40, .sinks = 5};

std::shared_ptr<const Plan> plan_of(const std::string& text, Shape its = shape) {
    const Scheme scheme = parse_scheme(text);
    return std::make_shared<const Plan>(scheme.base, its);
}

std::string error_of(auto f) {
    try {
        f();
    } catch (const Error& error) {
        return error.what();
    }
    return {};
}

void check_values(const Sequence& sequence) {
    for (std::uint32_t cell = 0; cell < sequence.size(); ++cell) {
        const Row key = cache_test::read_key(sequence, cell);
        Row value(shape.value_dim + 1, 7.0f);
        sequence.read_value(cell, value.data());
        REQUIRE(value.back() == 7.0f);
        value.pop_back();
        REQUIRE(value == Row(key.begin(), key.begin() + shape.value_dim));
    }
}

}  // namespace

TEST_CASE("a latent row is stored once, by the codec that a preset has for it") {
    const auto plan = plan_of("lowkv2.8", {1, 576, 512});
    CHECK(to_string(plan->scheme().key) == "sorted-3333-head-trellis-2rows-weighted");
    CHECK(plan->scheme().value.exact());
    CHECK(plan->values().bytes() == 0);
    CHECK(plan->packed_bytes() == plan->keys().bytes());
    CHECK(plan->bits_per_element() == plan->key_bits());
    CHECK(plan->key_bits() == 3.375);
    CHECK(plan->exact_bytes() == std::size_t{2} * 576 * plan->block_tokens());
    for (const char* same : {"lowkv1.5", "lowkv2", "lowkv3"})
        CHECK(plan_of(same)->scheme() == plan_of("lowkv2.8")->scheme());
    CHECK(to_string(plan_of("lowkv4")->scheme().key) == "sorted-4444-head-2rows-weighted");
    CHECK(plan_of("exact")->scheme().exact());
    // One that is spelled out is taken as it is.
    CHECK(to_string(plan_of("k=sorted-5320-head,v=token-2-g32")->scheme().key) ==
          "sorted-5320-head");
}

TEST_CASE("what can't be a latent layer is refused by name") {
    for (const char* scheme : {"turboquant3", "int4h"})
        CHECK(error_of([&] { plan_of(scheme); }).find("turns keys") != std::string::npos);
    for (const Shape wrong : {Shape{2, 96, 80}, Shape{1, 96, 112}, Shape{1, 96, 72}})
        CHECK(error_of([&] { plan_of("exact", wrong); }).find("of one head, a multiple of 16") !=
              std::string::npos);
    const auto plan = plan_of("lowkv3");
    const Row row(shape.channels());
    const std::uint32_t cell = 0;
    const Rows values{row.data(), RowType::f32, row.size(), row.size()};
    Blocks table(lowkv::test::make_store(),
                 std::make_shared<const Blocks::Ladder>(Blocks::Ladder{plan}));
    CHECK(error_of([&] { table.write({&cell, 1}, {}, values); }) ==
          "a latent layer's values are in its keys: write those alone");
    CHECK(error_of([&] {
              PagedLayer(lowkv::test::make_store(), plan, retention, 0, 128, PageMemory{}, 0);
          }).find("latent attention is not served in a host's pages") != std::string::npos);
}

TEST_CASE("values are read out of the keys, and an image has none") {
    for (const char* scheme : {"exact", "lowkv3", "int8", "lowkv4"}) {
        CAPTURE(scheme);
        Rng rng(4);
        const auto store = lowkv::test::make_store();
        const auto plan = plan_of(scheme);
        Sequence sequence(store, plan, retention);
        cache_test::append(sequence, rng, 300);
        sequence.pack();
        CHECK(sequence.packed(1) == !plan->scheme().exact());
        check_values(sequence);
        // A packed block is opened where it is cut and written again, and no other sees it.
        Sequence fork = sequence.fork();
        fork.truncate(200);
        cache_test::append(fork, rng, 60);
        check_values(fork);
        check_values(sequence);

        const std::vector<std::byte> image = save_sequence(sequence);
        CHECK(image.size() < 300 * 2 * shape.channels() + 4096);
        const Sequence loaded = load_sequence(image, lowkv::test::make_store(), plan, retention);
        CHECK(save_sequence(loaded) == image);
        check_values(loaded);
        const auto load_as = [&](Shape other) {
            return error_of([&] {
                load_sequence(image, lowkv::test::make_store(), plan_of(scheme, other), retention);
            });
        };
        CHECK(load_as({1, 96, 64}) == "image: values in the keys, channels: 80, not 64");
        CHECK(!load_as({1, 96}).empty());
    }
}
