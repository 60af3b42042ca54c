#include "host.h"

#include <array>
#include <cstddef>
#include <string_view>

namespace lowkv::ggml {

namespace {

struct Named {
    std::string_view name;
    Operation operation;
};

constexpr Named known[] = {
    {"NONE", Operation::none},
    {"VIEW", Operation::view},
    {"RESHAPE", Operation::reshape},
    {"PERMUTE", Operation::permute},
    {"TRANSPOSE", Operation::transpose},
    {"CONT", Operation::cont},
    {"CPY", Operation::cpy},
    {"DUP", Operation::dup},
    {"MUL", Operation::mul},
    {"MUL_MAT", Operation::mul_mat},
    {"MUL_MAT_ID", Operation::mul_mat_id},
    {"ROPE", Operation::rope},
    {"SET_ROWS", Operation::set_rows},
    {"FLASH_ATTN_EXT", Operation::flash_attn_ext},
};

using Table = std::array<Operation, 256>;

// Ends with the last known operation: a program has all of them, and nobody tells how many it has.
Table ask_program() noexcept {
    Table table{};
    std::size_t left = std::size(known);
    for (std::size_t number = 0; left > 0 && number < table.size(); ++number) {
        const std::string_view name = ggml_op_name(static_cast<ggml_op>(number));
        for (const Named& one : known) {
            if (name != one.name) continue;
            table[number] = one.operation;
            --left;
        }
    }
    return table;
}

}  // namespace

Operation operation(const ggml_tensor& node) noexcept {
    static const Table table = ask_program();
    const auto number = static_cast<std::size_t>(node.op);
    return number < table.size() ? table[number] : Operation::other;
}

}  // namespace lowkv::ggml
