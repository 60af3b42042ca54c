// Which kernels run: the best that the CPU has, or the one that LOWKV_IMPLEMENTATION names.

#include <algorithm>
#include <string>
#include <vector>

#include "isa/table.h"
#include "lowkv/error.h"
#include "lowkv/implementation.h"
#include "platform/system.h"

namespace lowkv {

namespace kernels {

// LOWKV_IMPLEMENTATIONS is X(name) of each that this build has, best first, from
// implementations.cmake.
#define X(name)               \
    namespace name {          \
    extern const Table table; \
    }
LOWKV_IMPLEMENTATIONS
#undef X

namespace {

constexpr const Table* tables[] = {
#define X(name) &name::table,
    LOWKV_IMPLEMENTATIONS
#undef X
};

std::string supported_names() {
    std::string names;
    for (const Table* table : tables) {
        if (!table->supported()) continue;
        names.append(names.empty() ? "" : ", ").append(table->name);
    }
    return names;
}

}  // namespace

const Table& select(std::string_view name) {
    std::string_view source = "implementation";
    std::string forced;
    if (name.empty()) {
        forced = platform::environment("LOWKV_IMPLEMENTATION");
        if (!forced.empty()) {
            name = forced;
            source = "LOWKV_IMPLEMENTATION";
        }
    }
    for (const Table* table : tables) {
        if (name.empty() ? table->supported() : table->name == name) {
            if (table->supported()) return *table;
            throw Error(ErrorCode::unsupported, source, "=", name, " needs ", table->description,
                        ", which this CPU lacks; it runs: ", supported_names());
        }
    }
    throw Error(ErrorCode::unsupported, source, "=", name,
                " is not in this build; this CPU runs: ", supported_names());
}

const PartKernels& find(const Table& table, std::string_view name) {
    for (const auto& list : {table.codes, table.sorted}) {
        for (const PartKernels& kernels : list) {
            if (kernels.name == name) return kernels;
        }
    }
    throw Error(ErrorCode::unsupported, table.name, " has no kernels named ", name);
}

}  // namespace kernels

std::span<const Implementation> implementations() {
    static const std::vector<Implementation> list = [] {
        std::vector<Implementation> all;
        for (const kernels::Table* table : kernels::tables) {
            all.push_back({table->name, table->description, table->supported()});
        }
        return all;
    }();
    return list;
}

const Implementation& active_implementation() {
    const auto at = std::ranges::find(kernels::tables, &kernels::select({}));
    return implementations()[static_cast<std::size_t>(at - std::begin(kernels::tables))];
}

}  // namespace lowkv
