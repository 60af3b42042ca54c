#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "devices/names.h"

namespace lowkv::ggml {

// A device by its name (devices/names.h), kept until the process ends: its caches come and go.
std::shared_ptr<Device> kept_device(const std::string& name);

// Device::saturated() of the CPU and of all that are kept.
std::uint64_t saturated_numbers();

}  // namespace lowkv::ggml
