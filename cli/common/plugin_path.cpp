#include "common/programs.h"

#include <dlfcn.h>

#include <filesystem>
#include <vector>

#include "common/terminal.h"
#include "ggml-backend.h"

namespace lowkv::cli {

std::string plugin_path() {
    std::string named = environment("LOWKV_PLUGIN");
    if (!named.empty()) return named;
    const std::filesystem::path here = executable_directory();
    const std::vector<std::filesystem::path> candidates = {
        here / "libggml-lowkv.so", here / "../lib/libggml-lowkv.so",
        here / "../lib/lowkv/libggml-lowkv.so", here / "../lib64/libggml-lowkv.so"};
    for (const auto& candidate : candidates) {
        if (std::filesystem::exists(candidate))
            return std::filesystem::weakly_canonical(candidate).string();
    }
    return candidates[1].lexically_normal().string();
}

std::string llama_tools_directory() {
    // llama.cpp builds its tools and its libraries into one folder.
    Dl_info info = {};
    if (dladdr(reinterpret_cast<const void*>(&ggml_backend_register), &info) == 0 ||
        info.dli_fname == nullptr) {
        return "";
    }
    const std::filesystem::path folder = std::filesystem::path(info.dli_fname).parent_path();
    return std::filesystem::exists(folder / "llama-server") ? folder.string() : "";
}

}  // namespace lowkv::cli
