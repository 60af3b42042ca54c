#pragma once
// What --json writes. nlohmann's header takes seconds to compile wherever it is included, so only
// json.cpp includes it.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace lowkv::cli {

// A number, a text, null, a list, or an object, whose fields stay in the order they are given in:
//     Json row = {{"scheme", "kivi2"}, {"bits", 3.0}};
class Json {
  public:
    struct Field;

    Json(std::nullptr_t = nullptr);
    Json(bool value);
    Json(double value);  // null where it is not finite
    Json(std::string_view text);
    Json(const char* text) : Json(std::string_view(text)) {}
    Json(const std::string& text) : Json(std::string_view(text)) {}
    template <std::signed_integral Value>
    Json(Value value) : Json(std::in_place, std::int64_t{value}) {}
    template <std::unsigned_integral Value>
    Json(Value value) : Json(std::in_place, std::uint64_t{value}) {}
    Json(std::initializer_list<Field> fields);
    static Json array();

    Json(const Json& other);
    Json(Json&& other) noexcept;
    Json& operator=(Json other) noexcept;
    ~Json();

    void push_back(const Json& item);                     // of a list
    void set(std::string_view field, const Json& value);  // of an object
    std::string dump(int indent) const;

  private:
    struct Tree;
    Json(std::in_place_t, std::int64_t value);
    Json(std::in_place_t, std::uint64_t value);
    std::unique_ptr<Tree> tree_;
};

struct Json::Field {
    std::string_view name;
    Json value;
};

}  // namespace lowkv::cli
