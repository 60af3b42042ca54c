#pragma once

#include <memory>
#include <string>

#include "lowkv/device.h"
#include "queue.h"

namespace lowkv::devices {

// A device behind lowkv/device.h whose kernels and memory the queue has; `name`: as it is asked
// for.
std::shared_ptr<Device> make_device(std::unique_ptr<Queue> queue, std::string name);

}  // namespace lowkv::devices
