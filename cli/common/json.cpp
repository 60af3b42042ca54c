#include "common/json.h"

#include "nlohmann/json.hpp"

namespace lowkv::cli {

struct Json::Tree {
    nlohmann::ordered_json root;
};

Json::Json(std::nullptr_t) : tree_(new Tree{nullptr}) {}
Json::Json(bool value) : tree_(new Tree{value}) {}
Json::Json(double value) : tree_(new Tree{value}) {}
Json::Json(std::string_view text) : tree_(new Tree{text}) {}
Json::Json(std::in_place_t, std::int64_t value) : tree_(new Tree{value}) {}
Json::Json(std::in_place_t, std::uint64_t value) : tree_(new Tree{value}) {}

Json::Json(std::initializer_list<Field> fields)
    : tree_(new Tree{nlohmann::ordered_json::object()}) {
    for (const Field& field : fields) set(field.name, field.value);
}

Json Json::array() {
    Json out;
    out.tree_->root = nlohmann::ordered_json::array();
    return out;
}

Json::Json(const Json& other) : tree_(new Tree(*other.tree_)) {}
Json::Json(Json&&) noexcept = default;
Json::~Json() = default;

Json& Json::operator=(Json other) noexcept {
    tree_.swap(other.tree_);
    return *this;
}

void Json::push_back(const Json& item) { tree_->root.push_back(item.tree_->root); }

void Json::set(std::string_view field, const Json& value) {
    tree_->root[std::string(field)] = value.tree_->root;
}

std::string Json::dump(int indent) const { return tree_->root.dump(indent); }

}  // namespace lowkv::cli
