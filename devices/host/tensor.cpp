// The host's side of the kernels on tensor cores.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "plan.h"
#include "state.h"

namespace lowkv::devices {
namespace {

std::uint32_t bits_of(std::uint32_t width) noexcept {
    switch (width) {
        case LOWKV_ONE: return 1;
        case LOWKV_TWO: return 2;
        case LOWKV_THREE: return 3;
        case LOWKV_FOUR: return 4;
        case LOWKV_EIGHT: return 8;
        default: return 0;
    }
}

bool is_power(std::uint32_t x) noexcept { return std::has_single_bit(x); }
std::uint32_t log2_of(std::uint32_t x) noexcept {
    return static_cast<std::uint32_t>(std::countr_zero(x));
}

bool has_zeros(const lowkv_part& part) noexcept {
    return part.levels == LOWKV_EVEN_LEVELS && part.has_zeros != 0 && part.metadata == LOWKV_F16 &&
           part.group >= 32 && is_power(part.group);
}
bool has_table(const lowkv_part& part) noexcept {
    return part.levels != LOWKV_EVEN_LEVELS && part.has_zeros == 0 && part.by_channel == 0 &&
           part.group_rows == 1;
}

std::uint32_t form_of(const PackedPart& packed, const lowkv_part& part) noexcept {
    const std::uint32_t bits = bits_of(part.width);
    const bool keys = part.keys != 0;
    if (part.exact != 0) return LOWKV_TENSOR_EXACT;
    // Rows are those of A that means leave, and read two bytes at once.
    if (packed.sorted_table() != nullptr)
        return part.tokens >= LOWKV_TENSOR_CELLS && part.sorted.rows % 2 == 0 ? LOWKV_TENSOR_SORTED
                                                                              : LOWKV_TENSOR_NONE;
    if (part.has_mean != 0) return LOWKV_TENSOR_NONE;
    if (has_zeros(part) && part.by_channel == part.keys)
        return bits == 2 || bits == 4 || bits == 8 ? LOWKV_TENSOR_EVEN : LOWKV_TENSOR_NONE;
    if (has_zeros(part) && keys) return bits == 4 ? LOWKV_TENSOR_EVEN_BY_TOKEN : LOWKV_TENSOR_NONE;
    const bool served =
        keys ? part.metadata == LOWKV_F16 && bits >= 2 : part.metadata != LOWKV_E4M3 && bits >= 1;
    return has_table(part) && served && bits <= 4 ? LOWKV_TENSOR_TABLE : LOWKV_TENSOR_NONE;
}

lowkv_tensor_part describe_part(const lowkv_part& from, std::uint32_t form) noexcept {
    lowkv_tensor_part part{};
    part.form = form;
    part.bits = bits_of(from.width);
    part.head_bytes = from.head_bytes;
    part.codes = from.codes_at;
    part.metadata = from.metadata_at;
    part.one_byte = from.metadata == LOWKV_E5M3 ? 1 : 0;
    const std::uint32_t scale_bytes = part.one_byte != 0 ? 1 : 2;
    part.zeros = from.row_entries * scale_bytes;
    part.row_bytes = (from.has_zeros != 0 ? 2 : 1) * part.zeros;
    part.group_shift = from.group == 0 ? 0 : log2_of(from.group);
    part.step = from.level_step;
    return part;
}

// Groups of one width as products take them. False: there are more than a kernel is told of.
bool describe_sorted(const lowkv_sorted& sorted, lowkv_tensor& tensor) noexcept {
    tensor.rows = sorted.head.rows;
    tensor.section = sorted.section;
    for (const std::uint32_t bits : sorted.head.bits) tensor.pattern = tensor.pattern << 4 | bits;
    std::uint32_t product = 0;
    for (std::uint32_t r = 0; r < sorted.run_count; ++r) {
        const lowkv_sorted_run& run = sorted.runs[r];
        for (std::uint32_t taken = 0; taken < run.groups;) {
            const std::uint32_t left = run.groups - taken;
            const std::uint32_t units = lowkv_tensor_units(left);
            if (tensor.pieces == LOWKV_TENSOR_PIECES) return false;
            tensor.piece[tensor.pieces++] = {
                units, run.bits, run.first_group + taken,
                run.codes + taken * lowkv_sorted_group_bytes(sorted.head.tokens, run.bits),
                product};
            product += units;
            taken += units;
        }
    }
    return true;
}

// What windows, or codes, stand for, in steps from the middle.
struct Book {
    std::uint32_t bits = 0;
    bool trellis = false;
    std::array<float, 32> level{};
    float zero = 0;

