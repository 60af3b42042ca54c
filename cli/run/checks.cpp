#include "run/checks.h"

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string_view>

#include "common/machine.h"
#include "common/model.h"
#include "common/program_options.h"
#include "common/terminal.h"
#include "devices/names.h"
#include "lowkv/calibration_file.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"
#include "lowkv_ggml.h"
#include "platform/system.h"
#include "settings.h"

namespace lowkv::cli {

namespace {

// Throws where the scheme has an override of a layer that the model lacks, where a calibration was
// made for another model, or where the scheme needs one and none fits. The plug-in can't see the
// latter two: it never learns the model's name. A file that can't be read as a model is left to the
// program, which says so.
void check_model(const std::string& path, const std::string& scheme,
                 const std::vector<std::string>& calibrations) {
    if (!std::filesystem::is_regular_file(platform::path_of(path))) return;
    const Scheme parsed = parse_scheme(scheme);
    const bool calibrated = parsed.needs_calibration();
    if (parsed.overrides.empty() && !calibrated) return;
    const std::optional<Model> model = model_without_weights(path);
    if (!model) return;
    require_layers(parsed, model->layers());
    model->use_calibrations(calibrations, calibrated);
    if (calibrated) ggml::set_scheme(scheme);
}

}  // namespace

void check_settings(const RunOptions& options) {
    const auto load = [](const std::string& name, const std::vector<std::string>& paths) {
        for (const std::string& path : paths) {
            try {
                static_cast<void>(calibration::load_calibration(path));
            } catch (const Error& error) {
                throw Failure(name + ": " + error.what());
            }
        }
    };
    load("--calibration", options.calibrations);
    load("LOWKV_CALIBRATION", ggml::calibration_paths());
    try {
        if (!options.cache_on.empty()) check_device_name(options.cache_on);
    } catch (const Error& error) {
        throw UsageError(concat("--cache-on: ", error.what()));
    }
    if (parse_scheme(options.scheme).needs_calibration()) return;  // see check_model()
    try {
        ggml::set_scheme(options.scheme);
    } catch (const Error& error) {
        constexpr std::string_view budget = "LOWKV_BUDGET";
        std::string text = error.what();
        const std::size_t at = text.find(budget);
        if (text.find("LOWKV_") == std::string::npos)  // else it names the variable that is wrong
            text = (options.scheme == environment("LOWKV_SCHEME") ? "LOWKV_SCHEME=" : "--scheme ") +
                   options.scheme + ": " + text;
        else if (at != std::string::npos && !options.budget.empty())
            text.replace(at, budget.size(), "--budget");
        throw UsageError(text);
    }
}

void check_models(const Program& program, const RunOptions& options) {
    std::vector<std::string> models = values_of(program, model_option.names);
    if (models.empty()) models.push_back(model_of(program));
    for (const std::string& model : models)
        check_model(model, options.scheme, options.calibrations);
}

}  // namespace lowkv::cli
