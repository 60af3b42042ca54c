#pragma once
// Errors leave the library as one exception type, thrown once, at the public edge.

#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

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

// Texts and numbers side by side, for messages.
template <class... Parts>
std::string concat(const Parts&... parts) {
    std::string text;
    const auto add = [&text]<class Part>(const Part& part) {
        static_assert(!std::is_same_v<Part, char>);
        if constexpr (std::is_arithmetic_v<Part>)
            text += std::to_string(part);
        else
            text += std::string_view(part);
    };
    (add(parts), ...);
    return text;
}

// The message says what was wrong and what would be right.
class Error : public std::runtime_error {
  public:
    template <class... Parts>
    Error(ErrorCode code, const Parts&... message)
        : std::runtime_error(concat(message...)), code_(code) {}
    ErrorCode code() const noexcept { return code_; }

  private:
    ErrorCode code_;
};

}  // namespace lowkv
