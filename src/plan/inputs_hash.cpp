#include "plan/plan_parts.h"

#include <span>
#include <vector>

#include "lowkv/calibration.h"
#include "lowkv/codec.h"
#include "xxh64.h"

namespace lowkv::codec {
namespace {

// docs/images.md has the order.
struct Bytes {
    std::vector<std::byte> all;

    template <class T>
    void add(const std::vector<T>& array) {
        const std::uint64_t count = array.size();
        append(std::as_bytes(std::span(&count, 1)));
        append(std::as_bytes(std::span(array)));
    }
    void append(std::span<const std::byte> bytes) {
        all.insert(all.end(), bytes.begin(), bytes.end());
    }
};

}  // namespace

std::uint64_t inputs_hash(const LayerScheme& scheme, const LayerInputs& inputs) {
    Bytes bytes;
    const auto add_part = [&](const Codec& codec, PartCalibration LayerCalibration::* part) {
        if (!codec.needs_calibration() || inputs.calibration == nullptr) return;
        const PartCalibration& all = inputs.calibration->*part;
        bytes.add(all.group);
        for (const auto* array : {&all.clip, &all.low, &all.high, &all.levels, &all.boundaries})
            bytes.add(*array);
    };
    add_part(scheme.key, &LayerCalibration::key);
    add_part(scheme.value, &LayerCalibration::value);
    if (scheme.key.stage == Stage::pre && inputs.rope != nullptr) {
        bytes.add(inputs.rope->frequencies);
        bytes.add(std::vector{inputs.rope->magnitude});
        bytes.add(std::vector{inputs.rope->pairs});
    }
    return bytes.all.empty() ? 0 : xxh64(bytes.all);
}

}  // namespace lowkv::codec
