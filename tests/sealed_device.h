#pragma once
// A device whose memory nobody but its own calls can read or write: whoever else looks behind an
// address faults. LOWKV_TEST_DEVICE=sealed runs the tests of the cache on it.

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "lowkv/batch.h"
#include "lowkv/device.h"
#include "lowkv/error.h"
#include "platform/memory.h"
#ifdef LOWKV_DEVICE_TESTS
#include "devices/device_case.h"
#endif

namespace lowkv::test {

class SealedDevice : public Device {
  public:
    std::string_view name() const noexcept override { return "sealed"; }

    std::uint64_t saturated() const noexcept override { return cpu_.saturated(); }

    std::byte* allocate(std::size_t bytes) override {
        const std::scoped_lock lock(mutex_);
        std::byte* slab = platform::map_memory(bytes);
        if (open_ == 0) set_accessible(slab, bytes, false);
        slabs_.emplace(slab, bytes);
        return slab;
    }
    void deallocate(std::byte* memory, std::size_t bytes) noexcept override {
        const std::scoped_lock lock(mutex_);
        slabs_.erase(memory);
        platform::unmap_memory(memory, bytes);
    }
    void copy_in(std::byte* to, const void* from, std::size_t bytes) noexcept override {
        const Open open(*this);
        cpu_.copy_in(to, from, bytes);
    }
    void copy_out(void* to, const std::byte* from, std::size_t bytes) const noexcept override {
        const Open open(*this);
        cpu_.copy_out(to, from, bytes);
    }
    void copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept override {
        const Open open(*this);
        cpu_.copy(to, from, bytes);
    }
    void clear(std::byte* to, std::size_t bytes) noexcept override {
        const Open open(*this);
        cpu_.clear(to, bytes);
    }
    void write_rows(const Plan& plan, Part part, std::span<const BlockRows<std::byte>> to,
                    const Rows& rows, Executor& executor) noexcept override {
        const Open open(*this);
        cpu_.write_rows(plan, part, to, rows, executor);
    }
    void read_rows(const Plan& plan, Part part, std::span<const BlockRows<const std::byte>> from,
                   const RowsOut& rows, Executor& executor) const noexcept override {
        const Open open(*this);
        cpu_.read_rows(plan, part, from, rows, executor);
    }
    void copy_rows(const Plan& plan, std::byte* to, std::uint32_t to_first, const std::byte* from,
                   std::uint32_t from_first, std::uint32_t count, bool repeat) noexcept override {
        const Open open(*this);
        cpu_.copy_rows(plan, to, to_first, from, from_first, count, repeat);
    }
    void encode(const Plan& plan, std::span<const BlockCopy> blocks, Executor& executor,
                std::optional<Part> only) override {
        const Open open(*this);
        cpu_.encode(plan, blocks, executor, only);
    }
    void decode(const Plan& plan, std::span<const BlockCopy> blocks,
                Executor& executor) const override {
        const Open open(*this);
        cpu_.decode(plan, blocks, executor);
    }
    void attend(const Plan& plan, std::span<const SequenceAttention> sequences,
                const AttentionParams& params, AttentionWorkspace& workspace,
                Executor& executor) const override {
        const Open open(*this);
        cpu_.attend(plan, sequences, params, workspace, executor);
    }
    void attention_mass(const Plan& plan, const SequenceAttention& sequence,
                        const AttentionParams& params, std::uint32_t first_cell,
                        std::span<float> mass, AttentionWorkspace& workspace,
                        Executor& executor) const override {
        const Open open(*this);
        cpu_.attention_mass(plan, sequence, params, first_cell, mass, workspace, executor);
    }

  private:
    // The slabs are accessible as long as one lives, on any thread.
    class Open {
      public:
        explicit Open(const SealedDevice& device) : device_(device) {
            const std::scoped_lock lock(device_.mutex_);
            if (device_.open_++ == 0) device_.set_accessible(true);
        }
        ~Open() {
            const std::scoped_lock lock(device_.mutex_);
            if (--device_.open_ == 0) device_.set_accessible(false);
        }
        Open(const Open&) = delete;
        Open& operator=(const Open&) = delete;

      private:
        const SealedDevice& device_;
    };

    void set_accessible(bool accessible) const {
        for (const auto& [slab, bytes] : slabs_) set_accessible(slab, bytes, accessible);
    }
    static void set_accessible(std::byte* slab, std::size_t bytes, bool accessible) {
        if (!platform::set_accessible(slab, bytes, accessible)) std::abort();
    }

    Device& cpu_ = *cpu_device();
    mutable std::mutex mutex_;
    mutable unsigned open_ = 0;
    std::map<std::byte*, std::size_t> slabs_;
};

// A store on the device that LOWKV_TEST_DEVICE names.
inline std::shared_ptr<Store> make_store(std::size_t budget_bytes = 0) {
    const char* name = std::getenv("LOWKV_TEST_DEVICE");
    if (name != nullptr && std::string_view(name) == "sealed")
        return std::make_shared<Store>(budget_bytes, std::make_shared<SealedDevice>());
#ifdef LOWKV_DEVICE_TESTS
    if (name != nullptr && std::string_view(name) == "own")
        return std::make_shared<Store>(budget_bytes, shared_device());
#endif
    return std::make_shared<Store>(budget_bytes);
}

// What lies behind a block's view: a copy, in `copy`, where the host can't read it.
inline BlockView readable(const Device& device, const BlockView& view, std::size_t bytes,
                          std::vector<std::byte>& copy) {
    if (view.keys == nullptr || &device == cpu_device().get()) return view;
    copy.resize(bytes);
    device.copy_out(copy.data(), view.keys, copy.size());
    return {copy.data(), copy.data() + (view.values - view.keys), view.packed};
}
inline BlockView readable(const Sequence& sequence, std::uint32_t block,
                          std::vector<std::byte>& copy) {
    const BlockView view = sequence.view(block);
    const Plan& plan = sequence.plan();
    return readable(sequence.device(), view, view.packed ? plan.packed_bytes() : plan.exact_bytes(),
                    copy);
}

}  // namespace lowkv::test
