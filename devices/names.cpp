#include "devices/names.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "lowkv/error.h"
#ifdef LOWKV_WITH_OPENCL
#include "lowkv/opencl.h"
#endif
#ifdef LOWKV_WITH_CUDA
#include "lowkv/cuda.h"
#endif

namespace lowkv {
namespace {

struct Kind {
    std::string_view word, option;  // with CMake's option it is in a build
    std::string_view none;          // what to say where the machine has no such device
    // Null: this build was made without them.
    std::shared_ptr<Device> (*make)(std::string_view name) = nullptr;
    void (*find)(std::vector<std::string>& found) = nullptr;

    bool names(std::string_view name) const { return name.substr(0, name.find(':')) == word; }
};

constexpr Kind kinds[] = {
    {"opencl", "-DLOWKV_OPENCL=ON",
     "No OpenCL platform has a device (clinfo -l lists what there is). ",
#ifdef LOWKV_WITH_OPENCL
     opencl_device,
     [](std::vector<std::string>& found) {
         for (const OpenClInfo& i : opencl_devices())
             found.push_back("opencl:" + i.platform + " / " + i.device);
     }
#endif
    },
    {"cuda", "-DLOWKV_CUDA=ON", "There is no CUDA device (nvidia-smi lists what there is). ",
#ifdef LOWKV_WITH_CUDA
     cuda_device,
     [](std::vector<std::string>& found) {
         for (std::size_t number = 0; number < cuda_devices().size(); ++number)
             found.push_back(concat("cuda:", number));
     }
#endif
    }};

// Null: the CPU.
const Kind* kind_of(const std::string& name) {
    if (name == "cpu") return nullptr;
    const auto kind = std::ranges::find_if(kinds, [&](const Kind& k) { return k.names(name); });
    if (kind == std::end(kinds))
        throw Error(ErrorCode::unsupported, "there is no device '", name,
                    "': it is 'cpu', 'opencl', 'opencl:NAME', 'cuda' or 'cuda:NUMBER'; "
                    "`lowkv doctor` lists what is there");
    if (kind->make == nullptr)
        throw Error(ErrorCode::unsupported, "device '", name,
                    "': this build has none such; configure one with ", kind->option,
                    " (docs/devices.md)");
    return kind;
}

}  // namespace

void check_device_name(const std::string& name) { kind_of(name); }

std::shared_ptr<Device> device_by_name(const std::string& name) {
    const Kind* kind = kind_of(name);
    return kind == nullptr ? cpu_device() : shared_device(name, kind->make);
}

std::vector<std::string> found_devices() {
    std::vector<std::string> found;
    for (const Kind& kind : kinds)
        if (kind.find != nullptr) kind.find(found);
    return found;
}

std::string missing_devices(const std::vector<std::string>& found) {
    std::string text;
    for (const Kind& kind : kinds) {
        if (std::ranges::any_of(found, [&](const auto& name) { return kind.names(name); }))
            continue;
        text += kind.find != nullptr ? std::string(kind.none)
                                     : concat("This build has no device '", kind.word,
                                              "': configure it with ", kind.option, ". ");
    }
    return text;
}

}  // namespace lowkv
