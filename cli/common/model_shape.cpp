#include "common/model_shape.h"

#include <array>
#include <string_view>

#include "common/errors.h"
#include "common/round.h"

namespace lowkv::cli {

namespace {

struct Known {
    std::string_view name;
    std::uint32_t layers, query_heads, kv_heads, head_dim;
    std::uint32_t context;
    double parameters;
};

// From the models' published config.json; the parameters follow from it.
constexpr std::array known{
    Known{"llama-7b", 32, 32, 32, 128, 2048, 6738415616},
    Known{"llama-13b", 40, 40, 40, 128, 2048, 13015864320},
    Known{"llama-30b", 60, 52, 52, 128, 2048, 32528943616},
    Known{"llama-65b", 80, 64, 64, 128, 2048, 65285660672},
    Known{"llama-2-7b", 32, 32, 32, 128, 4096, 6738415616},
    Known{"llama-2-13b", 40, 40, 40, 128, 4096, 13015864320},
    Known{"llama-2-70b", 80, 64, 8, 128, 4096, 68976648192},
    Known{"llama-3-8b", 32, 32, 8, 128, 8192, 8030261248},
    Known{"llama-3-70b", 80, 64, 8, 128, 8192, 70553706496},
    Known{"llama-3.1-8b", 32, 32, 8, 128, 131072, 8030261248},
    Known{"llama-3.1-70b", 80, 64, 8, 128, 131072, 70553706496},
    Known{"mistral-7b", 32, 32, 8, 128, 32768, 7241732096},
    Known{"qwen2.5-7b", 28, 28, 4, 128, 32768, 7615616512},
    Known{"qwen3-8b", 36, 32, 8, 128, 40960, 8190735360},
    Known{"smollm2-135m", 30, 9, 3, 64, 8192, 134515008},
};

}  // namespace

std::string shape_names() {
    std::string names;
    for (const Known& model : known) {
        if (!names.empty()) names += ", ";
        names += model.name;
    }
    return names;
}

std::uint64_t sliding_cells(std::uint64_t window) {
    constexpr std::uint64_t micro_batch = 512, padding = 256;
    return round_up(window + micro_batch, padding);
}

ModelShape named_shape(const std::string& name) {
    constexpr double f16_bytes = 2;
    for (const Known& model : known) {
        if (model.name != name) continue;
        return {.name = name,
                .layers = std::vector<Shape>(model.layers, {model.kv_heads, model.head_dim}),
                .sliding = {},
                .query_heads = std::uint64_t{model.layers} * model.query_heads,
                .weights = f16_bytes * model.parameters,
                .files = 1,
                .context = model.context,
                .notes = {}};
    }
    throw UsageError("--shape " + name + " is not known; known: " + shape_names() +
                     "; any other: -m model.gguf, or --layers, --kv-heads and --head-dim");
}

}  // namespace lowkv::cli
