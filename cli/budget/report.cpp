#include "budget/report.h"

#include <algorithm>
#include <cmath>

#include "common/terminal.h"
#include "nlohmann/json.hpp"

namespace lowkv::cli {

namespace {

using Json = nlohmann::ordered_json;

// Differences of fewer standard errors than this are taken for noise.
constexpr double sure = 2;

std::string bar(double value, double most) {
    constexpr std::size_t width = 24;
    const double share = most > 0 ? std::clamp(value / most, 0.0, 1.0) : 0;
    std::string text(static_cast<std::size_t>(std::lround(share * width)), '#');
    text.resize(width, ' ');
    return text;
}

// "0.188 bits more"
std::string bits_more(double bits) {
    return fixed(std::abs(bits), 3) + (bits < 0 ? " bits less" : " bits more");
}

const VerifiedRow& chosen_row(const Verification& verification) {
    return *std::ranges::find_if(verification.rows, &VerifiedRow::chosen);
}

Json optional(const std::optional<Estimate>& estimate) {
    if (!estimate) return nullptr;
    return {{"mean_kld", estimate->mean}, {"error", estimate->error}};
}

}  // namespace

std::string bits_text(double bits, bool up) {
    constexpr double unit = 1e4, rounding = 1e-5;
    const double whole =
        up ? std::ceil(bits * unit - rounding) : std::floor(bits * unit + rounding);
    return shortest(whole / unit, 4);
}

bool better_than_uniform(const Verification& verification) {
    return verification.saved && verification.saved->mean > sure * verification.saved->error;
}

std::string layer_table(const Budget& budget) {
    const auto& layers = budget.problem.layers;
    double most = 0;
    for (const BudgetLayer& layer : layers) most = std::max(most, layer.sensitivity);
    Table table({"layer", "mean KLD", "floor", "sensitivity", "of the largest", "bits", "scheme"});
    for (std::size_t i = 0; i < layers.size(); ++i) {
        if (layers[i].elements <= 0) {
            table.add({std::to_string(i), "-", "-", "-", "keeps no keys and values", "-", "-"});
            continue;
        }
        table.add({std::to_string(i), divergence(budget.measured[i]), divergence(budget.floors[i]),
                   budget.packed[i] ? divergence(layers[i].sensitivity) : "never packed",
                   bar(layers[i].sensitivity, most), fixed(layers[i].bits[budget.rungs[i]], 2),
                   budget.ladder[budget.rungs[i]]});
    }
    return table.text();
}

std::string verification_table(const Budget& budget) {
    Table table({"cache", "bits", "mean KLD", "+-", "perplexity", "change %"});
    for (const VerifiedRow& row : budget.verification.rows) {
        table.add({row.chosen ? "the choice" : row.scheme, fixed(row.bits, 3),
                   divergence(row.kld.mean), divergence(row.kld.error), fixed(row.perplexity, 3),
                   signed_fixed(row.change_percent, 2)});
    }
    return table.text();
}

std::string verdict(const Budget& budget) {
    const Verification& found = budget.verification;
    const VerifiedRow& chosen = chosen_row(found);
    const std::string on = found.other_text
                               ? "on text that the choice was not made on"
                               : "on the very text that the choice was made on (for another, give "
                                 "twice as much), which flatters it";
    std::string text = "Measured " + on + ", over " + count(budget.positions) + " positions. ";
    if (!found.saved) {
        text += "No step that loses less fits into the target: " + budget.chosen +
                " for all layers, at " + fixed(chosen.bits, 3) + " bits, is the choice.";
        return wrapped("", text, 0);
    }
    const VerifiedRow& below = found.rows.front();
    if (better_than_uniform(found)) {
        text += "The choice loses " + fixed(100 * (1 - chosen.kld.mean / below.kld.mean), 0) +
                " % less than " + below.scheme + " for all layers, with " +
                bits_more(chosen.bits - below.bits) + ".";
    } else {
        text += below.scheme + " for all layers is as good as far as this text can tell, with " +
                bits_more(below.bits - chosen.bits) +
                ", and simpler: use it. More --tokens tell smaller differences apart.";
    }
    if (found.blind_kld) {
        const double gained = *found.blind_kld - chosen.kld.mean;
        text += " Raising as many layers blindly would give about " + divergence(*found.blind_kld) +
                "; the choice gave " + divergence(chosen.kld.mean) +
                (gained > sure * found.saved->error
                     ? "."
                     : ", which is no clear gain: here it matters how many layers are raised, and "
                       "hardly which.");
    }
    if (found.above_saves && found.above_saves->mean <= sure * found.above_saves->error) {
        text += " The choice is as good as " + found.rows.back().scheme + ", with " +
                bits_more(chosen.bits - found.rows.back().bits) + ".";
    }
    return wrapped("", text, 0);
}

std::string json(const Budget& budget) {
    Json ladder = Json::array(), layers = Json::array(), rows = Json::array();
    for (std::size_t r = 0; r < budget.ladder.size(); ++r) {
        ladder.push_back({{"scheme", budget.ladder[r]},
                          {"bits", budget.ladder_bits[r]},
                          {"mean_kld", budget.ladder_kld[r].mean},
                          {"mean_kld_error", budget.ladder_kld[r].error},
                          {"ratio", budget.problem.ratio[r]}});
    }
    double summed = 0;
    for (std::size_t i = 0; i < budget.rungs.size(); ++i) {
        const BudgetLayer& layer = budget.problem.layers[i];
        summed += layer.sensitivity;
        if (layer.elements <= 0) {
            layers.push_back({{"layer", i}, {"elements_per_token", 0}});
            continue;
        }
        layers.push_back({{"layer", i},
                          {"elements_per_token", layer.elements},
                          {"mean_kld", budget.measured[i]},
                          {"floor", budget.floors[i]},
                          {"sensitivity", layer.sensitivity},
                          {"sensitivity_error", budget.sensitivity_error[i]},
                          {"packed", static_cast<bool>(budget.packed[i])},
                          {"scheme", budget.ladder[budget.rungs[i]]},
                          {"bits", layer.bits[budget.rungs[i]]}});
    }
    const Verification& found = budget.verification;
    for (const VerifiedRow& row : found.rows) {
        rows.push_back({{"scheme", row.scheme},
                        {"chosen", row.chosen},
                        {"bits", row.bits},
                        {"mean_kld", row.kld.mean},
                        {"mean_kld_error", row.kld.error},
                        {"perplexity", row.perplexity},
                        {"perplexity_change_percent", row.change_percent}});
    }
    const Json out = {
        {"model", budget.model},
        {"model_path", budget.model_path},
        {"text", budget.text_path},
        {"tokens", budget.tokens},
        {"chunk", budget.chunk},
        {"skip", budget.skip},
        {"positions", budget.positions},
        {"target_bits", budget.target},
        {"floor", budget.floor},
        {"ladder", ladder},
        {"layers", layers},
        {"sum_of_sensitivities", summed},
        {"chosen",
         {{"scheme", budget.chosen},
          {"bits", mean_bits(budget.problem, budget.rungs)},
          {"expected_kld", expected_loss(budget.problem, budget.rungs)}}},
        {"verification",
         {{"other_text", found.other_text},
          {"rows", rows},
          {"saved_against_below", optional(found.saved)},
          {"saved_by_above", optional(found.above_saves)},
          {"blind_mix_kld", found.blind_kld ? Json(*found.blind_kld) : Json(nullptr)}}},
        {"recommended", budget.recommended}};
    return out.dump(2) + "\n";
}

}  // namespace lowkv::cli
