// A device with kernels of devices/kernels/ behind lowkv/device.h.

#include "device.h"

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "lowkv/part.h"
#include "row_runs.h"
#include "state.h"

namespace lowkv::devices {
namespace {

std::uint32_t number_of(Part part) noexcept { return part == Part::keys ? 0 : 1; }

// What begin_sorted is told of each block.
std::vector<std::uint32_t> hints_of(const Memory& memory, const Plan& plan,
                                    std::span<const BlockCopy> blocks) {
    const lowkv_sorted& sorted = *plan.keys().sorted_table();
    const std::size_t d = plan.shape().head_dim;
    std::vector<std::uint32_t> hints;
    std::vector<std::byte> section;
    for (const BlockCopy& block : blocks) {
        hints.push_back(block.stats_from == nullptr ? LOWKV_NOWHERE
                                                    : memory.address(block.stats_from));
        const std::size_t at = hints.size();
        hints.resize(at + plan.shape().channels() / 8);
        if (sorted.head.weighted == 0 || block.queries == nullptr) continue;
        for (std::size_t head = 0; head < plan.shape().kv_heads; ++head) {
            section.assign(sorted.section.largest, std::byte{0});
            codec::write_damping(sorted, block.queries + head * d, section.data());
            std::memcpy(hints.data() + at + head * d / 8, section.data() + sorted.section.damping,
                        d / 2);
        }
    }
    return hints;
}

class KernelDevice final : public Device {
  public:
    KernelDevice(std::unique_ptr<Queue> queue, std::string its_name)
        : name_(std::move(its_name)), state_(std::make_unique<State>(std::move(queue))) {}

    std::string_view name() const noexcept override { return name_; }

    void use_stream(void* stream) override {
        const std::scoped_lock lock(state_->mutex);
        state_->queue.use_stream(stream);
    }

    // Describes the plan to the device, too: calls that may not throw find that done.
    void check(const Plan& plan) const override {
        check_served(plan, state_->queue.title());
        const std::scoped_lock lock(state_->mutex);
        state_->known(plan);
    }

    // ---- memory ----

    std::byte* allocate(std::size_t bytes) override {
        const std::scoped_lock lock(state_->mutex);
        return state_->memory.allocate(bytes);
    }
    void deallocate(std::byte* memory, std::size_t) noexcept override {
        const std::scoped_lock lock(state_->mutex);
        state_->memory.deallocate(memory);
    }
    void copy_in(std::byte* to, const void* from, std::size_t bytes) noexcept override {
        const std::scoped_lock lock(state_->mutex);
        state_->queue.write(state_->memory.place(to), from, bytes);
    }
    // Zeros, where the device has failed.
    void copy_out(void* to, const std::byte* from, std::size_t bytes) const noexcept override {
        const std::scoped_lock lock(state_->mutex);
        state_->queue.read(to, state_->memory.place(from), bytes);
        if (state_->queue.failed()) std::memset(to, 0, bytes);
    }
    void copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept override {
        const std::scoped_lock lock(state_->mutex);
        const Place there = state_->memory.place(to);
        state_->queue.copy(there, state_->memory.place(from), bytes);
    }
    void clear(std::byte* to, std::size_t bytes) noexcept override {
        const std::scoped_lock lock(state_->mutex);
        state_->queue.clear(state_->memory.place(to), bytes);
    }

    // ---- exact blocks ----

    void write_rows(const Plan& plan, Part part, std::span<const BlockRows<std::byte>> to,
                    const Rows& rows, Executor&) noexcept override {
        const auto write = [&](Handle handle, const RowRuns& runs, bool staged) {
            Rows from = rows;
            if (staged) {
                runs.each([&](std::uint32_t first, std::uint32_t count, std::size_t at) {
                    count_saturated(store_rows(plan, staged_row(plan, first), count, rows, at));
                });
                state_->queue.write({state_->device_staging.get()}, state_->staging.data(),
                                    runs.tokens * row_bytes(plan));
                from = {state_->device_staging.get(), plan.rows(), plan.shape().head_dim,
                        plan.shape().channels()};
            }
            state_->queue.launch(Kernel::write_rows,
                                 grid_of(runs.longest * plan.shape().channels(), runs.count),
                                 state_->memory.all(), handle, number_of(part), runs.runs,
                                 from.data, static_cast<std::uint32_t>(from.type),
                                 std::uint64_t{from.token_stride}, std::uint64_t{from.head_stride});
        };
        each_rows(plan, to, rows.data, rows.token_stride, write);
    }
    // Zeros, where the device has failed.
    void read_rows(const Plan& plan, Part part, std::span<const BlockRows<const std::byte>> from,
                   const RowsOut& rows, Executor&) const noexcept override {
        const auto read = [&](Handle handle, const RowRuns& runs, bool staged) {
            const std::size_t steps = (runs.longest + LOWKV_READ_TOKENS - 1) / LOWKV_READ_TOKENS;
            RowsOut to = rows;
            if (staged)
                to = {state_->device_staging.get(), plan.shape().head_dim, plan.shape().channels()};
            state_->queue.launch(Kernel::read_rows,
                                 grid_of(steps * plan.shape().channels(), runs.count),
                                 state_->memory.all(), handle, number_of(part), runs.runs, to.data,
                                 std::uint64_t{to.token_stride}, std::uint64_t{to.head_stride});
            if (!staged) return;
            const std::size_t bytes = runs.tokens * row_bytes(plan);
            state_->queue.read(state_->staging.data(), {to.data}, bytes);
            if (state_->queue.failed()) std::fill_n(state_->staging.begin(), bytes, std::byte{0});
            runs.each([&](std::uint32_t first, std::uint32_t count, std::size_t at) {
                load_rows(plan, staged_row(plan, first), count, rows, at);
            });
        };
        each_rows(plan, from, rows.data, rows.token_stride, read);
    }
    void copy_rows(const Plan& plan, std::byte* to, std::uint32_t to_first, const std::byte* from,
                   std::uint32_t from_first, std::uint32_t count, bool repeat) noexcept override {
        const std::scoped_lock lock(state_->mutex);
        const Handle handle = state_->try_plan(plan);
        const std::uint32_t there = state_->memory.address(to), here = state_->memory.address(from);
        const std::uint32_t step = repeat ? 0 : 1;
        for (const std::uint32_t part : {0u, 1u})
            state_->queue.launch(
                Kernel::copy_rows, grid_of(std::size_t{count} * plan.shape().channels()),
                state_->memory.all(), handle, part, there, to_first, here, from_first, count, step);
    }

