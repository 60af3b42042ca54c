#pragma once

#include "lowkv/family.h"

namespace lowkv::codec {

using lowkv::family_of;

}  // namespace lowkv::codec