    float of(std::uint32_t window) const noexcept {
        if (!trellis) return level[window & ((1u << bits) - 1)] + zero;
        return level[window & 15] + level[16 + (window >> 2)] + zero;
    }
};
Book book_of(const lowkv_part& part) noexcept {
    Book book{bits_of(part.width), part.levels == LOWKV_TRELLIS_LEVELS, {}, 0};
    for (std::size_t i = 0; i < book.level.size(); ++i) book.level[i] = part.level[i];
    // A multiple of a half, which f16 has.
    book.zero = std::round(2 * part.level_zero / part.level_step) / 2;
    return book;
}
Book book_of(const lowkv_sorted_levels& levels, std::uint32_t bits) noexcept {
    Book book{bits, levels.trellis != 0, {}, -LOWKV_SORTED_MIDDLE};
    for (std::size_t i = 0; i < book.level.size(); ++i)
        book.level[i] = static_cast<float>(levels.level[i]);
    return book;
}

std::vector<std::uint32_t> pairs_of(const Book& book, std::uint32_t count) {
    const auto pair = [&](std::uint32_t first, std::uint32_t second) {
        return lowkv_f32_to_f16(book.of(first)) | std::uint32_t{lowkv_f32_to_f16(book.of(second))}
                                                      << 16;
    };
    std::vector<std::uint32_t> pairs(count);
    for (std::uint32_t i = 0; i < pairs.size(); ++i) {
        switch (book.bits) {
            case 1: pairs[i] = pair(i & 63, i >> 1 & 63); break;
            case 2: pairs[i] = pair(i & 63, i >> 2 & 63); break;
            case 3:
                pairs[i] = pair((i & 3) | (i >> 4 & 15) << 2, (i >> 2 & 3) | (i >> 5 & 15) << 2);
                break;
            case 4: pairs[i] = pair(i & 15, i >> 4); break;
            default:
                pairs[i] = pair((i & 15) | (i >> 8 & 1) << 4, (i >> 4 & 15) | (i >> 9 & 1) << 4);
        }
    }
    return pairs;
}

// The books of a plan's tables; false: two would need the same place.
struct Books {
    std::array<Book, LOWKV_TABLES> of{};
    bool fit = true;

