// Devices by name, and what is said where there is none, or too little of it.

#include <doctest/doctest.h>

#include <cctype>
#include <functional>
#include <random>
#include <string>

#include "devices/device_case.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/opencl.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

void refuses(ErrorCode code, const std::string& words, const std::function<void()>& call) {
    try {
        call();
        FAIL_CHECK("nothing was refused");
    } catch (const Error& error) {
        INFO(std::string(error.what()));
        CHECK(error.code() == code);
        CHECK(std::string(error.what()).find(words) != std::string::npos);
    }
}

}  // namespace

TEST_CASE("a device is found by words of its name, in either case") {
    const std::vector<OpenClInfo> all = opencl_devices();
    REQUIRE(!all.empty());
    for (const OpenClInfo& info : all) {
        CHECK(info.memory_bytes > 0);
        CHECK(opencl_device("opencl:" + info.platform + " / " + info.device)->name() ==
              "opencl:" + info.platform + " / " + info.device);
    }
    std::string shouted = all.front().platform;
    for (char& c : shouted) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    CHECK(opencl_device("opencl:" + shouted)->name().find(all.front().platform) !=
          std::string_view::npos);
    CHECK(opencl_device("opencl:" + all.front().version)->name().starts_with("opencl:"));
}

TEST_CASE("a wrong name is refused with those that there are") {
    refuses(ErrorCode::device_failed, "no OpenCL device has 'no such thing'",
            [] { (void)opencl_device("opencl:no such thing"); });
    refuses(ErrorCode::device_failed, "opencl:" + opencl_devices().front().platform,
            [] { (void)opencl_device("opencl:no such thing"); });
    refuses(ErrorCode::device_failed, "'opencl' or 'opencl:NAME'",
            [] { (void)opencl_device("cuda"); });
}

TEST_CASE("too little memory is an error that leaves the device as it was") {
    const std::size_t all = opencl_devices().front().memory_bytes;
    for (const std::size_t bytes : {all + 1, std::size_t{1} << 62})
        refuses(ErrorCode::device_failed, "too little memory",
                [&] { DeviceMemory(device(), bytes); });
    const DeviceMemory some(device(), 1000);
    CHECK(some.data() != nullptr);
}

TEST_CASE("a quantizer without kernels is refused by name, before there is a block") {
    const auto store = std::make_shared<Store>(0, shared_device());
    const Scheme scheme = parse_scheme("k=token-4-g64-reorder-clip,v=token-2-g32");
    const auto plan = std::make_shared<const Plan>(neutral_plan(scheme.base, {2, 64}));
    refuses(ErrorCode::unsupported, "'row'", [&] { const Sequence sequence(store, plan, {}); });
    CHECK(store->stats().reserved_bytes == 0);
}

TEST_CASE("an address that is none of the device's makes it fail for good, and it says so") {
    const auto own = opencl_device(std::string(device().name()));
    std::byte bytes[64];
    own->clear(bytes, sizeof bytes);
    refuses(ErrorCode::device_failed,
            "was lost or failed in looking up an address outside its memory",
            [&] { own->allocate(64); });
    const Plan plan(parse_scheme("kivi2").base, {2, 64});
    refuses(ErrorCode::device_failed, "make a new device",
            [&] { own->encode(plan, {}, serial_executor()); });
    own->copy_out(bytes, bytes, sizeof bytes);
    CHECK(bytes[63] == std::byte{0});
}

TEST_CASE("of a device that has failed there are no rows and no image") {
    const auto own = opencl_device(std::string(device().name()));
    const auto store = std::make_shared<Store>(0, own);
    const auto plan = std::make_shared<const Plan>(parse_scheme("kivi2").base, Shape{1, 64});
    const std::vector<float> rows(64 * 64, 1.0f);
    const BatchRows given{rows.data(), RowType::f32, {0, 64 * 64, 64}};
    std::vector<std::uint16_t> found(64 * 64);
    const BatchRowsOut out{found.data(), {0, 64 * 64, 64}};
    Batch batch(store, plan, Retention{.window = 0, .sinks = 0}, 1);
    batch.append(given, given, 64);
    const std::vector<std::byte> image = batch.save();
    batch.read(0, 64, out, out);

    std::byte none[64];
    own->clear(none, sizeof none);
    refuses(ErrorCode::device_failed, "make a new device", [&] { (void)batch.save(); });
    refuses(ErrorCode::device_failed, "make a new device", [&] { batch.read(0, 64, out, out); });
    refuses(ErrorCode::device_failed, "make a new device", [&] { batch.pack(); });
    refuses(ErrorCode::device_failed, "make a new device",
            [&] { (void)Batch::load(image, store, plan, Retention{.window = 0, .sinks = 0}); });
    CHECK(batch.packed_end() == 0);
    CHECK(Batch::load(image, std::make_shared<Store>(), plan, Retention{.window = 0, .sinks = 0})
              .save() == image);
}
