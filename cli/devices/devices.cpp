// lowkv devices: where stores can be.

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "common/app.h"
#include "common/terminal.h"
#include "devices/names.h"

namespace lowkv::cli {
namespace {

constexpr const char* footer = R"(Examples:
  lowkv devices

A device's name is what the C++ library (opencl_device(), cuda_device()), `lowkv run --cache-on` and, by LOWKV_DEVICE, the
plug-in for llama.cpp and the Python package take: its words, in either case, or only some of them. `lowkv doctor` has
each device compute an example.)";

void list(int& status) {
    Table table({"device", "memory", "what it is"});
    const std::vector<FoundDevice> found = found_devices();
    for (const FoundDevice& device : found)
        table.add({device.name,
                   device.memory_bytes == 0 ? "the machine's" : bytes(device.memory_bytes),
                   device.what});
    show(table.text() + missing_devices(found));
    status = 0;
}

}  // namespace

void add_devices(Command app, int& status) {
    Command command = app.add_command("devices", "List the devices that stores can be on", footer);
    command.callback([&status] { list(status); });
}

}  // namespace lowkv::cli
