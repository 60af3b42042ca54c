// Which devices there are, and the one that is asked for.

#include <algorithm>
#include <cctype>

#include "devices/host/device.h"
#include "lowkv/error.h"
#include "lowkv/opencl.h"
#include "queue.h"

namespace lowkv {
namespace {

struct Found {
    cl_device_id id;
    bool gpu;
    OpenClInfo info;
    std::string name() const { return info.platform + " / " + info.device; }
};

std::string text_of(cl_device_id device, cl_device_info what) {
    return opencl::text_by([&](auto... to) { clGetDeviceInfo(device, what, to...); });
}

std::vector<Found> find_devices() {
    cl_uint count = 0;
    if (clGetPlatformIDs(0, nullptr, &count) != CL_SUCCESS) return {};
    std::vector<cl_platform_id> platforms(count);
    clGetPlatformIDs(count, platforms.data(), nullptr);
    std::vector<Found> found;
    for (cl_platform_id platform : platforms) {
        cl_uint devices = 0;
        if (clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 0, nullptr, &devices) != CL_SUCCESS)
            continue;
        std::vector<cl_device_id> ids(devices);
        clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, devices, ids.data(), nullptr);
        const std::string name = opencl::text_by(
            [&](auto... to) { clGetPlatformInfo(platform, CL_PLATFORM_NAME, to...); });
        for (cl_device_id id : ids) {
            found.push_back(
                {id,
                 (opencl::info<cl_device_type>(id, CL_DEVICE_TYPE) & CL_DEVICE_TYPE_GPU) != 0,
                 {name, text_of(id, CL_DEVICE_NAME), text_of(id, CL_DEVICE_VERSION),
                  opencl::info<cl_ulong>(id, CL_DEVICE_GLOBAL_MEM_SIZE)}});
        }
    }
    return found;
}

std::string lower(std::string_view text) {
    std::string result(text);
    std::ranges::transform(result, result.begin(),
                           [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return result;
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... message) {
    throw Error(ErrorCode::device_failed, message...);
}

const Found& choose(const std::vector<Found>& found, std::string_view name) {
    constexpr std::string_view prefix = "opencl";
    const bool any = name == prefix;
    if (!any && !name.starts_with("opencl:"))
        fail("device '", name, "': an OpenCL device is 'opencl' or 'opencl:NAME'");
    if (found.empty())
        fail(
            "there is no OpenCL device: no platform has one. Install a driver (for the CPU, on "
            "Debian: apt-get install pocl-opencl-icd); clinfo -l lists what there is");
    if (any) {
        const auto gpu = std::ranges::find(found, true, &Found::gpu);
        return gpu != found.end() ? *gpu : found.front();
    }
    const std::string words = lower(name.substr(prefix.size() + 1));
    std::string all;
    for (const Found& device : found) {
        // PoCL says that it is PoCL in its version only.
        if (lower(device.name() + ' ' + device.info.version).find(words) != std::string::npos)
            return device;
        all += "\n  opencl:" + device.name();
    }
    fail("no OpenCL device has '", words, "' in its name or version; there is:", all);
}

}  // namespace

std::vector<OpenClInfo> opencl_devices() {
    std::vector<OpenClInfo> infos;
    for (Found& device : find_devices()) infos.push_back(std::move(device.info));
    return infos;
}

std::shared_ptr<Device> opencl_device(std::string_view name) {
    const std::vector<Found> found = find_devices();
    const Found& chosen = choose(found, name);
    return devices::make_device(std::make_unique<opencl::Queue>(chosen.id, chosen.name()),
                                "opencl:" + chosen.name());
}

}  // namespace lowkv
