#pragma once
// The measurements of `lowkv budget`: how far schemes are from the exact cache on one piece of
// text; what every layer and every rung loses, and how the choice does beside uniform schemes.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "budget/report.h"
#include "common/metrics.h"
#include "common/model.h"
#include "llama.h"
#include "lowkv/executor_openmp.h"
#include "lowkv/scheme.h"

namespace lowkv::cli {

struct ProbeSettings {
    std::uint32_t chunk = 64;
    std::size_t skip = 0;  // first positions that aren't counted, whole chunks
    // First tokens that the exact cache reads for all, whole chunks, at most `skip`: no scheme
    // packs anything at this length or before.
    std::size_t shared = 0;
    unsigned threads = 1;
};

struct Probed {
    Distance distance;
    bool packed = false;  // a counted position had something packed to read
};

// The exact cache reads the text once, and its logits and its state before anything can be packed
// are kept, so that any number of schemes can follow from there, one context at a time.
class Probe {
  public:
    using Tick = std::function<void(std::size_t tokens)>;  // called after each chunk

    Probe(const Model& model, std::vector<llama_token> text, const ProbeSettings& settings,
          const Tick& tick);

    Probed measure(const Scheme& scheme, const Tick& tick);

    std::size_t positions() const { return next_.size(); }
    double exact_perplexity() const { return exact_perplexity_; }

  private:
    const Model& model_;
    std::vector<llama_token> text_;
    ProbeSettings settings_;
    OpenMPExecutor executor_;
    std::vector<std::uint8_t> state_;  // the exact cache's after the shared tokens
    std::vector<float> exact_;         // logits of the counted positions
    std::vector<llama_token> next_;    // what follows each of them
    double exact_perplexity_ = 0;

    Context make_context(const std::string& scheme) const;
    // Reads what follows the shared tokens; the `exact` cache's logits are kept.
    Probed read_on(Context& context, const Tick& tick, bool exact);
};

inline constexpr std::size_t floor_probes = 5;  // layers

// Makes what shows a reading's progress under a name.
using Ticker = std::function<Probe::Tick(const std::string& what)>;

Scheme uniform(const LayerScheme& rung, const Retention& retention);

// Fills in the floors, the losses of rungs and layers, and the sensitivities.
void measure(Budget& budget, Probe& probe, const std::vector<LayerScheme>& ladder,
             const Retention& retention, const Ticker& ticker);

// Fills in the verification and the recommendation.
void verify(Budget& budget, Probe& probe, const std::vector<LayerScheme>& ladder,
            const Scheme& chosen, const Ticker& ticker);

}  // namespace lowkv::cli