    // ---- packed blocks ----

    // Blocks that others may take statistics from come first.
    void encode(const Plan& plan, std::span<const BlockCopy> blocks, Executor&,
                std::optional<Part> only) override {
        if (!plan.has_statistics()) return encode_alike(plan, blocks, only);
        std::vector<BlockCopy> sorted(blocks.begin(), blocks.end());
        const auto others = std::ranges::stable_partition(
            sorted, [](const BlockCopy& block) { return block.stats_from == nullptr; });
        encode_alike(plan, {sorted.begin(), others.begin()}, only);
        encode_alike(plan, others, only);
    }
    void decode(const Plan& plan, std::span<const BlockCopy> blocks, Executor&) const override {
        each_batch(plan, blocks, [&](const Batch& batch) {
            const lowkv_part& shape = batch.shape;
            const std::size_t count = batch.blocks.size(), heads = count * shape.kv_heads;
            const auto launch = [&](Kernel kernel, const Grid& grid) {
                state_->queue.launch(kernel, grid, state_->memory.all(), batch.plan, batch.part,
                                     batch.words);
            };
            if (shape.sorted_at != 0)
                launch(Kernel::decode_sorted, {64, shape.head_dim / LOWKV_SORTED_GROUP, heads});
            else if (shape.by_token != 0)
                launch(Kernel::decode_tokens, {64, shape.tokens, heads});
            else
                launch(Kernel::decode, grid_of(elements_of(plan), count));
        });
    }

    // ---- attention ----

    void attend(const Plan& plan, std::span<const SequenceAttention> sequences,
                const AttentionParams& params, AttentionWorkspace&, Executor&) const override {
        check(plan);
        const std::scoped_lock lock(state_->mutex);
        run_attention(*state_, plan, sequences, params);
    }
    void attention_mass(const Plan& plan, const SequenceAttention& sequence,
                        const AttentionParams& params, std::uint32_t first_cell,
                        std::span<float> mass, AttentionWorkspace&, Executor&) const override {
        check(plan);
        const std::scoped_lock lock(state_->mutex);
        run_mass(*state_, plan, sequence, params, first_cell, mass);
    }

    // Nothing is waited for: what reads has read when it returns.
    void finish() const override {
        const std::scoped_lock lock(state_->mutex);
        state_->queue.check();
    }

  private:
    std::string name_;
    std::unique_ptr<State> state_;

    // A block's elements of one part.
    static std::size_t elements_of(const Plan& plan) noexcept {
        return std::size_t{plan.block_tokens()} * plan.shape().channels();
    }
    static std::size_t row_bytes(const Plan& plan) noexcept {
        return element_bytes(plan.rows()) * plan.shape().channels();
    }

    std::byte* staged_row(const Plan& plan, std::size_t token) const noexcept {
        return state_->staging.data() + token * row_bytes(plan);
    }

    // Calls f(plan, runs, whether they are in the staging memory) for some runs at a time.
    template <class Byte, class F>
    void each_rows(const Plan& plan, std::span<const BlockRows<Byte>> blocks, const void* data,
                   std::size_t token_stride, F f) const noexcept {
        const Whose whose = state_->queue.whose(data);
        const std::scoped_lock lock(state_->mutex);
        if (whose == Whose::others)
            return state_->queue.fail("moving rows, which are in another device's memory");
        const Handle handle = state_->try_plan(plan);
        const bool staged = whose == Whose::hosts;
        each_launch(state_->memory, plan, blocks, token_stride,
                    staged ? state_->staging.size() / row_bytes(plan) : 0,
                    [&](const RowRuns& runs) { f(handle, runs, staged); });
    }

