#pragma once

#include <memory>

#include "lowkv/executor.h"

namespace lowkv::python {

// The OpenMP threads of the process, torch's: found, not linked. A library of our own would bring a
// second pool beside torch's, whose threads fight for the same cores, and would not load where
// there is none. Of the calling thread's; throws Error(unsupported) where the process has no GOMP.
std::unique_ptr<Executor> openmp_executor(unsigned threads);

}  // namespace lowkv::python
