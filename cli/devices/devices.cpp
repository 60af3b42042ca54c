// lowkv devices: where stores can be.

#include <cstdio>
#include <string>

#include "common/app.h"
#include "common/terminal.h"
#include "lowkv/implementation.h"
#ifdef LOWKV_WITH_OPENCL
#include "lowkv/opencl.h"
#endif

namespace lowkv::cli {
namespace {

constexpr const char* footer = R"(Examples:
  lowkv devices

A device's name is what the C++ library (opencl_device()) and the Python package (LOWKV_DEVICE) take: its
words, in either case, or only some of them. The commands and the plug-ins keep their stores on the CPU.)";

void list(int& status) {
    const Implementation& own = active_implementation();
    Table table({"device", "memory", "what it is"});
    table.add({"cpu", "the machine's", "kernels for " + std::string(own.name)});
    std::string note = "This build has no OpenCL: configure it with -DLOWKV_OPENCL=ON.\n";
#ifdef LOWKV_WITH_OPENCL
    const std::vector<OpenClInfo> found = opencl_devices();
    for (const OpenClInfo& info : found)
        table.add({"opencl:" + info.platform + " / " + info.device,
                   bytes(static_cast<double>(info.memory_bytes)), info.version});
    note =
        found.empty() ? "No OpenCL platform has a device (clinfo -l lists what there is).\n" : "";
#endif
    std::fputs((table.text() + note).c_str(), stdout);
    status = 0;
}

}  // namespace

void add_devices(CLI::App& app, int& status) {
    CLI::App* command = app.add_subcommand("devices", "List the devices that stores can be on");
    command->footer(footer);
    command->callback([&status] { list(status); });
}

}  // namespace lowkv::cli
