#include "devices.h"

#include <mutex>
#include <set>

#include "lowkv/error.h"
#ifdef LOWKV_WITH_OPENCL
#include "lowkv/opencl.h"
#endif
#ifdef LOWKV_WITH_CUDA
#include "lowkv/cuda.h"
#endif

namespace lowkv::ggml {
namespace {

bool is(const std::string& name, const std::string& kind) {
    return name == kind || name.starts_with(kind + ":");
}
bool is_cpu(const std::string& name) { return name.empty() || name == "cpu"; }

#ifdef LOWKV_WITH_OPENCL
constexpr bool has_opencl = true;
#else
constexpr bool has_opencl = false;
std::shared_ptr<Device> opencl_device(std::string_view) { return nullptr; }
#endif
#ifdef LOWKV_WITH_CUDA
constexpr bool has_cuda = true;
#else
constexpr bool has_cuda = false;
std::shared_ptr<Device> cuda_device(std::string_view) { return nullptr; }
#endif

void require(bool has, const std::string& name, const char* option) {
    if (!has)
        throw Error(ErrorCode::unsupported, "device '" + name +
                                                "': this build has none such; configure one with "
                                                "-D" +
                                                option + "=ON (docs/cache-on-a-gpu.md)");
}

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

void check_device_name(const std::string& name) {
    if (is(name, "opencl")) return require(has_opencl, name, "LOWKV_OPENCL");
    if (is(name, "cuda")) return require(has_cuda, name, "LOWKV_CUDA");
    if (!is_cpu(name))
        throw Error(ErrorCode::unsupported, "there is no device '" + name +
                                                "': it is 'cpu', 'opencl', 'opencl:NAME', 'cuda' "
                                                "or 'cuda:NUMBER'; `lowkv devices` lists what is "
                                                "there");
}

std::shared_ptr<Device> device_by_name(const std::string& name) {
    check_device_name(name);
    if (is_cpu(name)) return cpu_device();
    return shared_device(name, is(name, "cuda") ? cuda_device : opencl_device);
}

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
