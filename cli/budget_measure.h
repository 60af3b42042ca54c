#pragma once
// The measurements of `lowkv budget`: what every layer and every rung loses, and how the choice
// does beside uniform schemes.

#include <cstddef>
#include <string>
#include <vector>

#include "budget_probe.h"
#include "budget_report.h"
#include "lowkv/scheme.h"
#include "terminal.h"

namespace lowkv::cli {

inline constexpr std::size_t floor_probes = 5;  // layers

// The progress line with the time left.
class Ticker {
  public:
    explicit Ticker(std::size_t total) : total_(total) {}
    Probe::Tick operator()(const std::string& what);

  private:
    Progress progress_{"measuring:"};
    Stopwatch watch_;
    std::size_t total_, done_ = 0;
};

Scheme uniform(const LayerScheme& rung, const Retention& retention);

// Fills in the floors, the losses of rungs and layers, and the sensitivities.
void measure(Budget& budget, Probe& probe, const std::vector<LayerScheme>& ladder,
             const Retention& retention, Ticker& ticker);

// Fills in the verification and the recommendation.
void verify(Budget& budget, Probe& probe, const std::vector<LayerScheme>& ladder,
            const Scheme& chosen, Ticker& ticker);

}  // namespace lowkv::cli
