#pragma once
// A device is where blocks live and where attention to them runs. The CPU is one.
//
// To everyone else its memory is opaque: the core hands addresses about, adds offsets within what
// was allocated, and never looks behind them. So a device's addresses need not be the host's.
//
// Rows, queries, masks and results of a caller are in the host's memory. Rows that are written or
// read, and all that is given to attend(), may instead be in the device's own, by addresses of its
// interface: only a CUDA device knows such. Nothing of that goes through the host, nor is anything
// waited for: it is there in the order of the stream.
//
// Work comes in batches: blocks to encode, sequences to attend. It is done in the order in which it
// is given; a device may go on with it after a call has returned, as long as what a call leaves in
// the host's memory is there after finish(). What the host gave must stay until then.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "lowkv/attention.h"
#include "lowkv/cache.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "lowkv/executor.h"

namespace lowkv {

// A block that becomes another: exact to packed, or packed to exact.
struct BlockCopy {
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    // Encoding, where Plan::has_statistics(): a packed block whose statistics it takes over, or the
    // `to` of an earlier one of the call that makes its own. Null: it makes its own.
    const std::byte* stats_from = nullptr;
    // Encoding, where Plan::wants_queries() and a block makes its own statistics: mean squares of
    // the layer's queries, [kv_head][channel], in the host's memory; encode() is done with them
    // when it returns. Null: they are not known.
    const float* queries = nullptr;
};

// Tokens [first, first + count) of an exact block, and where the first one's row is among a
// caller's, in elements. Byte: const std::byte where the block is read only.
template <class Byte>
struct BlockRows {
    Byte* block = nullptr;
    std::uint32_t first = 0, count = 0;
    std::size_t at = 0;
};

class Device {
  public:
    Device() = default;
    virtual ~Device() = default;
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    virtual std::string_view name() const noexcept = 0;

    // The calling thread's work is done in the order of its stream from here on, after what was
    // begun before: a cudaStream_t that lives as long, null for the default stream. Throws
    // Error(unsupported) where the device has no streams, or the stream is being captured.
    virtual void use_stream(void* /*stream*/) {
        throw Error(ErrorCode::unsupported, "device '", name(), "' takes no stream of a caller's");
    }

    // Throws Error(unsupported) for a plan whose blocks it can't have, by name: before there are
    // any.
    virtual void check(const Plan&) const {}

    // ---- memory ----

    // For slabs of many blocks: a multiple of 64 in address, contents unspecified. Throws
    // std::bad_alloc, or Error(device_failed) as all calls may that aren't noexcept.
    virtual std::byte* allocate(std::size_t bytes) = 0;
    virtual void deallocate(std::byte* memory, std::size_t bytes) noexcept = 0;
    virtual void copy_in(std::byte* to, const void* from, std::size_t bytes) noexcept = 0;
    virtual void copy_out(void* to, const std::byte* from, std::size_t bytes) const noexcept = 0;
    virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept = 0;
    virtual void clear(std::byte* to, std::size_t bytes) noexcept = 0;

    // ---- exact blocks, laid out as Plan says ----

    // Rows of the plan's type or another. Of a token that is named twice the later row stays, if
    // the executor has one thread. What is stored is within f16's range, so that it reaches no
    // sequence but its own: a NaN becomes 0, what is beyond +-65504 becomes that.
    virtual void write_rows(const Plan& plan, Part part, std::span<const BlockRows<std::byte>> to,
                            const Rows& rows, Executor& executor) noexcept = 0;
    // Rows of the plan's type. A latent plan's values are the first channels of its keys.
    virtual void read_rows(const Plan& plan, Part part,
                           std::span<const BlockRows<const std::byte>> from, const RowsOut& rows,
                           Executor& executor) const noexcept = 0;
    // Keys, values and positions of tokens [from_first, from_first + count), or `count` times the
    // one token from_first, to tokens [to_first, to_first + count).
    virtual void copy_rows(const Plan& plan, std::byte* to, std::uint32_t to_first,
                           const std::byte* from, std::uint32_t from_first, std::uint32_t count,
                           bool repeat) noexcept = 0;

    // ---- packed blocks ----

    // Exact to packed and back, rounded to f16 in between. Throws std::bad_alloc before anything is
    // written. `only`: the part that is encoded; the other part's packed bytes stay as they are.
    virtual void encode(const Plan& plan, std::span<const BlockCopy> blocks, Executor& executor,
                        std::optional<Part> only) = 0;
    void encode(const Plan& plan, std::span<const BlockCopy> blocks, Executor& executor) {
        encode(plan, blocks, executor, std::nullopt);
    }
    virtual void decode(const Plan& plan, std::span<const BlockCopy> blocks,
                        Executor& executor) const = 0;

    // ---- attention: arguments are checked ----

    virtual void attend(const Plan& plan, std::span<const SequenceAttention> sequences,
                        const AttentionParams& params, AttentionWorkspace& workspace,
                        Executor& executor) const = 0;
    // Adds to mass[i], of cell first_cell + i: see attention.h.
    virtual void attention_mass(const Plan& plan, const SequenceAttention& sequence,
                                const AttentionParams& params, std::uint32_t first_cell,
                                std::span<float> mass, AttentionWorkspace& workspace,
                                Executor& executor) const = 0;

    // Numbers of the host's rows that were NaN, or that ended at +-65504: of all stores on the
    // device, since it was made.
    virtual std::uint64_t saturated() const noexcept { return saturated_; }

    // What calls leave in the host's memory is there. Throws Error(device_failed) where the device
    // has failed, be it in a call that could not say so.
    virtual void finish() const {}

  protected:
    void count_saturated(std::size_t numbers) noexcept {
        if (numbers > 0) [[unlikely]]
            saturated_ += numbers;
    }

  private:
    std::atomic<std::uint64_t> saturated_{0};
};

// For devices whose rows go through the host's memory: a caller's rows from element `at` on, to
// `count` rows of [token][channel] in the plan's type, and back. What is stored is as write_rows()
// says; returns how many numbers that changed.
std::size_t store_rows(const Plan& plan, std::byte* to, std::uint32_t count, const Rows& rows,
                       std::size_t at) noexcept;
void load_rows(const Plan& plan, const std::byte* from, std::uint32_t count, const RowsOut& rows,
               std::size_t at) noexcept;

// A device's memory, given back by itself.
class DeviceMemory {
  public:
    DeviceMemory() = default;
    DeviceMemory(Device& device, std::size_t bytes)
        : device_(&device), data_(device.allocate(bytes)), bytes_(bytes) {}
    ~DeviceMemory() {
        if (data_ != nullptr) device_->deallocate(data_, bytes_);
    }
    DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
    DeviceMemory& operator=(DeviceMemory&& other) noexcept {
        std::swap(device_, other.device_);
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }

    std::byte* data() const noexcept { return data_; }

  private:
    Device* device_ = nullptr;
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

// The host's own processor and memory.
const std::shared_ptr<Device>& cpu_device();

// The device of that name, as long as it is in use and has not failed; else the one that make()
// gives. For those who name devices by text: two of one name would each take memory.
std::shared_ptr<Device> shared_device(const std::string& name,
                                      std::shared_ptr<Device> (*make)(std::string_view name));

}  // namespace lowkv
