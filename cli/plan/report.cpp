#include "plan/report.h"

#include <algorithm>

#include "common/terminal.h"
#include "nlohmann/json.hpp"

namespace lowkv::cli {

namespace {

using Json = nlohmann::ordered_json;

}  // namespace

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_ONLY_SERIALIZE(PlannedRow, scheme, bits_per_element, kv_bytes,
                                                  total_bytes, fits, longest_context, access_bytes,
                                                  seconds_per_step)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_ONLY_SERIALIZE(BudgetRung, scheme, tokens)

std::string heading(const Planned& planned) {
    const ModelShape& shape = planned.shape;
    const bool latent = std::ranges::any_of(shape.layers, &Shape::latent);
    std::string text =
        shape.name + ": " + count(shape.layers.size()) + " layers, " +
        span_of(shape.layers, &Shape::kv_heads) + " kv heads of " +
        span_of(shape.layers, &Shape::head_dim) +
        (latent ? ", whose first " + span_of(shape.layers, &Shape::value_dim) +
                      " channels are the values"
                : "") +
        ", weights " + bytes(planned.shape.weights) + "\n" + count(planned.demand.context) +
        " tokens x batch " + count(planned.demand.batch) +
        (planned.demand.conversations == 1
             ? ""
             : ", shared by " + count(planned.demand.conversations) + " conversations each") +
        ", memory " + bytes(planned.memory);
    if (planned.bandwidth > 0) text += ", " + fixed(planned.bandwidth / 1e9, 1) + " GB/s";
    return text + "\n";
}

std::string table(const Planned& planned) {
    const bool timed = planned.bandwidth > 0;
    std::vector<std::string> header = {"scheme",       "bits", "KV cache",       "smaller",
                                       "with weights", "fits", "longest context"};
    if (timed) header.insert(header.end(), {"read a step", "ms a step", "faster"});
    Table table(header);
    const PlannedRow& f16 = planned.rows.front();
    for (const PlannedRow& row : planned.rows) {
        std::vector<std::string> cells = {
            row.scheme,
            fixed(row.bits_per_element, 2),
            bytes(row.kv_bytes),
            fixed(f16.kv_bytes / row.kv_bytes, 2) + "x",
            bytes(row.total_bytes),
            row.fits ? "yes" : "no",
            row.longest_context == all_tokens ? "any" : count(row.longest_context)};
        if (timed) {
            cells.insert(cells.end(),
                         {bytes(row.access_bytes), fixed(1e3 * row.seconds_per_step, 2),
                          fixed(f16.access_bytes / row.access_bytes, 2) + "x"});
        }
        table.add(cells);
    }
    return table.text();
}

std::string notes(const Planned& planned) {
    std::string text =
        "GiB and MiB are binary (80 GB are 74.5 GiB). KV cache: as held at that length, window and "
        "sinks not packed,\nin whole blocks; f16 and \"N bits\" have none of these. Longest "
        "context: of a sequence, with room for\nthe one block more that is held just before a "
        "block is packed. Activations come on top.\n";
    if (planned.bandwidth > 0) {
        text +=
            "A step decodes one token per sequence: it reads the weights once and the cache at "
            "half the length\n(the mean while the context fills";
        text += planned.unfused ? "), and moves unfused attention's scores" : ")";
        text += "; ms is that over the bandwidth, a floor.\n";
    }
    if (planned.demand.weights == 0)
        text += planned.shape.weights > 0
                    ? "The weights, " + bytes(planned.shape.weights) +
                          ", lie elsewhere: the memory is the cache's alone.\n"
                    : "No weights are counted: add --weights SIZE.\n";
    for (const std::string& note : planned.shape.notes) text += "Note: " + note + ".\n";
    if (!planned.budget.rungs.empty())
        text += wrapped("Budget: ", text_of(planned.budget) + ".", 8);
    return text;
}

std::string json(const Planned& planned) {
    const bool timed = planned.bandwidth > 0;
    Json layers = Json::array();
    for (std::size_t i = 0; i < planned.shape.layers.size(); ++i) {
        const Shape& layer = planned.shape.layers[i];
        Json row = {{"kv_heads", layer.kv_heads}, {"head_dim", layer.head_dim}};
        if (layer.latent()) row["value_dim"] = layer.value_dim;
        if (i < planned.shape.sliding.size() && planned.shape.sliding[i])
            row["window"] = planned.shape.window;
        layers.push_back(row);
    }
    const Budget& budget = planned.budget;
    const Json out = {
        {"model", planned.shape.name},
        {"layers", layers},
        {"weights_bytes", planned.demand.weights},
        {"context", planned.demand.context},
        {"batch", planned.demand.batch},
        {"conversations", planned.demand.conversations},
        {"memory_bytes", planned.memory},
        {"bandwidth_bytes_per_s", timed ? Json(planned.bandwidth) : Json()},
        {"unfused", planned.unfused},
        {"rows", planned.rows},
        {"budget",
         budget.rungs.empty() ? Json() : Json{{"bytes", budget.bytes}, {"rungs", budget.rungs}}}};
    return out.dump(2) + "\n";
}

}  // namespace lowkv::cli
