#pragma once
// An argument that makes no sense, said at the border to Python.

#include <string>

#include "lowkv/error.h"

namespace lowkv::python {

inline void check(bool legal, const std::string& message) {
    if (!legal) throw Error(ErrorCode::invalid_argument, message);
}

}  // namespace lowkv::python
