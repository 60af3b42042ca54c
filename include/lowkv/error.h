#pragma once
// Errors leave the library as one exception type, thrown once, at the public edge.

#include <stdexcept>
#include <string>

namespace lowkv {

enum class ErrorCode {
    invalid_scheme,       // the text or the combination is not a legal scheme
    invalid_argument,     // a shape, a size or a cell number is out of range
    unsupported,          // legal, but this build or this CPU can't do it
    invalid_calibration,  // a calibration is missing, damaged or made for something else
    invalid_image,        // bytes are no image, damaged, or mean something else (serial.h)
    over_budget,          // the store's byte budget is used up; nothing was changed
    device_failed,        // a device is missing, lost, out of memory or can't compile its kernels
};

// The message says what was wrong and what would be right.
class Error : public std::runtime_error {
  public:
    Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
    ErrorCode code() const noexcept { return code_; }

  private:
    ErrorCode code_;
};

}  // namespace lowkv
