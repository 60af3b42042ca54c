// The CPU as a device: memory of the system's, plain loops over blocks, the kernels' attention. And
// the devices that are in use, by name.

#include "lowkv/device.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "attention/query.h"
#include "cpu/rows.h"
#include "platform/memory.h"

namespace lowkv {
namespace {

cpu::ExactShape exact_shape(const Plan& plan) noexcept {
    return {plan.shape().kv_heads, plan.shape().head_dim, plan.block_tokens(), plan.rows()};
}

// Byte is std::byte or const std::byte.
template <class Byte>
Byte* exact_part(const Plan& plan, Part part, Byte* exact) noexcept {
    return part == Part::keys ? exact : exact + plan.exact_part_bytes();
}

// Whether an exact block is what quantizers encode as it is.
bool is_f16(const Plan& plan) noexcept { return plan.rows() == RowType::f16; }

std::size_t elements(const Plan& plan) noexcept {
    return std::size_t{plan.shape().numbers()} * plan.block_tokens();
}
std::size_t position_bytes(const Plan& plan) noexcept {
    return plan.exact_bytes() - plan.exact_positions_offset();
}

// A packed block's rows as exact ones. `f16` is scratch memory of plan.f16_bytes(), not needed
// where is_f16().
void decode_exact(const Plan& plan, const std::byte* packed, std::byte* f16,
                  std::byte* exact) noexcept {
    if (is_f16(plan)) return decode_block(plan, packed, exact);
    decode_block(plan, packed, f16);
    cache::convert(plan.kernels(), RowType::f16, f16, plan.rows(), exact, elements(plan));
    std::memcpy(exact + plan.exact_positions_offset(), f16 + plan.f16_positions_offset(),
                position_bytes(plan));
}

// An exact block's rows rounded to f16.
void round_to_f16(const Plan& plan, const std::byte* exact, std::byte* f16) noexcept {
    cache::convert(plan.kernels(), plan.rows(), exact, RowType::f16, f16, elements(plan));
    std::memcpy(f16 + plan.f16_positions_offset(), exact + plan.exact_positions_offset(),
                position_bytes(plan));
}

// What quantizers encode is f16: rows of other types are rounded first, some blocks at a time.
constexpr std::size_t blocks_at_a_time = 32;

void encode_f16(const Plan& plan, std::span<const BlockCopy> blocks, Executor& executor,
                std::optional<Part> only) noexcept {
    if (plan.has_shared()) {
        executor.parallel_for(blocks.size(), [&](std::size_t i, unsigned) noexcept {
            encode_shared(plan, blocks[i].from, blocks[i].to, only);
        });
    }
    const std::uint32_t heads = plan.shape().kv_heads;
    // Those first that others may take statistics from.
    for (const bool leads : {true, false}) {
        if (!leads && !plan.has_statistics()) break;
        executor.parallel_for(blocks.size() * heads, [&](std::size_t item, unsigned) noexcept {
            const BlockCopy& block = blocks[item / heads];
            if (plan.has_statistics() && (block.stats_from == nullptr) != leads) return;
            const auto head = static_cast<std::uint32_t>(item % heads);
            encode_block(plan, block.from, block.to, head, head + 1,
                         {.stats_from = block.stats_from, .queries = block.queries}, only);
        });
    }
}

// T: an element's bits.
template <class T>
void copy_elements(const Plan& plan, std::byte* to, std::uint32_t to_first, const std::byte* from,
                   std::uint32_t from_first, std::uint32_t count, bool repeat) noexcept {
    const std::size_t tokens = plan.block_tokens(), channels = plan.shape().channels();
    auto* keys = reinterpret_cast<T*>(to) + to_first;
    const auto* its_keys = reinterpret_cast<const T*>(from) + from_first;
    cpu::copy_columns(keys, its_keys, channels, tokens, count, repeat);
    if (plan.shape().latent()) return;
    auto* values = reinterpret_cast<T*>(to + plan.exact_part_bytes()) + to_first * channels;
    const auto* its_values =
        reinterpret_cast<const T*>(from + plan.exact_part_bytes()) + from_first * channels;
    cpu::copy_tokens(values, its_values, channels, count, repeat);
}

class CpuDevice final : public Device {
  public:
    std::string_view name() const noexcept override { return "cpu"; }

    // Slabs of blocks.
    std::byte* allocate(std::size_t bytes) override { return platform::map_memory(bytes); }
    void deallocate(std::byte* memory, std::size_t bytes) noexcept override {
        platform::unmap_memory(memory, bytes);
    }
    void copy_in(std::byte* to, const void* from, std::size_t bytes) noexcept override {
        std::memcpy(to, from, bytes);
    }
    void copy_out(void* to, const std::byte* from, std::size_t bytes) const noexcept override {
        std::memcpy(to, from, bytes);
    }
    void copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept override {
        std::memcpy(to, from, bytes);
    }
    void clear(std::byte* to, std::size_t bytes) noexcept override { std::memset(to, 0, bytes); }

