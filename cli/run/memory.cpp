#include "run/checks.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <optional>
#include <system_error>

#include "common/machine.h"
#include "common/model_shape.h"
#include "common/terminal.h"
#include "lowkv/scheme.h"
#include "plan/model_cache.h"
#include "platform/group_limits.h"
#include "platform/memory.h"
#include "platform/system.h"

namespace lowkv::cli {

namespace {

constexpr double mebibyte = 1 << 20;
constexpr std::uint64_t usual_tokens = 4096;  // of a conversation that waits

// A conversation of usual_tokens that waits, in bytes.
struct Waiting {
    double f16 = 0, resident = 0, weights = 0;
};

// Once the zeros are given back; but the marks are in the keys of one layer, which stay numbers,
// and a block's codes end within a page. None for what can't be planned for.
std::optional<Waiting> waiting(const std::string& model, const std::string& scheme) {
    constexpr double page = 4096, parts = 2, f16_bits = 16;
    try {
        const ModelShape shape = gguf_shape(model);
        const StoredCache cache = packed_cache(shape, parse_scheme(scheme));
        const double f16 = held_bytes(idealised_cache(shape, f16_bits), usual_tokens);
        double layers = 0, blocks = 0;
        for (const StoredLayers& stored : cache) {
            layers += stored.layers;
            blocks += static_cast<double>(stored.layers) *
                      std::ceil(static_cast<double>(usual_tokens) / stored.block_tokens);
        }
        const double resident =
            held_bytes(cache, usual_tokens) + f16 / parts / layers + blocks * parts * page;
        if (f16 > 0) return Waiting{f16, std::min(resident, f16), shape.weights};
        return std::nullopt;
    } catch (const std::exception&) {
        return std::nullopt;  // the program says what is wrong with it
    }
}

std::string whole(double number) { return std::to_string(std::llround(number)); }

}  // namespace

std::string size_prompt_cache(Program& program, const std::string& scheme) {
    const ProgramOption option = {{"-cram", "--cache-ram"}, "LLAMA_ARG_CACHE_RAM"};
    const std::string given = setting_of(program, option);
    const double limit = given.empty() ? 8192 : std::strtod(given.c_str(), nullptr);
    if (program.name != "llama-server" || limit <= 0 || !environment("LOWKV_BUDGET").empty() ||
        !platform::releases_zeros)
        return "";
    const std::optional<Waiting> one = waiting(model_of(program), scheme);
    if (!one) return "";
    constexpr double least = 64;
    const double half = (static_cast<double>(available_memory()) - one->weights) / 2 / mebibyte;
    double counted = std::min(limit * one->f16 / one->resident, std::max(half, least));
    if (!given.empty()) counted = std::max(counted, limit);
    counted = std::floor(counted);
    if (counted == limit) return "";
    static_cast<void>(take_values(program, option.names));
    platform::set_environment(option.variable, whole(counted));
    const double conversations = std::floor(counted * mebibyte / one->f16);
    return "lowkv: -cram " + whole(counted) + " in place of " + whole(limit) +
           ", as llama-server counts f16's size: " + whole(conversations) +
           " conversations of 4,096 tokens that wait take " + bytes(conversations * one->resident) +
           "\n";
}

void leave_room_for_weights(const Program& program) {
    const std::uint64_t memory = platform::group_limits().memory;
    if (memory == UINT64_MAX || !program.common || !setting_of(program, fit_option).empty()) return;
    constexpr double least = 64, usual = 1024;
    std::error_code none;
    const double weights =
        static_cast<double>(std::filesystem::file_size(platform::path_of(model_of(program)), none));
    const double beside = std::clamp(static_cast<double>(memory) / mebibyte / 8, least, usual) +
                          (none ? 0 : weights / mebibyte);
    platform::set_environment(fit_option.variable, whole(std::ceil(beside)));
}

std::string text_of_kill(const std::string& name) {
    const std::uint64_t memory = platform::group_limits().memory;
    const std::string where = memory == UINT64_MAX ? ""
                                                   : " (this container may use " +
                                                         bytes(static_cast<double>(memory)) + ")";
    return "lowkv: " + name +
           " was killed (SIGKILL, status 137), as the system does when memory runs out" + where +
           ": take a smaller -c, -np or -cram, or give it more memory\n";
}

}  // namespace lowkv::cli
