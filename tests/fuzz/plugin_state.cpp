// Saved states in the plug-in for llama.cpp: the rows of a sequence, tensor by tensor, with marks,
// codes and seals (plugins/llama.cpp/row_mark.h, unit_codes.h).

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "buffer.h"
#include "common/target.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "lowkv/serial.h"
#include "lowkv_ggml.h"
#include "registry.h"
#include "row_mark.h"
#include "trial/cache.h"
#include "unit_codes.h"

namespace lowkv::fuzz {
namespace {

using namespace lowkv::ggml;
using trial::Cells;

constexpr trial::Heads heads{.head_dim = 64, .queries = 1, .kv = 1};
constexpr std::uint32_t cells = 256, next_cell = 255, most_rows = 200;
constexpr int layers = 2;
constexpr std::size_t tensor_count = 2 * layers;
constexpr const char* schemes[] = {"lowkv2.8,window=0,sinks=0", "kivi2,window=0,sinks=0",
                                   "lowkv1.5,window=16,sinks=2", "lowkv3,layer.1=exact,window=0",
                                   "int8,window=0"};

// The state of the first cells: each tensor's rows, one tensor after the other.
class Cache : public trial::Cache {
  public:
    explicit Cache(const char* scheme) : trial::Cache(device_of(scheme), heads, cells, 1, layers) {
        set_threads(backend(), 1);
        ask();
    }

    Bytes save(std::uint32_t rows) const {
        Bytes state;
        for (const ggml_tensor* tensor : tensors()) {
            Bytes its(rows * heads.row_bytes());
            ggml_backend_tensor_get(tensor, its.data(), 0, its.size());
            state.insert(state.end(), its.begin(), its.end());
        }
        return state;
    }
    // A row at a time, or all at once: both are llama.cpp's.
    void restore(std::span<const std::byte> state, std::uint32_t rows, bool by_rows) const {
        const std::size_t bytes = rows * heads.row_bytes();
        const std::size_t step = by_rows ? heads.row_bytes() : bytes;
        for (std::size_t i = 0; i < tensor_count; ++i)
            for (std::size_t at = 0; at < bytes; at += step)
                ggml_backend_tensor_set(tensors()[i], state.data() + i * bytes + at, at, step);
    }
    // Tokens [first, end) and one in `next_cell` after them, which sees them.
    bool see(std::uint32_t first, std::uint32_t end) {
        Cells where(end - first);
        std::iota(where.begin(), where.end(), first);
        where.push_back(next_cell);
        const auto fill = [](std::size_t input, std::span<float> rows) {
            std::ranges::copy(numbers(rows.size(), static_cast<unsigned>(input)), rows.begin());
        };
        const auto show = [&](std::size_t token, ggml_fp16_t* row) {
            std::fill_n(row, std::min(first + token + 1, std::size_t{end}), ggml_fp16_t{0});
            row[where[token]] = 0;
        };
        try {
            return step(where, fill, show) == GGML_STATUS_SUCCESS;
        } catch (const std::runtime_error& error) {  // a state may have infinite numbers
            require(std::string(error.what()) == "attention is not finite", error.what());
            return true;
        }
    }

