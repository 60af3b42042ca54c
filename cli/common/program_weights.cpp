// --weights-on: weights on other devices, the cache packed in this machine's memory.

#include <algorithm>
#include <cstdio>
#include <optional>
#include <sstream>
#include <vector>

#include "common/model.h"
#include "common/options.h"
#include "common/process.h"
#include "common/program_options.h"
#include "common/terminal.h"

namespace lowkv::cli {

namespace {

struct Device {
    std::string name;
    std::string buffers;  // its buffer type, as -ot wants it
};

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> words;
    std::istringstream in(text);
    for (std::string word; std::getline(in, word, ',');) {
        std::erase(word, ' ');
        if (!word.empty()) words.push_back(word);
    }
    return words;
}

// Those that the program lists: "  CUDA0: NVIDIA H100 (81079 MiB, 80563 MiB free)". Of a device
// behind RPC, "  RPC1: 127.0.0.1:50052 (...)", the buffers are called "RPC0[127.0.0.1:50052]", by
// its number on that server.
std::vector<Device> devices_of(const Program& program) {
    std::vector<std::string> ask = {program.command[0]};
    if (program.options == 2) ask.push_back(program.command[1]);  // llama serve
    for (const std::string& servers : values_of(program, {"--rpc"}))
        ask.insert(ask.end(), {"--rpc", servers});
    ask.emplace_back("--list-devices");  // and ends there
    const Output listed = output_of(ask, true);
    if (listed.status != 0) {
        static_cast<void>(output_of(ask, false));  // for its messages
        throw UsageError("--weights-on: " + program.command[0] + " --list-devices failed");
    }
    std::vector<Device> found;
    std::istringstream in(listed.text);
    for (std::string line; std::getline(in, line);) {
        const std::size_t colon = line.find(": ");
        if (!line.starts_with("  ") || colon == std::string::npos) continue;
        const std::string name = line.substr(2, colon - 2);
        Device device{name, name};
        if (name.starts_with("RPC")) {
            const std::string server =
                "[" + line.substr(colon + 2, line.find(" (", colon) - colon - 2) + "]";
            const auto before = std::ranges::count_if(
                found, [&](const Device& other) { return other.buffers.ends_with(server); });
            device.buffers = "RPC" + std::to_string(before) + server;
        }
        if (name == "GPUOpenCL") device.buffers = "OpenCL";
        if (name != "LOWKV") found.push_back(device);
    }
    return found;
}

Device device_named(const std::string& name, const std::vector<Device>& all,
                    const Program& program) {
    const auto found = std::ranges::find(all, name, &Device::name);
    if (found != all.end()) return *found;
    std::vector<std::string> seen;
    std::string remedy = "is its llama.cpp built for your GPU?";
    for (const Device& device : all) seen.push_back(device.name);
    for (const std::string& servers : values_of(program, {"--rpc"}))
        remedy = "is its llama.cpp built with RPC, and does a server run at " + servers + "?";
    throw UsageError(
        "--weights-on " + name + ": the program sees no such device, " +
        (seen.empty() ? "nor any other but the CPU: " + remedy : "but " + joined(seen)));
}

// A pattern for the weights of layers [first, end); of all if there is no end.
std::string layers_pattern(std::uint32_t first, std::uint32_t end) {
    if (end == 0) return R"(blk\..*)";
    std::string numbers;
    for (std::uint32_t i = first; i < end; ++i)
        numbers += (numbers.empty() ? "" : "|") + std::to_string(i);
    return R"(blk\.()" + numbers + R"()\..*)";
}

void require_nothing_else(const Program& program) {
    for (const auto& [names, variable] : std::vector<std::pair<Words, const char*>>{
             {{"-dev", "--device"}, "LLAMA_ARG_DEVICE"},
             {{"-ngl", "--gpu-layers", "--n-gpu-layers"}, "LLAMA_ARG_N_GPU_LAYERS"},
             {{"-ts", "--tensor-split"}, "LLAMA_ARG_TENSOR_SPLIT"},
             {{"-sm", "--split-mode"}, "LLAMA_ARG_SPLIT_MODE"},
             {{"-mg", "--main-gpu"}, "LLAMA_ARG_MAIN_GPU"}})
        if (const std::string value = setting_of(program, names, variable); !value.empty())
            throw UsageError("--weights-on says where the weights go, and so does " +
                             std::string(names.front()) + " " + value + ": leave one of them out");
    if (has_draft_model(program))
        throw UsageError("--weights-on does not serve draft models: leave one of them out");
}

}  // namespace

void put_weights_on(Program& program, const std::string& names) {
    if (!program.common)
        throw UsageError(
            "--weights-on is for llama-server, llama-completion and those that take their "
            "options, not for " +
            program.name);
    require_nothing_else(program);
    const std::vector<Device> all = devices_of(program);
    std::vector<Device> devices;
    for (const std::string& name : split(names)) {
        if (std::ranges::count(devices, name, &Device::name) > 0)
            throw UsageError("--weights-on names " + name + " twice");
        devices.push_back(device_named(name, all, program));
    }
    if (devices.empty()) throw UsageError("--weights-on names no device");
    const std::string path = setting_of(program, {"-m", "--model"}, "LLAMA_ARG_MODEL");
    const std::optional<Model> model = model_without_weights(path);
    const std::uint32_t layers = model ? model->layers() : 0;
    const auto count = static_cast<std::uint32_t>(devices.size());
    if (layers == 0 && count > 1)
        throw UsageError("--weights-on shares out the model's layers, and " +
                         (path.empty() ? "there is no -m FILE to count them in: name one device"
                                       : path + " can't be read as a model"));
    if (layers == 0)
        std::fprintf(stderr,
                     "lowkv: without -m FILE the model's layers are not known: an output that is "
                     "the embedding, too, stays on the CPU\n");

    // llama.cpp puts a layer's cache on the layer's device: by their shares all layers are LOWKV's,
    // and the output, which comes behind them, is on the first of the others. -ot moves weights.
    std::string list = "LOWKV", shares = layers == 0 ? "1,0" : std::to_string(layers) + ",1";
    std::vector<std::string> patterns;
    for (std::uint32_t d = 0; d < count; ++d) {
        list += "," + devices[d].name;
        if (d > 0) shares += ",0";
        // The last pattern takes what is left: blocks that are no layers, too.
        const std::uint32_t end = d + 1 == count ? 0 : layers * (d + 1) / count;
        patterns.push_back(layers_pattern(layers * d / count, end) + "=" + devices[d].buffers);
    }
    if (layers == 0) patterns.push_back("output.*=" + devices[0].buffers);
    // The first pattern that fits a weight counts: the user's own come first.
    const Words ot = {"-ot", "--override-tensor"};
    std::vector<std::string> own = {setting_of(program, ot, "LLAMA_ARG_OVERRIDE_TENSOR")};
    if (has_any(program, ot)) own = take_values(program, ot);
    std::string overrides;
    for (const auto* list_of : {&own, &patterns})
        for (const std::string& pattern : *list_of)
            if (!pattern.empty()) overrides += (overrides.empty() ? "" : ",") + pattern;
    program.command.insert(program.command.end(),
                           {"-dev", list, "-ngl", "all", "-ts", shares, "-ot", overrides});
}

}  // namespace lowkv::cli
