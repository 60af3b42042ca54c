#include "settings.h"

#include <charconv>
#include <exception>
#include <mutex>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "devices.h"
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

State& the_state() {
    // Never destroyed: programs make and free caches while they end.
    static auto& instance = *new State;
    return instance;
}

// Calls f(state) under its mutex.
template <class F>
auto locked(F f) {
    const std::lock_guard lock(the_state().mutex);
    return f(the_state());
}

// The newest one that was made for the scheme.
std::shared_ptr<const Calibration> find_calibration(const Scheme& scheme,
                                                    const std::string& named_in) {
    const auto calibrations = locked([](const State& state) { return state.calibrations; });
    std::string others;
    for (auto at = calibrations.rbegin(); at != calibrations.rend(); ++at) {
        try {
            calibration::require_scheme(**at, scheme, "the calibration");
            return *at;
        } catch (const Error& error) {
            others += concat("; ", error.what());
        }
    }
    throw Error(ErrorCode::invalid_calibration, to_string(scheme),
                " needs a calibration of the model: make one with lowkv calibrate, and name it in ",
                named_in, others);
}

std::string variable(const char* name, std::string_view usual) {
    const std::string value = platform::environment(name);
    return value.empty() ? std::string(usual) : value;
}

std::string read_device() {
    const std::string name = variable("LOWKV_DEVICE", "cpu");
    try {
        check_device_name(name);
    } catch (const Error& error) {
        throw Error(ErrorCode::invalid_argument, "LOWKV_DEVICE: ", error.what());
    }
    return name;
}

bool read_packed_states() {
    const std::string text = variable("LOWKV_STATES", "packed");
    if (text != "packed" && text != "f16")
        throw Error(ErrorCode::invalid_argument, "LOWKV_STATES=", text,
                    " is neither packed nor f16");
    return text == "packed";
}

std::size_t read_conversations() {
    const std::string text = variable("LOWKV_CONVERSATIONS", "1");
    std::size_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || end != text.data() + text.size() || number == 0)
        throw Error(ErrorCode::invalid_argument, "LOWKV_CONVERSATIONS=", text,
                    " is not a number of conversations: say 4");
    return number;
}

}  // namespace

void add_calibration(Calibration calibration) {
    auto shared = std::make_shared<const Calibration>(std::move(calibration));
    locked([&](State& state) { state.calibrations.push_back(std::move(shared)); });
}

void add_calibration(const std::string& path) {
    add_calibration(calibration::load_calibration(path).calibration);
}

const LayerCalibration& layer_calibration(const Setting& setting, std::uint32_t layer,
                                          const Shape& shape) {
    calibration::require_layer(*setting.calibration, layer, shape, "the calibration");
    return setting.calibration->layers[layer];
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
    next->conversations = read_conversations();
    const std::string budget = platform::environment("LOWKV_BUDGET");
    next->scheme = parse_scheme(text);
    require_served(next->scheme, Host::llama_cpp);
    next->text = to_string(next->scheme);
    next->device = read_device();
    if (!budget.empty()) {
        next->budget = parse_size(budget, "LOWKV_BUDGET");
        next->rungs = rungs_before(next->scheme, "LOWKV_BUDGET");
    }
    if (next->scheme.needs_calibration())
        next->calibration = find_calibration(next->scheme, calibration_named_in);
    locked([&](State& state) {
        state.setting = std::move(next);
        state.error.clear();
    });
}

void choose_from_environment() {
    const std::string text = variable("LOWKV_SCHEME", default_scheme);
    const auto refuse = [](const std::string& why) {
        locked([&](State& state) {
            state.setting.reset();
            state.error = why;
        });
    };
    for (const std::string& path : calibration_paths()) {
        try {
            add_calibration(path);
        } catch (const std::exception& error) {
            refuse(concat("LOWKV_CALIBRATION: ", error.what()));
            return;
        }
    }
    try {
        choose(text, "LOWKV_CALIBRATION");
    } catch (const Error& error) {
        const bool unknown = error.code() == ErrorCode::invalid_scheme;
        if (error.code() == ErrorCode::invalid_argument) return refuse(error.what());  // a variable
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
    return locked([](const State& state) { return state.setting; });
}

std::string setting_error() {
    return locked([](const State& state) { return state.error; });
}

}  // namespace lowkv::ggml
