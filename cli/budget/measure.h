#pragma once
// The measurements of `lowkv budget`: what every layer and every rung loses, and how the choice
// does beside uniform schemes.

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "budget/probe.h"
#include "budget/report.h"
#include "lowkv/scheme.h"

namespace lowkv::cli {

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
