#pragma once
// What the next cache will hold: LOWKV_SCHEME, or what set_scheme() said, with the calibrations of
// LOWKV_CALIBRATION or add_calibration().

#include <memory>
#include <string>
#include <vector>

#include "lowkv/codec.h"
#include "lowkv/scheme.h"

namespace lowkv {
struct Calibration;  // lowkv/calibration.h
}

namespace lowkv::ggml {

// Units of a stream that stay unquantized after shifts (layer_shift.cpp): as many conversations may
// be shifted by turns.
inline constexpr std::size_t most_open_units = 4;

struct Setting {
    std::string text;  // canonical text of the scheme
    Scheme scheme;
    std::shared_ptr<const Calibration> calibration;  // null: the scheme needs none
    // LOWKV_BUDGET, in bytes; 0: none. While it lasts rows stay exact, then the oldest are packed
    // by the first of `rungs`, then by the next, and in the end by the scheme.
    std::size_t budget = 0;
    std::vector<LayerScheme> rungs;
    std::string device = "cpu";  // LOWKV_DEVICE, where packed caches are (devices.h)
    bool packed_states = true;  // LOWKV_STATES: saved states hold codes (unit_codes.h), not numbers
    // LOWKV_CONVERSATIONS: so many share a unified cache at once, each with its own window.
    std::size_t conversations = 1;
};

// For the schemes that are chosen from now on; lowkv_ggml.h's add_calibration() reads it from a
// file.
void add_calibration(Calibration calibration);

// Of a setting that has one. Throws Error(invalid_calibration) where it is of another model.
const LayerCalibration& layer_calibration(const Setting& setting, std::uint32_t layer,
                                          const Shape& shape);

// The files that LOWKV_CALIBRATION names.
std::vector<std::string> calibration_paths();

// Replaces the setting. Throws lowkv::Error, and then leaves it as it was; where a calibration is
// missing it says in what to name one.
void choose(const std::string& text, const std::string& calibration_named_in);

// Reads LOWKV_SCHEME (unset or empty: the default scheme) and LOWKV_CALIBRATION (paths with colons
// between them). A wrong value is remembered, not thrown: the device
// exists then, but no context can be made on it (see registry.cpp).
void choose_from_environment();

std::shared_ptr<const Setting> setting();  // null while they are wrong
std::string setting_error();               // why setting() is null

}  // namespace lowkv::ggml
