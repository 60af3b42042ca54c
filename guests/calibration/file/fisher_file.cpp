#include "lowkv/calibration_file.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string_view>

#include "calibration/file/safetensors.h"
#include "lowkv/error.h"

namespace lowkv::calibration {
namespace {

constexpr std::string_view format = "lowkv-fisher";

std::vector<float> weights(const TensorFile& file, const std::string& name, const Shape& shape) {
    std::vector<float> out;
    file.read(name, shape.channels(), out);
    float largest = 0;
    for (const float w : out) {
        if (!(w >= 0) || w > std::numeric_limits<float>::max())
            throw std::runtime_error(
                concat("tensor ", name, " has the element ", w, "; legal: finite, from 0 on"));
        largest = std::max(largest, w);
    }
    if (largest == 0) throw std::runtime_error("tensor " + name + " has no element above 0");
    return out;
}

// From one way of pairing a head's turned channels to the other.
std::vector<float> repaired(const std::vector<float>& from, const Shape& shape, const Rope& to) {
    std::vector<float> out = from;
    const std::size_t pairs = to.frequencies.size();
    for (std::size_t head = 0; head < from.size(); head += shape.head_dim) {
        for (std::size_t i = 0; i < pairs; ++i) {
            for (std::size_t second = 0; second < 2; ++second) {
                const std::size_t half = head + i + second * pairs, near = head + 2 * i + second;
                if (to.pairs == Rope::Pairs::neighbours)
                    out[near] = from[half];
                else
                    out[half] = from[near];
            }
        }
    }
    return out;
}

}  // namespace

FisherWeights load_fisher(const std::string& path, std::uint32_t layers, const Shape& shape,
                          const Rope& rope) {
    const TensorFile file = read_tensors(path);
    try {
        if (file.meta("format") != format || file.meta("version") != "1")
            throw std::runtime_error(
                concat("it is no \"", format, "\" of version 1 (tools/fisher.py makes one)"));
        const std::string& pairs = file.meta("pairs");
        if (pairs != "halves" && pairs != "neighbours")
            throw std::runtime_error("its metadata pairs is \"" + pairs +
                                     "\"; legal: halves, neighbours");
        if (file.number("layers", std::numeric_limits<std::uint32_t>::max()) != layers)
            throw std::runtime_error(concat("it was made for a model of ", file.meta("layers"),
                                            " layers; this one has ", layers));
        const bool same = (pairs == "halves") == (rope.pairs == Rope::Pairs::halves);
        FisherWeights out;
        for (std::uint32_t i = 0; i < layers; ++i) {
            const std::string layer = concat("layers.", i);
            const std::vector<float> key = weights(file, layer + ".key", shape);
            out.key.push_back(same ? key : repaired(key, shape, rope));
            out.value.push_back(weights(file, layer + ".value", shape));
        }
        return out;
    } catch (const std::exception& error) {
        throw Error(ErrorCode::invalid_calibration, path, ": ", error.what());
    }
}

}  // namespace lowkv::calibration
