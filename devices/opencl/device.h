#pragma once

#include <memory>
#include <string>

#include "lowkv/device.h"
#include "queue.h"

namespace lowkv::opencl {

std::shared_ptr<Device> make_device(cl_device_id id, const std::string& name);

}  // namespace lowkv::opencl
