#include "lowkv/calibration_file.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "calibration/file/safetensors.h"
#include "lowkv/error.h"

namespace lowkv::calibration {
namespace {

constexpr std::string_view format = "lowkv-calibration";
constexpr const char* hash_key = "hash";
constexpr std::uint64_t max_layers = 4096, max_heads = 4096, max_head_dim = 576;

template <class... Parts>
[[noreturn]] void fail(const Parts&... why) {
    throw Error(ErrorCode::invalid_calibration, why...);
}

// Both halves of every layer, by the names that they have in the file.
template <class C, class F>
void each_part(C& calibration, const Scheme& scheme, F f) {
    for (std::uint32_t i = 0; i < calibration.layers.size(); ++i) {
        const std::string layer = concat("layers.", i);
        f(layer + ".key", scheme.layer(i).key, calibration.layers[i].key);
        f(layer + ".value", scheme.layer(i).value, calibration.layers[i].value);
    }
}

// The arrays of a part, by name; empty ones are not stored.
template <class P, class F>
void each_array(P& part, F f) {
    f(".group", part.group);
    f(".clip", part.clip);
    f(".low", part.low);
    f(".high", part.high);
    f(".levels", part.levels);
    f(".boundaries", part.boundaries);
}

// FNV-1a, 64 bits, of all that a file holds but this hash itself: every text with a NUL behind it,
// every array's bytes.
std::string hash_of(const TensorFile& file) {
    std::uint64_t hash = 0xcbf29ce484222325;
    const auto add = [&](const auto* bytes, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i)
            hash = (hash ^ static_cast<std::uint8_t>(bytes[i])) * 0x100000001b3;
    };
    for (const auto& [key, value] : file.metadata) {
        if (key == hash_key) continue;
        add(key.c_str(), key.size() + 1);
        add(value.c_str(), value.size() + 1);
    }
    for (const auto& [name, tensor] : file.tensors) {
        add(name.c_str(), name.size() + 1);
        add(tensor.dtype.c_str(), tensor.dtype.size() + 1);
        add(tensor.data.data(), tensor.data.size());
    }
    std::array<char, 17> text{};
    std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(hash));
    return text.data();
}

Calibration calibration_of(const TensorFile& file) {
    if (file.metadata.find("format") == file.metadata.end() || file.meta("format") != format)
        throw std::runtime_error(
            concat("it is no calibration of lowkv: its metadata has no format \"", format,
                   "\" (`lowkv calibrate` makes one)"));
    if (file.meta("version") != std::to_string(file_version))
        throw std::runtime_error(concat("it has version ", file.meta("version"),
                                        " of the format; this lowkv reads version ", file_version,
                                        ": make it anew"));
    // Files that others made may have none.
    const auto hash = file.metadata.find(hash_key);
    if (hash != file.metadata.end() && hash->second != hash_of(file))
        throw std::runtime_error("it is damaged: its contents do not match their hash");
    const Scheme scheme = parse_scheme(file.meta("scheme"));
    Calibration out{
        .scheme = to_string(scheme),
        .model = file.meta("model"),
        .shape = {.kv_heads = static_cast<std::uint32_t>(file.number("kv_heads", max_heads)),
                  .head_dim = static_cast<std::uint32_t>(file.number("head_dim", max_head_dim))},
        .layers = std::vector<LayerCalibration>(file.number("layers", max_layers))};
    std::size_t used = 0;
    each_part(out, scheme, [&](const std::string& name, const Codec& codec, PartCalibration& part) {
        each_array(part, [&](const char* array, auto& values) {
            const std::string tensor = name + array;
            const auto found = file.tensors.find(tensor);
            if (found == file.tensors.end()) return;
            file.read(tensor, found->second.elements(), values);
            ++used;
        });
        check_calibration(part, codec, out.shape, name);
    });
    if (used == file.tensors.size()) return out;
    for (const auto& [name, tensor] : file.tensors) {
        bool known = false;
        each_part(out, scheme, [&](const std::string& part, const Codec&, PartCalibration& found) {
            each_array(found, [&](const char* array, auto&) { known |= name == part + array; });
        });
        if (!known)
            throw std::runtime_error(concat("tensor ", name, " is none of a calibration of ",
                                            out.layers.size(), " layers"));
    }
    return out;
}

std::string what_for(const Calibration& calibration) {
    return " was made for " + calibration.scheme;
}

}  // namespace

CalibrationFile load_calibration(const std::string& path) {
    const TensorFile file = read_tensors(path);
    try {
        CalibrationFile out{.calibration = calibration_of(file), .origin = {}};
        out.origin = {.tool = file.meta("tool"),
                      .text = file.meta("text"),
                      .tokens = file.number("tokens", UINT64_MAX)};
        return out;
    } catch (const std::exception& error) {
        fail(path, ": ", error.what());
    }
}

void save_calibration(const std::string& path, const Calibration& calibration,
                      const Origin& origin) {
    TensorFile file;
    file.metadata = {{"format", std::string(format)},
                     {"version", std::to_string(file_version)},
                     {"scheme", calibration.scheme},
                     {"model", calibration.model},
                     {"layers", std::to_string(calibration.layers.size())},
                     {"kv_heads", std::to_string(calibration.shape.kv_heads)},
                     {"head_dim", std::to_string(calibration.shape.head_dim)},
                     {"tool", origin.tool},
                     {"text", origin.text},
                     {"tokens", std::to_string(origin.tokens)}};
    const Scheme scheme = parse_scheme(calibration.scheme);
    each_part(calibration, scheme,
              [&](const std::string& name, const Codec& codec, const PartCalibration& part) {
                  check_calibration(part, codec, calibration.shape, name);
                  each_array(part, [&](const char* array, const auto& values) {
                      if (!values.empty()) file.tensors[name + array] = Tensor::of(values);
                  });
              });
    file.metadata[hash_key] = hash_of(file);
    write_tensors(path, file);
}

void require_scheme(const Calibration& calibration, const Scheme& scheme, const std::string& what) {
    const Scheme made = parse_scheme(calibration.scheme);
    for (std::uint32_t i = 0; i < calibration.layers.size(); ++i) {
        if (made.layer(i) == scheme.layer(i)) continue;
        fail(what, what_for(calibration), ", not for ", to_string(scheme), ": layer ", i,
             " differs. Calibrate with --scheme ", to_string(scheme), ", or use scheme ",
             calibration.scheme);
    }
}

void require_layer(const Calibration& calibration, std::uint32_t layer, const Shape& shape,
                   const std::string& what) {
    // The same words for all layers that have the same to say: who reads them wants them once.
    const auto words = [](const Shape& s) {
        return concat(s.kv_heads, " kv heads of ", s.head_dim, " channels");
    };
    if (shape != calibration.shape)
        fail(what, " was made for ", words(calibration.shape), "; this model has ", words(shape));
    if (layer >= calibration.layers.size())
        fail(what, " was made for a model of ", calibration.layers.size(),
             " layers; this one has more");
}

void require_model(const Calibration& calibration, const std::string& fingerprint,
                   const std::string& what) {
    if (fingerprint == calibration.model) return;
    fail(what, " was made for another model: ", calibration.model, "; this one is ", fingerprint);
}

}  // namespace lowkv::calibration
