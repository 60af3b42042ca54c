#pragma once
// The caches of a model, as the arithmetic of `lowkv plan` takes them, and how far each scheme
// reaches within a budget of memory.

#include <cstdint>
#include <string>
#include <vector>

#include "common/model_shape.h"
#include "lowkv/scheme.h"
#include "plan/arithmetic.h"

namespace lowkv::cli {

// Throws lowkv::Error for a scheme with a filter, or with an override of a layer that the model
// lacks.
StoredCache packed_cache(const ModelShape& shape, const Scheme& scheme);
StoredCache idealised_cache(const ModelShape& shape, double bits);

// LOWKV_BUDGET: all rows are unquantized up to so many tokens, then the oldest are packed by the
// next scheme, up to its number of tokens.
struct BudgetRung {
    std::string scheme;
    std::uint64_t tokens = 0;  // of a sequence
};
struct Budget {
    double bytes = 0;
    bool in_parts = false;          // sliding layers have their own: rungs may end before
    std::vector<BudgetRung> rungs;  // "exact" first
};

// What LOWKV_BUDGET=`size` does with so many sequences of the model. Throws lowkv::Error for a
// wrong size, or for a scheme that no budget ends at.
Budget budget_of(const ModelShape& shape, const std::string& size, const std::string& scheme,
                 const Demand& demand);
// A sentence.
std::string text_of(const Budget& budget);

}  // namespace lowkv::cli
