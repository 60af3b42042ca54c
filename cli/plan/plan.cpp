// lowkv plan: what each scheme needs for a model, a context and a batch, before anything is loaded.

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "common/app.h"
#include "common/machine.h"
#include "common/model_shape.h"
#include "common/options.h"
#include "common/terminal.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"
#include "plan/arithmetic.h"
#include "plan/model_cache.h"
#include "plan/report.h"

namespace lowkv::cli {

namespace {

constexpr const char* footer = R"(Examples:
  lowkv plan -m model.gguf
      what each scheme needs at the model's full context, and how far this machine's memory reaches
  lowkv plan --shape llama-3.1-8b --context 128Ki --batch 4 --memory 80GB --bandwidth 3350
      a model by name, on another machine: an H100 reads 3,350 GB/s
  lowkv plan --layers 48 --kv-heads 8 --head-dim 128 --weights 9GB --context 32k --schemes kivi2
      any other shape, one scheme beside f16

k, M, G, T are decimal, Ki, Mi, Gi, Ti binary: 32k is 32,000 and 32Ki is 32,768 tokens; 80G is 80
billion bytes and 80Gi is 80 x 1024^3. Schemes are separated by commas, so within a spelled-out
scheme write + for the comma. `lowkv schemes --all` lists what there is.)";

constexpr std::uint32_t f16_bits = 16;

constexpr const char* elsewhere = "elsewhere";  // for --weights

struct Options {
    std::string model, name;
    std::uint32_t layers = 0, heads = 0, kv_heads = 0, head_dim = 0;
    std::string weights, context, memory, bandwidth, budget, json;
    std::uint64_t batch = 1, conversations = 1;
    std::vector<std::string> schemes;
    std::vector<double> bits;
    bool unfused = false, all = false;
};

ModelShape spelled_shape(const Options& options) {
    if (options.layers == 0 || options.kv_heads == 0 || options.head_dim == 0)
        throw UsageError(
            "which model? -m model.gguf, --shape NAME, or --layers, --kv-heads and --head-dim "
            "together");
    ModelShape out;
    out.name = "as given";
    out.layers.assign(options.layers, {options.kv_heads, options.head_dim});
    return out;
}

// Throws UsageError for a layer that lowkv can't store.
void require_storable(const ModelShape& shape) {
    bool any = false;
    for (const Shape& layer : shape.layers) {
        if (layer.kv_heads == 0) continue;
        any = true;
        try {
            static_cast<void>(Plan(LayerScheme{}, layer));
        } catch (const Error& error) {
            throw UsageError(shape.name + ": " + error.what());
        }
    }
    if (!any) throw UsageError(shape.name + ": no layer of it keeps keys and values");
}

ModelShape read_shape(const Options& options) {
    const bool spelled = options.layers + options.kv_heads + options.head_dim > 0;
    if ((options.model.empty() ? 0 : 1) + (options.name.empty() ? 0 : 1) + (spelled ? 1 : 0) > 1)
        throw UsageError(
            "the model is given more than once: -m, --shape, or --layers with --kv-heads and "
            "--head-dim, but only one of them");
    ModelShape shape = !options.model.empty()  ? gguf_shape(options.model)
                       : !options.name.empty() ? named_shape(options.name)
                                               : spelled_shape(options);
    require_storable(shape);
    if (options.heads > 0) shape.query_heads = std::uint64_t{options.heads} * shape.layers.size();
    if (options.weights == elsewhere) return shape;
    if (!options.weights.empty()) {
        shape.weights = read_size("--weights", options.weights);
    } else if (shape.files > 1) {
        throw UsageError(
            concat(options.model, " is one of ", shape.files,
                   " files of the model, with a part of its weights: add --weights SIZE"));
    }
    return shape;
}

PlannedRow row(const std::string& name, const StoredCache& cache, const Planned& planned) {
    const double held = cache_bytes(cache, planned.demand, planned.demand.context),
                 read = access_bytes(cache, planned.demand);
    const std::uint64_t longest = longest_context(cache, planned.demand, planned.memory);
    return {.scheme = name,
            .bits_per_element = bits_per_element(cache),
            .kv_bytes = held,
            .total_bytes = planned.demand.weights + held,
            .fits = planned.demand.context <= longest,
            .longest_context = longest,
            .access_bytes = read,
            .seconds_per_step = planned.bandwidth > 0 ? read / planned.bandwidth : NAN};
}

std::vector<std::string> read_names(const Options& options) {
    std::vector<std::string> names = options.schemes;
    if (names.empty())
        for (const Preset& preset : shown_presets(options.all)) names.emplace_back(preset.name);
    std::erase(names, "f16");  // always there, as the reference
    read_schemes(names);
    return names;
}

int plan(const Options& options) {
    require_writable(options.json, {options.model});
    const std::vector<std::string> names = read_names(options);
    Planned planned;
    planned.shape = read_shape(options);
    planned.demand.weights = options.weights == elsewhere ? 0 : planned.shape.weights;
    planned.demand.batch = options.batch;
    planned.demand.conversations = options.conversations;
    planned.demand.context =
        options.context.empty() ? planned.shape.context : read_tokens("--context", options.context);
    if (planned.demand.context == 0)
        throw UsageError("how many tokens? --context N, for example --context 32Ki");
    planned.memory = options.memory.empty() ? static_cast<double>(system_memory())
                                            : read_size("--memory", options.memory);
    if (!options.bandwidth.empty())
        planned.bandwidth = read_bandwidth("--bandwidth", options.bandwidth);
    planned.unfused = options.unfused;
    if (options.unfused) {
        if (planned.shape.query_heads == 0)
            throw UsageError("--unfused needs the query heads of a layer: add --heads N");
        planned.demand.scores_per_token = unfused_scores_per_token(planned.shape.query_heads);
    }

    planned.rows.push_back(row("f16", idealised_cache(planned.shape, f16_bits), planned));
    for (const std::string& name : names) {
        try {
            planned.rows.push_back(
                row(name, packed_cache(planned.shape, parse_scheme(name)), planned));
        } catch (const Error& error) {
            // The list of all presets leaves out those that this shape is too wide for.
            if (!options.schemes.empty() || error.code() != ErrorCode::unsupported) throw;
        }
    }
    if (!options.budget.empty()) {
        const bool named = !options.schemes.empty() && !names.empty();
        planned.budget = budget_of(planned.shape, options.budget,
                                   named ? names.back() : chosen_scheme(), planned.demand);
    }
    for (const double bits : options.bits) {
        planned.rows.push_back(
            row(shortest(bits, 3) + " bits", idealised_cache(planned.shape, bits), planned));
    }
    const bool chosen = options.all || !options.schemes.empty();
    show(heading(planned) + "\n" + table(planned) + what_is_not_shown(chosen) + "\n" +
         notes(planned));
    write_file(options.json, json(planned));
    return 0;
}

}  // namespace

