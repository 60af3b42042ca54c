// --weights-on: weights on other devices, the cache packed in this machine's memory.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <sstream>
#include <vector>

#include "common/machine.h"
#include "common/model.h"
#include "common/process.h"
#include "common/program_options.h"
#include "common/terminal.h"
#include "lowkv/error.h"

namespace lowkv::cli {

namespace {

struct Device {
    std::string name;
    std::string buffers;  // its buffer type, as -ot wants it
    double share = 1;     // of the layers, beside the other devices' shares
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

// The words that start the program: "llama-server", "llama serve".
std::vector<std::string> program_words(const Program& program) {
    const auto first = program.command.begin();
    return {first, first + static_cast<std::ptrdiff_t>(program.options)};
}

// The devices that the program lists: "  CUDA0: NVIDIA H100 (81079 MiB, 80563 MiB free)". Of a
// device behind RPC, "  RPC1: 127.0.0.1:50052 (...)", the buffers are called
// "RPC0[127.0.0.1:50052]": the number is the device's on that server.
std::vector<Device> devices_of(const Program& program) {
    std::vector<std::string> ask = program_words(program);
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
            device.buffers = concat("RPC", before, server);
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

// "CUDA0" or "CUDA0=2".
Device device_in(const std::string& word, const std::vector<Device>& all, const Program& program) {
    const std::size_t equals = word.find('=');
    Device device = device_named(word.substr(0, equals), all, program);
    if (equals == std::string::npos) return device;
    char* end = nullptr;
    device.share = std::strtod(word.c_str() + equals + 1, &end);
    if (*end == '\0' && std::isfinite(device.share) && device.share > 0) return device;
    throw UsageError("--weights-on " + word + ": a share is a number above 0, as in " +
                     device.name + "=2");
}

// A pattern for the weights of layers [first, end) whose names begin so; of all layers if there is
// no end.
std::string layers_pattern(std::uint32_t first, std::uint32_t end, const std::string& weight) {
    if (end == 0) return R"(blk\..*)";
    std::string numbers;
    for (std::uint32_t i = first; i < end; ++i) numbers += concat(numbers.empty() ? "" : "|", i);
    return R"(blk\.()" + numbers + R"()\.)" + weight + ".*";
}

void require_nothing_else(const Program& program) {
    for (const ProgramOption& option :
         {device_option, layers_option,
          ProgramOption{{"-ts", "--tensor-split"}, "LLAMA_ARG_TENSOR_SPLIT"}, split_option,
          ProgramOption{{"-mg", "--main-gpu"}, "LLAMA_ARG_MAIN_GPU"}})
        if (const std::string source = source_of(program, option); !source.empty())
            throw UsageError("--weights-on says where the weights go, and so does " + source +
                             ": leave one of them out");
    if (const std::string source = draft_model_source(program); !source.empty())
        throw UsageError("--weights-on does not serve draft models, and there is " + source +
                         ": leave one of them out");
}

// llama.cpp puts a projector on the first device that it is given, which is LOWKV: then its weights
// would be copied for every image. Programs without the option take a GPU by themselves.
void put_projector_on(Program& program, const std::string& device) {
    if (!setting_of(program, {{"-mmdev", "--mmproj-device"}, "MTMD_BACKEND_DEVICE"}).empty() ||
        has_any(program, {"--no-mmproj-offload"}) ||
        !environment("LLAMA_ARG_MMPROJ_OFFLOAD").empty())
        return;
    std::vector<std::string> ask = program_words(program);
    ask.emplace_back("--help");
    if (output_of(ask, true).text.find("--mmproj-device") != std::string::npos)
        program.command.insert(program.command.end(), {"-mmdev", device});
}

std::vector<Device> chosen_devices(const Program& program, const std::string& names) {
    const std::vector<Device> all = devices_of(program);
    std::vector<Device> devices;
    for (const std::string& word : split(names)) {
        devices.push_back(device_in(word, all, program));
        if (std::ranges::count(devices, devices.back().name, &Device::name) > 1)
            throw UsageError("--weights-on names " + devices.back().name + " twice");
    }
    if (devices.empty()) throw UsageError("--weights-on names no device");
    return devices;
}

// The patterns by which -ot puts each device's share of the layers there; 0 layers: not known.
std::vector<std::string> weight_patterns(const std::vector<Device>& devices,
                                         const std::optional<Model>& model, std::uint32_t layers) {
    std::vector<std::string> patterns;
    // Layers that read another's cache are attended to where their queries' norm is.
    const std::uint32_t own_cache = model ? model->layers_with_cache() : 0;
    if (own_cache < layers)
        patterns.push_back(layers_pattern(own_cache, layers, "attn_q_norm") + "=CPU");
    double total = 0, before = 0;
    for (const Device& device : devices) total += device.share;
    std::uint32_t first = 0;
    for (const Device& device : devices) {
        before += device.share;
        const auto end = static_cast<std::uint32_t>(std::lround(layers * before / total));
        if (layers > 0 && end == first)
            throw UsageError(concat("--weights-on gives ", device.name, " none of the ", layers,
                                    " layers: leave it out, or raise its share"));
        // The last pattern takes what is left: blocks that are no layers, too.
        const bool last = &device == &devices.back();
        patterns.push_back(layers_pattern(first, last ? 0 : end, "") + "=" + device.buffers);
        first = end;
    }
    if (layers == 0) patterns.push_back("output.*=" + devices[0].buffers);
    return patterns;
}

}  // namespace

void put_weights_on(Program& program, const std::string& names) {
    if (!program.common)
        throw UsageError(
            "--weights-on is for llama-server, llama-completion and those that take their "
            "options, not for " +
            program.name);
    require_nothing_else(program);
    const std::vector<Device> devices = chosen_devices(program, names);
    const std::string path = model_of(program);
    const std::optional<Model> model = model_without_weights(path);
    const std::uint32_t layers = model ? model->layers() : 0;
    if (layers == 0 && devices.size() > 1)
        throw UsageError("--weights-on shares out the model's layers, and " +
                         (path.empty() ? "there is no -m FILE to count them in: name one device"
                                       : path + " can't be read as a model"));
    if (layers == 0)
        std::fprintf(stderr,
                     "lowkv: without -m FILE the model's layers are not known: an output that is "
                     "the embedding, too, stays on the CPU\n");

    // llama.cpp puts a layer's cache on the layer's device: by their shares all layers are LOWKV's,
    // and the output, which comes behind them, is on the first of the others. -ot moves weights.
    std::string list = "LOWKV", shares = layers == 0 ? "1,0" : concat(layers, ",1");
    for (const Device& device : devices) {
        list += "," + device.name;
        if (&device != devices.data()) shares += ",0";
    }
    // The first pattern that fits a weight counts: the user's own come first.
    std::vector<std::string> patterns = {setting_of(program, override_option)};
    if (has_any(program, override_option.names))
        patterns = take_values(program, override_option.names);
    std::ranges::copy(weight_patterns(devices, model, layers), std::back_inserter(patterns));
    std::string overrides;
    for (const std::string& pattern : patterns)
        if (!pattern.empty()) overrides += (overrides.empty() ? "" : ",") + pattern;
    program.command.insert(program.command.end(),
                           {"-dev", list, "-ngl", "all", "-ts", shares, "-ot", overrides});
    put_projector_on(program, devices[0].name);
}

}  // namespace lowkv::cli
