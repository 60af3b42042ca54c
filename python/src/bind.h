#pragma once
// The parts of the extension.

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "lowkv/device.h"
#include "lowkv/executor.h"

namespace lowkv::python {

// parse_scheme() and what it gives, presets, plans.
void bind_scheme(nanobind::module_& m);
// Stores, on devices by name.
void bind_store(nanobind::module_& m);
// Batches and their images.
void bind_batch(nanobind::module_& m);
// A layer in pages of a host's memory.
void bind_paged(nanobind::module_& m);

// As lowkv::device_by_name() (devices/names.h), but for CUDA's devices, which are of the package
// lowkv-cuda: throws Error(unsupported) without it.
std::shared_ptr<Device> device_by_name(const std::string& name);

// Runs work on the process's OpenMP threads, which are torch's, for calls from this thread. The
// OpenMP library is looked up, not linked: linking it would bring a second pool, whose threads
// fight torch's for the same cores, and the extension would not load on machines without it. Throws
// Error(unsupported) if the process has no GOMP.
std::unique_ptr<Executor> openmp_executor(unsigned threads);

// A pool of the extension's own. The last two numbers of threads that were asked for have one each:
// torch's number is each thread's own.
std::shared_ptr<Executor> thread_executor(unsigned threads);

}  // namespace lowkv::python
