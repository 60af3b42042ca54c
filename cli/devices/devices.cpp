// lowkv devices: where stores can be.

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "common/app.h"
#include "common/devices.h"
#include "common/terminal.h"

namespace lowkv::cli {
namespace {

constexpr const char* footer = R"(Examples:
  lowkv devices

A device's name is what the C++ library (opencl_device(), cuda_device()), the Python package (LOWKV_DEVICE) and `lowkv bench
attention --device` take: its words, in either case, or only some of them. The other commands and the plug-ins
keep their stores on the CPU. `lowkv doctor` has each device compute an example.)";

void list(int& status) {
    Table table({"device", "memory", "what it is"});
    const std::vector<FoundDevice> found = found_devices();
    for (const FoundDevice& device : found)
        table.add({device.name,
                   device.memory_bytes == 0 ? "the machine's" : bytes(device.memory_bytes),
                   device.what});
    const auto has = [&](const char* kind) {
        return std::ranges::any_of(
            found, [&](const FoundDevice& device) { return device.name.starts_with(kind); });
    };
    std::string note;
    if (!built_with_opencl)
        note = "This build has no OpenCL: configure it with -DLOWKV_OPENCL=ON.\n";
    else if (!has("opencl"))
        note = "No OpenCL platform has a device (clinfo -l lists what there is).\n";
    if (!built_with_cuda)
        note += "This build has no CUDA: configure it with -DLOWKV_CUDA=ON.\n";
    else if (!has("cuda"))
        note += "There is no CUDA device (nvidia-smi lists what there is).\n";
    std::fputs((table.text() + note).c_str(), stdout);
    status = 0;
}

}  // namespace

void add_devices(Command app, int& status) {
    Command command = app.add_command("devices", "List the devices that stores can be on", footer);
    command.callback([&status] { list(status); });
}

}  // namespace lowkv::cli
