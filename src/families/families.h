#pragma once

#include "lowkv/family.h"

namespace lowkv::codec {

// Whose a codec is: the one place that tells the library's families apart.
const Family& family_of(const Codec& codec) noexcept;

}  // namespace lowkv::codec
