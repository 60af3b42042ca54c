#include "run/checks.h"

#include <filesystem>
#include <optional>

#include "common/errors.h"
#include "common/model.h"
#include "lowkv/scheme.h"
#include "lowkv_ggml.h"

namespace lowkv::cli {

void check_model(const std::string& path, const std::string& scheme,
                 const std::vector<std::string>& calibrations) {
    if (scheme == "delegate" || !std::filesystem::is_regular_file(path)) return;
    const Scheme parsed = parse_scheme(scheme);
    const bool calibrated = parsed.needs_calibration();
    if (parsed.overrides.empty() && !calibrated) return;
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    std::optional<Model> model;
    try {
        model.emplace(path, Weights::left_out);
    } catch (const Failure&) {
        return;
    }
    require_layers(parsed, model->kv_shape().layers);
    model->use_calibrations(calibrations, calibrated);
    if (calibrated) ggml::set_scheme(scheme);
}

}  // namespace lowkv::cli
