#include "settings.h"

#include <cstdlib>
#include <exception>
#include <mutex>

#include "lowkv/error.h"
#include "lowkv/implementation.h"

namespace lowkv::ggml {
namespace {

struct State {
    std::mutex mutex;
    std::shared_ptr<const Setting> setting;
    std::string error;
};

State& state() {
    static State instance;
    return instance;
}

}  // namespace

void choose(const std::string& text) {
    auto next = std::make_shared<Setting>();
    if (text == "delegate") {
        next->text = text;
        next->delegate = true;
    } else {
        next->scheme = parse_scheme(text);
        if (next->scheme.retention.filter != Filter::none) {
            throw Error(ErrorCode::unsupported,
                        "llama.cpp decides which tokens its cells hold, so filter=, keep= and "
                        "evict= can't be followed here; leave them out");
        }
        next->text = to_string(next->scheme);
    }
    State& s = state();
    const std::lock_guard lock(s.mutex);
    s.setting = std::move(next);
    s.error.clear();
}

void choose_from_environment() {
    const char* value = std::getenv("LOWKV_SCHEME");
    const std::string text =
        value != nullptr && *value != '\0' ? value : std::string(default_scheme);
    const auto refuse = [](const std::string& why) {
        State& s = state();
        const std::lock_guard lock(s.mutex);
        s.setting.reset();
        s.error = why;
    };
    try {
        choose(text);
    } catch (const std::exception& error) {
        refuse("LOWKV_SCHEME=" + text + " is not a scheme: " + error.what());
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