  private:
    static ggml_backend_dev_t device_of(const char* scheme) {
        static const bool registered = [] {
            ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
            ggml_backend_register(backend_reg());
            return true;
        }();
        require(registered, "no plug-in");
        set_scheme(scheme);
        return device();
    }
};

void save_packed(bool packed) { setenv("LOWKV_STATES", packed ? "packed" : "f16", 1); }

// What a key row says of itself, whether or not its check is right: the two lowest bits of each
// half.
RowMark mark_in(std::span<const std::uint16_t> row) {
    std::uint64_t low = 0;
    for (std::size_t i = 0; i < 64; ++i) low |= std::uint64_t{row[i / 2] >> i % 2 & 1u} << i;
    const bool packed = (row[32] & 1) != 0;
    return {static_cast<std::uint32_t>(low) & 0xFFFFFF,
            static_cast<std::uint32_t>(low >> 24) & 0xFFFFF, packed, packed};
}

// Makes all checks of a state right, whatever its rows are.
void seal_state(const Cache& cache, Bytes& state, std::uint32_t rows, const char* scheme) {
    constexpr std::size_t checksum_at = 8, checked_from = 16;
    const std::size_t bytes = heads.row_bytes();
    const std::uint32_t own = scheme_number(to_string(parse_scheme(scheme)));
    std::vector<std::uint32_t> ties;
    for (std::uint32_t r = 0; r < rows; ++r) {
        std::vector<std::uint16_t> row(bytes / sizeof(std::uint16_t));
        std::memcpy(row.data(), state.data() + r * bytes, bytes);
        const std::optional<StampedMark> right = read_stamp(row);
        ties.push_back(right ? right->tie : stamp(row, mark_in(row), own));
        std::memcpy(state.data() + r * bytes, row.data(), bytes);
    }
    for (std::size_t t = 1; t < tensor_count; ++t) {
        const CacheTensor& tensor = *cache_tensor(cache.tensors()[t]);
        for (std::uint32_t r = 0; r < rows; ++r) {
            const std::span all =
                std::span(state).subspan(t * rows * bytes + r * bytes, (rows - r) * bytes);
            if (!begins_codes(all.first(bytes))) {
                seal(all.first(bytes), ties[r], tensor.layer->tensor_number(tensor.part));
                continue;
            }
            const std::size_t length = codes_length(all.first(bytes));
            if (length > all.size()) continue;
            const std::uint64_t checksum = image_checksum(all.first(length).subspan(checked_from));
            std::memcpy(all.data() + checksum_at, &checksum, sizeof checksum);
            r += static_cast<std::uint32_t>((length - 1) / bytes);
        }
    }
}

}  // namespace

std::vector<Bytes> seeds() {
    std::vector<Bytes> all;
    for (const bool packed : {false, true}) {
        save_packed(packed);
        for (unsigned number = 0; number < std::size(schemes); ++number) {
            for (const std::uint32_t rows : {40u, 130u}) {
                Cache cache(schemes[number]);
                require(cache.see(0, rows / 2) && cache.see(rows / 2, rows), "no step");
                all.push_back(seed({number, packed ? 5u : 1u}, cache.save(rows)));
            }
        }
    }
    return all;
}

void try_bytes(std::span<const std::byte> bytes) {
    Input input(bytes);
    const char* scheme = schemes[input.below(std::size(schemes))];
    const unsigned how = input.byte();
    Bytes state = input.rest();
    const auto rows = static_cast<std::uint32_t>(
        std::min<std::size_t>(state.size() / tensor_count / heads.row_bytes(), most_rows));
    if (rows == 0) return;
    save_packed((how & 4) != 0);
    Cache cache(scheme);
    if ((how & 1) != 0) seal_state(cache, state, rows, scheme);
    cache.restore(state, rows, (how & 2) != 0);
    if ((how & 8) != 0) static_cast<void>(cache.save(rows));  // saved before it is seen
    const bool seen = cache.see(rows, rows);
    const Bytes saved = cache.save(rows);
    Cache other(scheme);
    const std::uint64_t repacked = ggml::stats().repacked_cells;
    other.restore(saved, rows, (how & 2) == 0);
    // What was refused stays so.
    require(other.see(rows, rows) == seen, "a state is taken, and refused once it is saved again");
    if (!seen) return;
    // Packed rows that come as numbers are packed once more, which is counted.
    require(other.save(rows) == saved || ggml::stats().repacked_cells > repacked,
            "a state changes when it is restored and saved again");
    require(cache.see(rows, rows), "a restored state can't be used twice");
}

}  // namespace lowkv::fuzz