    void write_rows(const Plan& plan, Part part, std::span<const BlockRows<std::byte>> to,
                    const Rows& rows, Executor& executor) noexcept override {
        const auto store = part == Part::keys ? cpu::store_keys : cpu::store_values;
        executor.parallel_for(to.size(), [&](std::size_t i, unsigned) noexcept {
            const auto& [block, first, count, at] = to[i];
            const Rows source = cache::rows_at(rows, at);
            count_saturated(store(plan.kernels(), exact_part(plan, part, block), exact_shape(plan),
                                  first, count, source));
        });
    }
    void read_rows(const Plan& plan, Part part, std::span<const BlockRows<const std::byte>> from,
                   const RowsOut& rows, Executor& executor) const noexcept override {
        const Part stored = plan.shape().latent() ? Part::keys : part;
        const auto load = stored == Part::keys ? cpu::load_keys : cpu::load_values;
        cpu::ExactShape shape = exact_shape(plan);
        if (part == Part::values) shape.head_dim = plan.shape().out_dim();
        executor.parallel_for(from.size(), [&](std::size_t i, unsigned) noexcept {
            const auto& [block, first, count, at] = from[i];
            const RowsOut target = cache::rows_at(rows, plan.rows(), at);
            load(exact_part(plan, stored, block), shape, first, count, target);
        });
    }
    void copy_rows(const Plan& plan, std::byte* to, std::uint32_t to_first, const std::byte* from,
                   std::uint32_t from_first, std::uint32_t count, bool repeat) noexcept override {
        const auto copy = plan.rows() == RowType::f32 ? copy_elements<std::uint32_t>
                                                      : copy_elements<std::uint16_t>;
        copy(plan, to, to_first, from, from_first, count, repeat);
        if (!plan.has_positions()) return;
        constexpr std::size_t bytes = sizeof(std::int32_t);
        const std::byte* source = from + plan.exact_positions_offset() + bytes * from_first;
        std::byte* positions = to + plan.exact_positions_offset() + bytes * to_first;
        for (std::size_t t = 0; t < count; ++t)
            std::memcpy(positions + bytes * t, source + bytes * (repeat ? 0 : t), bytes);
    }

    void encode(const Plan& plan, std::span<const BlockCopy> blocks, Executor& executor,
                std::optional<Part> only) override {
        if (is_f16(plan)) return encode_f16(plan, blocks, executor, only);
        const std::size_t most = std::min(blocks.size(), blocks_at_a_time);
        std::vector<std::byte> f16(most * plan.f16_bytes());
        std::vector<BlockCopy> rounded(most);
        for (std::size_t first = 0; first < blocks.size(); first += most) {
            const std::size_t count = std::min(most, blocks.size() - first);
            executor.parallel_for(count, [&](std::size_t i, unsigned) noexcept {
                std::byte* own = f16.data() + i * plan.f16_bytes();
                round_to_f16(plan, blocks[first + i].from, own);
                rounded[i] = blocks[first + i];
                rounded[i].from = own;
            });
            encode_f16(plan, std::span(rounded).first(count), executor, only);
        }
    }
    void decode(const Plan& plan, std::span<const BlockCopy> blocks,
                Executor& executor) const override {
        const std::size_t own = is_f16(plan) ? 0 : plan.f16_bytes();
        std::vector<std::byte> f16(own * executor.threads());
        executor.parallel_for(blocks.size(), [&](std::size_t i, unsigned thread) noexcept {
            decode_exact(plan, blocks[i].from, f16.data() + thread * own, blocks[i].to);
        });
    }

    void attend(const Plan& plan, std::span<const SequenceAttention> sequences,
                const AttentionParams& params, AttentionWorkspace& workspace,
                Executor& executor) const override {
        attention::run(plan, sequences, params, workspace, executor);
    }
    void attention_mass(const Plan& plan, const SequenceAttention& sequence,
                        const AttentionParams& params, std::uint32_t first_cell,
                        std::span<float> mass, AttentionWorkspace& workspace,
                        Executor& executor) const override {
        attention::run_mass(plan, sequence, params, first_cell, mass, workspace, executor);
    }
};

}  // namespace

const std::shared_ptr<Device>& cpu_device() {
    static const std::shared_ptr<Device> device = std::make_shared<CpuDevice>();
    return device;
}

namespace {

bool works(const Device& device) {
    try {
        device.finish();
        return true;
    } catch (const Error&) {
        return false;
    }
}

}  // namespace

std::shared_ptr<Device> shared_device(const std::string& name,
                                      std::shared_ptr<Device> (*make)(std::string_view name)) {
    // Never destroyed: programs make and free caches while they end.
    static auto& mutex = *new std::mutex;
    static auto& in_use = *new std::map<std::string, std::weak_ptr<Device>>;
    const std::scoped_lock lock(mutex);
    std::weak_ptr<Device>& known = in_use[name];
    std::shared_ptr<Device> device = known.lock();
    if (device == nullptr || !works(*device)) known = device = make(name);
    return device;
}

std::size_t store_rows(const Plan& plan, std::byte* to, std::uint32_t count, const Rows& rows,
                       std::size_t at) noexcept {
    return cpu::store_values(plan.kernels(), to, exact_shape(plan), 0, count,
                             cache::rows_at(rows, at));
}
void load_rows(const Plan& plan, const std::byte* from, std::uint32_t count, const RowsOut& rows,
               std::size_t at) noexcept {
    cpu::load_values(from, exact_shape(plan), 0, count, cache::rows_at(rows, plan.rows(), at));
}

}  // namespace lowkv
