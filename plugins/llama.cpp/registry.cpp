// The backend's entry points: registry, device, and the functions of lowkv_ggml.h.

#include "registry.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <string>

#include "buffer.h"
#include "devices.h"
#include "host.h"
#include "live_buffers.h"
#include "lowkv/error.h"
#include "platform/group_limits.h"
#include "platform/system.h"
#include "report.h"
#include "settings.h"

namespace lowkv::ggml {
namespace {

constexpr const char* name = "LOWKV";
const char* description() {
    static const std::string device = platform::environment("LOWKV_DEVICE");
    static const std::string text =
        "lowkv low-bit KV cache (" + (device.empty() ? "CPU" : device) + ")";
    return text.c_str();
}

ggml_backend_dev_t cpu_device() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

// The host's, wherever the cache is: a small number would make llama.cpp's --fit move it back. In a
// container what that leaves of it, so that --fit plans for the container.
void device_memory(ggml_backend_dev_t, std::size_t* free, std::size_t* total) {
    *free = *total = 0;
    if (ggml_backend_dev_t cpu = cpu_device(); cpu != nullptr)
        ggml_backend_dev_memory(cpu, free, total);
    const platform::GroupLimits limits = platform::group_limits();
    *free = std::min<std::size_t>(*free, limits.free_memory);
    *total = std::min<std::size_t>(*total, limits.memory);
}

// Integrated: llama.cpp uses it by itself when there is no discrete GPU, and drops it otherwise.
constexpr enum ggml_backend_dev_type device_type = GGML_BACKEND_DEVICE_TYPE_IGPU;

// Before ggml 0.20 the structure ends without mmap_support, which then lies in its padding.
static_assert(sizeof(ggml_backend_dev_caps) <= alignof(ggml_backend_dev_props));

void device_props(ggml_backend_dev_t dev, ggml_backend_dev_props* props) {
    *props = {};
    props->name = name;
    props->description = description();
    props->type = device_type;
    device_memory(dev, &props->memory_free, &props->memory_total);
    // Without it llama.cpp turns mmap off for the whole model.
    props->caps.mmap_support = true;
}

std::atomic<bool> used{false};  // by some context

ggml_backend_t device_init(ggml_backend_dev_t, const char*) {
    used = true;
    // A wrong LOWKV_SCHEME or LOWKV_IMPLEMENTATION ends here: no context can be made, so no tool
    // runs on a plain cache without noticing. (Refusing to load would not do: llama-bench would go
    // on with stock f16.)
    if (setting() == nullptr) {
        report_once(GGML_LOG_LEVEL_ERROR, setting_error());
        return nullptr;
    }
    try {
        kept_device(setting()->device);
    } catch (const std::exception& error) {
        report_once(GGML_LOG_LEVEL_ERROR, concat("LOWKV_DEVICE: ", error.what()));
        return nullptr;
    }
    return new_backend();
}

// Host memory as well: queries, masks and row numbers are read where the CPU backend left them.
bool device_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return type == buffer_type() || ggml_backend_buft_is_host(type);
}

constexpr ggml_backend_device_i device_interface = [] {
    ggml_backend_device_i served{};
    served.get_name = [](ggml_backend_dev_t) { return name; };
    served.get_description = [](ggml_backend_dev_t) { return description(); };
    served.get_memory = device_memory;
    served.get_type = [](ggml_backend_dev_t) { return device_type; };
    served.get_props = device_props;
    served.init_backend = device_init;
    served.get_buffer_type = [](ggml_backend_dev_t) { return buffer_type(); };
    served.supports_op = [](ggml_backend_dev_t, const ggml_tensor* op) { return supports_op(op); };
    served.supports_buft = device_supports_buft;
    served.offload_op = [](ggml_backend_dev_t, const ggml_tensor* op) { return offload_op(op); };
    return served;
}();

ggml_backend_dev_t reg_device(ggml_backend_reg_t, std::size_t index) {
    return index == 0 ? device() : nullptr;
}

void* reg_proc_address(ggml_backend_reg_t, const char* function) {
    if (std::strcmp(function, "ggml_backend_set_n_threads") == 0)
        return reinterpret_cast<void*>(set_threads);
    if (std::strcmp(function, "ggml_backend_set_abort_callback") == 0)
        return reinterpret_cast<void*>(set_abort_callback);
    // Of -sm row, which then says that the device has none.
    if (std::strcmp(function, "ggml_backend_split_buffer_type") == 0)
        report_once(
            GGML_LOG_LEVEL_ERROR,
            "-sm row splits rows among devices, and LOWKV holds whole layers only: leave it out");
    return nullptr;
}

ggml_backend_reg& registry() {
    static ggml_backend_reg reg = {
        .api_version = host_api(),
        .iface = {.get_name = [](ggml_backend_reg_t) { return name; },
                  .get_device_count = [](ggml_backend_reg_t) { return std::size_t{1}; },
                  .get_device = reg_device,
                  .get_proc_address = reg_proc_address},
        .context = nullptr,
    };
    return reg;
}

// Last chance to be loud: somebody loaded the plug-in, and nothing was packed. Of a context that
// has the device every operation is known, so that a model without a cache (an encoder) is known
// for one. Of others nothing is known: they may not be there at all, as in a program that has
// failed and said why.
void warn_if_unused(int status) {
    if (any_cache_made() || setting() == nullptr) return;
    if (layers_elsewhere() > 0)
        report(GGML_LOG_LEVEL_WARN,
               "NOT active: no KV cache was placed on the device LOWKV. Is one of -nkvo, -ngl 0 or "
               "a GPU in the way?");
    else if (!used && status == 0)
        report(GGML_LOG_LEVEL_INFO,
               "nothing was packed, as no context used the device LOWKV: name it by -dev LOWKV if "
               "this program itself runs a model");
}

// What it does when the process ends must still be there when a host has unloaded it.
bool watch_exit() {
    platform::keep_loaded(reinterpret_cast<const void*>(&warn_if_unused));
    return platform::at_exit(warn_if_unused);
}

ggml_backend_reg_t load() {
    if (const std::string problem = misfit(); !problem.empty()) {
        report(GGML_LOG_LEVEL_ERROR, problem);
        return nullptr;
    }
    choose_from_environment();
    if (setting() == nullptr) report_once(GGML_LOG_LEVEL_ERROR, setting_error());
    return &registry();
}

}  // namespace

ggml_backend_dev_t device() {
    static ggml_backend_device dev = {
        .iface = device_interface, .reg = &registry(), .context = nullptr};
    return &dev;
}

ggml_backend_reg_t backend_reg() {
    report_to_log(true);
    if (setting() == nullptr) set_scheme(std::string(default_scheme));
    return &registry();
}

// Of programs that link the backend only the command chooses schemes that need a calibration.
void set_scheme(const std::string& text) { choose(text, "--calibration or LOWKV_CALIBRATION"); }

CacheStats stats() {
    CacheStats stats;
    for_each_live([&](const LiveBuffer& buffer) { buffer.add_stats(stats); });
    return stats;
}

}  // namespace lowkv::ggml

extern "C" {
// What ggml_backend_load() and GGML_BACKEND_PATH look for.
GGML_BACKEND_API ggml_backend_reg_t ggml_backend_init(void) {
    ggml_backend_reg_t reg = lowkv::ggml::load();
    // ggml loads its backends again whenever a tool asks for them.
    static const bool watching = reg != nullptr && lowkv::ggml::watch_exit();
    static_cast<void>(watching);
    return reg;
}
}