void add_plan(Command app, int& status) {
    auto options = std::make_shared<Options>();
    Command command = app.add_command(
        "plan", "Memory, longest context and least time a token, by scheme, without a model loaded",
        footer + ("\n\nNames: " + shape_names()));
    command.option("-m,--model", &options->model,
                   "The model, a GGUF file; only its header is read");
    command.option("--shape", &options->name, "The model by name, with f16 weights; names below");
    command.option("--layers", &options->layers, "The model spelled out: layers", {range(1, 4096)});
    command.option("--kv-heads", &options->kv_heads, "... key/value heads of a layer",
                   {range(1, 4096)});
    command.option("--head-dim", &options->head_dim, "... numbers of a head", {range(1, 65536)});
    command.option("--heads", &options->heads, "... query heads of a layer, for --unfused",
                   {range(1, 4096)});
    command.option("--weights", &options->weights,
                   "Size of the weights, as 9GB (default: the model's); elsewhere: they lie on a "
                   "GPU, as `lowkv run --weights-on` puts them, and the memory is the cache's");
    command.option("-c,--context", &options->context,
                   "Tokens of a sequence, as 32768, 32Ki or 1M (default: the model's)");
    command.defaulted("-b,--batch", &options->batch, "Sequences decoded together",
                      {range(std::uint64_t{1}, std::uint64_t{1000000})});
    command.defaulted("--parallel", &options->conversations,
                      "Conversations that share a context, as in llama-server; -np means it, too",
                      {range(std::uint64_t{1}, std::uint64_t{1000000})});
    command.option("--memory", &options->memory,
                   "What all must fit into, as 80GB (default: this machine's)");
    command.option(
        "--budget", &options->budget,
        "Also how far each rung of `lowkv run --budget` reaches within this size, ending "
        "at the last of --schemes (default: LOWKV_SCHEME, or lowkv2.8)");
    command.option("--bandwidth", &options->bandwidth,
                   "GB/s that the memory gives; without it, no times");
    CLI::Option* schemes =
        command.option("-s,--schemes", &options->schemes,
                       "Schemes beside f16 (default: the presets that one would use)", {commas()});
    command.flag("--all", &options->all, "All presets, those to compare with too",
                 {excludes(schemes)});
    command.option("--bits", &options->bits,
                   "Also so many bits per key and value element, with no window, sinks or "
                   "blocks, as papers reckon",
                   {commas(), range(0.1, 32.0)});
    command.flag("--unfused", &options->unfused,
                 "Count the scores that attention moves when it isn't fused (lowkv's is)");
    command.option("--json", &options->json, "Write the figures to this file");
    command.callback([options, &status] { status = plan(*options); });
}

}  // namespace lowkv::cli