    // A part of some blocks, in a launch.
    struct Batch {
        Handle plan;
        std::uint32_t part;
        const lowkv_part& shape;
        std::span<const BlockCopy> blocks;
        Handle words;  // the blocks' addresses
    };

    // All make their own statistics, or none.
    void encode_alike(const Plan& plan, std::span<const BlockCopy> blocks,
                      std::optional<Part> only) {
        each_batch(plan, blocks, [&](const Batch& batch) {
            if (only && batch.part != number_of(*only)) return;
            const lowkv_part& shape = batch.shape;
            const std::size_t heads = batch.blocks.size() * shape.kv_heads;
            if (shape.exact != 0) {
                state_->queue.launch(Kernel::encode_exact,
                                     grid_of(elements_of(plan), batch.blocks.size()),
                                     state_->memory.all(), batch.plan, batch.part, batch.words);
                return;
            }
            const Handle scratch = state_->scratch.of(state_->queue, heads * shape.scratch_bytes);
            const auto launch = [&](Kernel kernel, const Grid& grid, const auto&... more) {
                state_->queue.launch(kernel, grid, state_->memory.all(), batch.plan, batch.part,
                                     batch.words, scratch, more...);
            };
            if (shape.sorted_at != 0)
                encode_sorted(plan, batch, heads, launch);
            else
                encode_groups(shape, heads, launch);
        });
    }

    // Uniform and rotated ones.
    template <class Launch>
    static void encode_groups(const lowkv_part& shape, std::size_t heads, const Launch& launch) {
        const std::size_t groups = std::size_t{shape.group_rows} * shape.row_entries;
        const std::size_t codes = std::size_t{shape.tokens} * shape.head_dim;
        if (shape.by_token != 0) {
            if (shape.has_mean != 0) launch(Kernel::find_mean, grid_of(1, heads));
            launch(Kernel::transform, {64, shape.tokens, heads});
            launch(Kernel::find_grids, grid_of(groups, heads));
            if (shape.levels == LOWKV_TRELLIS_LEVELS) {
                launch(Kernel::find_windows, grid_of(codes / LOWKV_WORD_CODES, heads));
                launch(Kernel::find_scales, grid_of(shape.tokens, heads));
            }
        } else {
            launch(Kernel::find_ranges, grid_of(groups, heads));
        }
        launch(Kernel::write_metadata, grid_of(1, heads));
        if (shape.has_zeros != 0) launch(Kernel::find_codes, grid_of(codes, heads));
        if (shape.has_mean != 0) launch(Kernel::correct_mean, grid_of(shape.head_dim, heads));
        launch(Kernel::pack_codes, grid_of(shape.head_bytes - shape.codes_at, heads));
    }

    template <class Launch>
    void encode_sorted(const Plan& plan, const Batch& batch, std::size_t heads,
                       const Launch& launch) {
        const lowkv_part& shape = batch.shape;
        const std::size_t codes = std::size_t{shape.tokens} * shape.head_dim;
        const std::vector<std::uint32_t> hints = hints_of(state_->memory, plan, batch.blocks);
        launch(Kernel::begin_sorted, grid_of(1, heads),
               state_->hints.holding(state_->queue, hints));
        launch(Kernel::transform_sorted, grid_of(codes / LOWKV_SORTED_GROUP, heads));
        launch(Kernel::find_reaches, grid_of(shape.tokens, heads));
        launch(Kernel::find_nearest, grid_of(codes, heads));
        if (shape.levels == LOWKV_TRELLIS_LEVELS)
            launch(Kernel::find_paths, grid_of(codes / LOWKV_WORD_CODES, heads));
        launch(Kernel::fit_scales, grid_of(shape.tokens, heads));
        launch(Kernel::write_sorted, grid_of(1, heads));
        launch(Kernel::pack_sorted, grid_of(shape.head_bytes, heads));
    }

    // Calls f(batch) for some blocks at a time. Nothing is waited for, also where the old blocks
    // are given up after it: of a device that has failed no memory is relied on (Queue::check()).
    template <class F>
    void each_batch(const Plan& plan, std::span<const BlockCopy> blocks, F f) const {
        check(plan);
        const std::scoped_lock lock(state_->mutex);
        State& state = *state_;
        const State::Known& known = state.known(plan);
        std::vector<std::uint32_t> addresses;
        const std::size_t most = state.queue.tuning().blocks;
        for (std::size_t first = 0; first < blocks.size(); first += most) {
            addresses.clear();
            const auto some = blocks.subspan(first, std::min(most, blocks.size() - first));
            for (const BlockCopy& block : some) {
                addresses.push_back(state.memory.address(block.from));
                addresses.push_back(state.memory.address(block.to));
            }
            const Handle words = state.words.holding(state.queue, addresses);
            for (const std::uint32_t part : {0u, 1u})
                f(Batch{known.buffer.get(), part, known.description.parts[part], some, words});
        }
        state.queue.check();
    }
};

}  // namespace

std::shared_ptr<Device> make_device(std::unique_ptr<Queue> queue, std::string name) {
    return std::make_shared<KernelDevice>(std::move(queue), std::move(name));
}

}  // namespace lowkv::devices
