#include "settings.h"

#include <array>
#include <charconv>
#include <exception>
#include <mutex>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "lowkv/calibration_file.h"
#include "lowkv/error.h"
#include "lowkv/implementation.h"
#include "lowkv_ggml.h"
#include "platform/system.h"

namespace lowkv::ggml {
namespace {

struct State {
    std::mutex mutex;
    std::shared_ptr<const Setting> setting;
    std::string error;
    std::vector<std::shared_ptr<const Calibration>> calibrations;
};

State& state() {
    // Never destroyed: programs make and free caches while they end.
    static auto& instance = *new State;
    return instance;
}

// The newest one that was made for the scheme.
std::shared_ptr<const Calibration> find_calibration(const Scheme& scheme,
                                                    const std::string& named_in) {
    std::vector<std::shared_ptr<const Calibration>> calibrations;
    {
        State& s = state();
        const std::lock_guard lock(s.mutex);
        calibrations = s.calibrations;
    }
    std::string others;
    for (auto at = calibrations.rbegin(); at != calibrations.rend(); ++at) {
        try {
            calibration::require_scheme(**at, scheme, "the calibration");
            return *at;
        } catch (const Error& error) {
            others += std::string("; ") + error.what();
        }
    }
    throw Error(ErrorCode::invalid_calibration,
                to_string(scheme) +
                    " needs a calibration of the model: make one with lowkv calibrate, and name it "
                    "in " +
                    named_in + others);
}

bool read_packed_states() {
    const std::string value = platform::environment("LOWKV_STATES");
    const std::string text = value.empty() ? "packed" : value;
    if (text != "packed" && text != "f16")
        throw Error(ErrorCode::invalid_argument,
                    "LOWKV_STATES=" + text + " is neither packed nor f16");
    return text == "packed";
}

}  // namespace

std::size_t read_budget(std::string_view text) {
    double size = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
    const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
    constexpr std::array<std::pair<std::string_view, double>, 7> units = {{{"", 1},
                                                                           {"KiB", 0x1p10},
                                                                           {"MiB", 0x1p20},
                                                                           {"GiB", 0x1p30},
                                                                           {"KB", 1e3},
                                                                           {"MB", 1e6},
                                                                           {"GB", 1e9}}};
    for (const auto& [name, bytes] : units)
        if (error == std::errc{} && unit == name && size * bytes >= 1 && size * bytes < 0x1p60)
            return static_cast<std::size_t>(size * bytes);
    throw Error(ErrorCode::invalid_argument, "LOWKV_BUDGET=" + std::string(text) +
                                                 " is no size: say 24MiB, 1.5GiB or 2000000000");
}

std::vector<LayerScheme> finer_than(const Scheme& scheme) {
    const std::pair<const char*, std::vector<const char*>> ladders[] = {
        {"lowkv4", {}},
        {"lowkv3", {"lowkv4"}},
        {"lowkv2.8", {"lowkv4"}},
        {"lowkv2", {"lowkv4", "lowkv2.8"}},
        {"lowkv1.5", {"lowkv4", "lowkv2.8", "lowkv2"}}};
    if (scheme.overrides.empty())
        for (const auto& [name, finer] : ladders) {
            if (!(scheme.base == parse_scheme(name).base)) continue;
            std::vector<LayerScheme> schemes;
            for (const char* its : finer) schemes.push_back(parse_scheme(its).base);
            return schemes;
        }
    throw Error(
        ErrorCode::unsupported,
        "LOWKV_BUDGET is for the schemes lowkv4, lowkv3, lowkv2.8, lowkv2 and lowkv1.5, in all "
        "layers alike: it ends with the one that is named and begins with finer ones");
}

void add_calibration(Calibration calibration) {
    auto shared = std::make_shared<const Calibration>(std::move(calibration));
    State& s = state();
    const std::lock_guard lock(s.mutex);
    s.calibrations.push_back(std::move(shared));
}

void add_calibration(const std::string& path) {
    add_calibration(calibration::load_calibration(path).calibration);
}

std::vector<std::string> calibration_paths() {
    std::istringstream list(platform::environment("LOWKV_CALIBRATION"));
    std::vector<std::string> paths;
    for (std::string path; std::getline(list, path, platform::list_separator);)
        if (!path.empty()) paths.push_back(path);
    return paths;
}

void choose(const std::string& text, const std::string& calibration_named_in) {
    auto next = std::make_shared<Setting>();
    next->packed_states = read_packed_states();
    const std::string budget = platform::environment("LOWKV_BUDGET");
    if (text == "delegate") {
        next->text = text;
        next->delegate = true;
        if (!budget.empty())
            throw Error(ErrorCode::unsupported,
                        "delegate keeps f16 rows, which no budget shrinks; leave LOWKV_BUDGET out");
    } else {
        next->scheme = parse_scheme(text);
        if (next->scheme.retention.filter != Filter::none) {
            throw Error(ErrorCode::unsupported,
                        "llama.cpp decides which tokens its cells hold, so filter=, keep= and "
                        "evict= can't be followed here; leave them out");
        }
        next->text = to_string(next->scheme);
        if (!budget.empty()) {
            next->budget = read_budget(budget);
            next->finer = finer_than(next->scheme);
        }
        if (next->scheme.needs_calibration())
            next->calibration = find_calibration(next->scheme, calibration_named_in);
    }
    State& s = state();
    const std::lock_guard lock(s.mutex);
    s.setting = std::move(next);
    s.error.clear();
}

void choose_from_environment() {
    const std::string value = platform::environment("LOWKV_SCHEME");
    const std::string text = value.empty() ? std::string(default_scheme) : value;
    const auto refuse = [](const std::string& why) {
        State& s = state();
        const std::lock_guard lock(s.mutex);
        s.setting.reset();
        s.error = why;
    };
    for (const std::string& path : calibration_paths()) {
        try {
            add_calibration(path);
        } catch (const std::exception& error) {
            refuse("LOWKV_CALIBRATION: " + std::string(error.what()));
            return;
        }
    }
    try {
        choose(text, "LOWKV_CALIBRATION");
    } catch (const Error& error) {
        const bool unknown = error.code() == ErrorCode::invalid_scheme;
        if (error.code() == ErrorCode::invalid_argument) return refuse(error.what());  // the budget
        refuse("LOWKV_SCHEME=" + text + (unknown ? " is not a scheme: " : " can't be used: ") +
               error.what());
        return;
    } catch (const std::exception& error) {
        refuse("LOWKV_SCHEME=" + text + " can't be used: " + error.what());
        return;
    }
    try {
        active_implementation();  // a wrong LOWKV_IMPLEMENTATION
    } catch (const std::exception& error) {
        refuse(error.what());
    }
}

std::shared_ptr<const Setting> setting() {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    return s.setting;
}

std::string setting_error() {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    return s.error;
}

}  // namespace lowkv::ggml
