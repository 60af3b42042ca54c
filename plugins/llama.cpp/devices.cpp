#include "devices.h"

#include <mutex>
#include <set>

namespace lowkv::ggml {
namespace {

// Never destroyed: programs make and free caches while they end.
struct Kept {
    std::mutex mutex;
    std::set<std::shared_ptr<Device>> devices{cpu_device()};
};
Kept& kept() {
    static auto& instance = *new Kept;
    return instance;
}

}  // namespace

std::shared_ptr<Device> kept_device(const std::string& name) {
    std::shared_ptr<Device> device = device_by_name(name);
    const std::scoped_lock lock(kept().mutex);
    kept().devices.insert(device);
    return device;
}

std::uint64_t saturated_numbers() {
    const std::scoped_lock lock(kept().mutex);
    std::uint64_t numbers = 0;
    for (const auto& device : kept().devices) numbers += device->saturated();
    return numbers;
}

}  // namespace lowkv::ggml
