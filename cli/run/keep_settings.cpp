// The settings that conversations of lowkv run --keep depend on.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <ranges>
#include <span>
#include <system_error>

#include "common/machine.h"
#include "common/terminal.h"
#include "lowkv/error.h"
#include "lowkv/serial.h"
#include "platform/system.h"
#include "run/keep.h"

namespace lowkv::cli {

namespace {

Words words_of(std::string_view text) {
    Words words;
    for (const auto word : std::views::split(text, ' '))
        words.emplace_back(word.begin(), word.end());
    return words;
}

// Options without an influence on what a slot holds. Any other is taken for one that has.
const Words& harmless() {
    static const Words words = words_of(
        "-m --model -a --alias --host --port --api-key --api-key-file --api-prefix -t --threads "
        "-tb --threads-batch --threads-http -np --parallel -cram --cache-ram --no-cache-idle-slots "
        "-to --timeout --sleep-idle-seconds --no-webui --no-ui --metrics --slots --props -v "
        "--verbose -lv --verbosity --log-file --log-prefix --log-timestamps --log-colors --warmup "
        "--no-warmup --prio --poll --mlock -dev --device");
    return words;
}

// Variables with one.
const Words& shaping() {
    static const Words words = words_of(
        "LLAMA_ARG_CTX_SIZE LLAMA_ARG_ROPE_SCALING_TYPE LLAMA_ARG_ROPE_SCALE "
        "LLAMA_ARG_ROPE_FREQ_BASE LLAMA_ARG_ROPE_FREQ_SCALE LLAMA_ARG_YARN_ORIG_CTX "
        "LLAMA_ARG_YARN_EXT_FACTOR LLAMA_ARG_YARN_ATTN_FACTOR LLAMA_ARG_YARN_BETA_SLOW "
        "LLAMA_ARG_YARN_BETA_FAST LLAMA_ARG_SWA_FULL LLAMA_ARG_MMPROJ LLAMA_ARG_SPEC_DRAFT_MODEL "
        "LOWKV_BUDGET LOWKV_CALIBRATION LOWKV_DEVICE LOWKV_STATES");
    return words;
}

// The size and a checksum of 64 pieces, the first and the last among them: a fine-tuned model
// differs everywhere, and reading gigabytes would take as long as to load them.
std::string fingerprint(const std::string& path) {
    constexpr std::uintmax_t piece = 1 << 16, pieces = 64;
    std::error_code none;
    const std::uintmax_t size = std::filesystem::file_size(platform::path_of(path), none);
    std::ifstream file(platform::path_of(path), std::ios::binary);
    if (none || !file) throw UsageError("--keep: there is no file " + path);
    std::string bytes(piece * pieces, '\0');
    for (std::uintmax_t i = 0; i < pieces; ++i) {
        file.clear();
        const std::uintmax_t last = size - std::min(size, piece);
        file.seekg(static_cast<std::streamoff>(last / (pieces - 1) * i +
                                               (i + 1 == pieces ? last % (pieces - 1) : 0)));
        file.read(&bytes[piece * i], static_cast<std::streamsize>(std::min(piece, size)));
    }
    return concat(size, " bytes, ", hexadecimal(image_checksum(std::as_bytes(std::span(bytes)))));
}

bool is_option(const std::string& word) {
    return word.size() > 1 && word[0] == '-' && (word[1] < '0' || word[1] > '9');
}

}  // namespace

std::string hexadecimal(std::uint64_t number) {
    std::array<char, 17> text{};
    std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(number));
    return text.data();
}

std::vector<std::string> kept_settings(const Program& program, const std::string& scheme,
                                       const std::vector<std::string>& calibrations) {
    const std::string model = model_of(program);
    if (model.empty()) throw UsageError("--keep needs the model's file: name it with -m");
    std::vector<std::string> settings = {"model: " + fingerprint(model), "scheme: " + scheme,
                                         concat("format: ", image_version)};
    for (const std::string& path : calibrations)
        settings.push_back("calibration: " + fingerprint(path));
    for (const std::string_view name : shaping())
        if (const std::string value = environment(std::string(name).c_str()); !value.empty())
            settings.push_back(concat(name, "=", value));
    std::vector<std::string> options;
    bool open = false;  // the last option is of those that count
    for (std::size_t i = program.options; i < program.command.size(); ++i) {
        const std::string& word = program.command[i];
        if (is_option(word)) open = !one_of(word.substr(0, word.find('=')), harmless());
        if (open && is_option(word))
            options.push_back(word);
        else if (open)
            options.back() += " " + word;
    }
    std::ranges::sort(options);
    settings.insert(settings.end(), options.begin(), options.end());
    return settings;
}

}  // namespace lowkv::cli