    void add(std::uint32_t table, const Book& book) noexcept {
        Book& there = of[table];
        fit = fit && (there.bits == 0 || (there.trellis == book.trellis &&
                                          there.level == book.level && there.zero == book.zero));
        there = book;
    }
};
Books books_of(const Plan& plan, const lowkv_part (&parts)[2],
               const lowkv_tensor& tensor) noexcept {
    Books books;
    if (tensor.keys.form == LOWKV_TENSOR_SORTED) {
        const lowkv_sorted& sorted = *plan.keys().sorted_table();
        constexpr std::array<std::uint32_t, 6> tables{0,
                                                      LOWKV_TABLE_ONE,
                                                      LOWKV_TABLE_KEYS,
                                                      LOWKV_TABLE_THREE,
                                                      LOWKV_TABLE_FOUR,
                                                      LOWKV_TABLE_FIVE};
        for (std::uint32_t r = 0; r < sorted.run_count; ++r) {
            const std::uint32_t bits = sorted.runs[r].bits;
            books.add(tables[bits], book_of(sorted.levels[bits], bits));
        }
    }
    if (tensor.keys.form == LOWKV_TENSOR_TABLE)
        books.add(tensor.keys.bits == 3 ? LOWKV_TABLE_THREE : LOWKV_TABLE_KEYS, book_of(parts[0]));
    if (tensor.values.form == LOWKV_TENSOR_TABLE)
        books.add(tensor.values.bits == 3   ? LOWKV_TABLE_THREE
                  : tensor.values.bits == 1 ? LOWKV_TABLE_ONE
                                            : LOWKV_TABLE_VALUES,
                  book_of(parts[1]));
    return books;
}

// `wide`: as in Tensor.
Kernel tensor_kernel(const lowkv_tensor& tensor, std::uint32_t head_dim, bool wide) noexcept {
    struct Special {
        Kernel first;
        std::uint32_t token_shift, keys, key_bits, pattern, values, value_bits;
    };
    static constexpr Special specials[] = {
#define SPECIAL(unused, name, shift, keys, key_bits, pattern, values, value_bits) \
    {Kernel::tensor_##name##_64, shift, keys, key_bits, pattern, values, value_bits},
        LOWKV_TENSOR_SPECIALS(SPECIAL, )
#undef SPECIAL
    };
    const auto of_heads = [&](Kernel first) {
        const int heads = head_dim == 64 ? 0 : head_dim == 128 ? 1 : 2;
        return static_cast<Kernel>(static_cast<int>(first) + heads);
    };
    if (!wide) return of_heads(Kernel::tensor_narrow_64);
    for (const Special& one : specials) {
        const bool keys = tensor.keys.form == one.keys && tensor.pattern == one.pattern &&
                          (one.pattern != 0 || tensor.keys.bits == one.key_bits);
        const bool values =
            tensor.values.form == one.values && tensor.values.bits == one.value_bits;
        if (keys && values && tensor.token_shift == one.token_shift) return of_heads(one.first);
    }
    return of_heads(Kernel::tensor_wide_64);
}

}  // namespace

lowkv_tensor describe_tensor(const Plan& plan, const lowkv_part (&parts)[2],
                             std::uint32_t& first) noexcept {
    const std::uint32_t d = plan.shape().head_dim, tokens = plan.block_tokens();
    if ((d != 64 && d != 128 && d != 256) || tokens < 32 || !is_power(tokens)) return {};
    lowkv_tensor tensor{};
    tensor.keys = describe_part(parts[0], form_of(plan.keys(), parts[0]));
    tensor.values = describe_part(parts[1], form_of(plan.values(), parts[1]));
    if (tensor.keys.form == LOWKV_TENSOR_NONE || tensor.values.form == LOWKV_TENSOR_NONE) return {};
    tensor.token_shift = log2_of(tokens);
    tensor.rotated = plan.keys().rotation() != nullptr ? 1 : 0;
    if (tensor.keys.form == LOWKV_TENSOR_SORTED &&
        !describe_sorted(*plan.keys().sorted_table(), tensor))
        return {};
    const Books books = books_of(plan, parts, tensor);
    if (!books.fit) return {};
    for (std::uint32_t i = 0; i < LOWKV_TABLES; ++i) {
        if (books.of[i].bits == 0) continue;
        tensor.table[i] = first;
        first += lowkv_tensor_pairs(i);
    }
    return tensor;
}

std::vector<std::uint32_t> tensor_tables(const Plan& plan, const lowkv_part (&parts)[2],
                                         const lowkv_tensor& tensor) {
    std::vector<std::uint32_t> words;
    const Books books = books_of(plan, parts, tensor);
    for (std::uint32_t i = 0; i < LOWKV_TABLES; ++i) {
        if (books.of[i].bits == 0) continue;
        const std::vector<std::uint32_t> pairs = pairs_of(books.of[i], lowkv_tensor_pairs(i));
        words.insert(words.end(), pairs.begin(), pairs.end());
    }
    return words;
}

std::vector<lowkv_share> share_out(std::span<const lowkv_task> tasks,
                                   std::span<const lowkv_chunk> chunks, std::uint32_t kv_heads,
                                   std::size_t groups) {
    // In times that a group's warps take some cells each; to begin and to end a task takes one,
    // too.
    const auto cost = [](const lowkv_task& task) {
        const std::uint32_t cells =
            LOWKV_TENSOR_WARPS * (task.packed != 0 ? LOWKV_TENSOR_CELLS : LOWKV_TENSOR_ROW_CELLS);
        return std::size_t{(task.last_cell - task.first_cell + cells - 1) / cells + 1};
    };
    std::size_t all = 0, largest = 0;
    for (const lowkv_task& task : tasks) {
        all += kv_heads * cost(task);
        largest = std::max(largest, cost(task));
    }
    std::vector<lowkv_share> shares;
    for (std::size_t most = std::max(largest, (all + groups - 1) / groups);;
         most += 1 + most / 32) {
        shares.clear();
        std::size_t taken = most;
        for (const lowkv_chunk& chunk : chunks)
            for (std::uint32_t head = 0; head < kv_heads; ++head)
                for (std::uint32_t t = 0; t < chunk.tasks; ++t) {
                    const std::size_t more = cost(tasks[chunk.first_task + t]);
                    if (taken + more > most) {
                        shares.push_back({chunk.first_task + t, head, 0});
                        taken = 0;
                    }
                    taken += more;
                    ++shares.back().items;
                }
        if (shares.size() <= groups) return shares;
    }
}

void launch_tensor(State& state, const TensorCall& call) {
    Queue& queue = state.queue;
    const Tensor& device = queue.tensor();
    const Memories memories = state.memory.all();
    const std::size_t heads = std::size_t{call.chunks} * call.kv_heads;
    const Handle laid = state.laid.of(queue, heads * TENSOR_LAID_BYTES(call.head_dim));
    queue.launch(Kernel::tensor_lay, {64, call.chunks, call.kv_heads, LOWKV_TENSOR_ROWS}, memories,
                 call.tensor, call.plan, call.words, call.numbers, laid);
    const Grid grid{LOWKV_TENSOR_WARPS * std::size_t{32}, call.shares, 1, 1,
                    lowkv_tensor_shared(call.tensor, device.wide ? 1 : 0)};
    queue.launch(tensor_kernel(call.tensor, call.head_dim, device.wide), grid, memories,
                 call.tensor, call.plan, call.words, call.numbers, laid, call.first_share,
                 call.partial);
}

}  // namespace lowkv::devices
