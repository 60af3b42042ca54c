// The kernels' CUDA dialect on the host: the same text, the same host's side as for OpenCL.

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "caller_memory.h"
#include "cuda_group.h"
#include "cuda_warp.h"
#include "cuda_words.h"
#include "device_case.h"
#include "devices/host/device.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"       // the text is C
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // what a form has no use for
#include "devices/kernels/cuda.h"

#include "devices/kernels/all.h"

#include "devices/tensor/all.h"
#pragma GCC diagnostic pop

namespace lowkv::test {
namespace {

using devices::Argument;
using devices::Grid;
using devices::Handle;

// Calls a kernel with a host's arguments; a status that is not 0 where these are not its own.
template <class... P, std::size_t... I>
int call(void (*kernel)(P...), const Grid& grid, std::span<const Argument> given,
         std::index_sequence<I...>) {
    if (given.size() != sizeof...(P) || !((given[I].bytes == sizeof(P)) && ...)) return 1;
    const std::tuple<P...> arguments{*static_cast<const P*>(given[I].value)...};
    return run_groups(grid, [&] { std::apply(kernel, arguments); }) ? 0 : 2;
}
template <class... P>
int call(void (*kernel)(P...), const Grid& grid, std::span<const Argument> given) {
    return call(kernel, grid, given, std::index_sequence_for<P...>());
}

using Run = int (*)(const Grid& grid, std::span<const Argument> arguments);
constexpr Run runs[] = {
#define RUN(name) \
    [](const Grid& grid, std::span<const Argument> given) { return call(&::name, grid, given); },
    LOWKV_KERNELS(RUN) LOWKV_TENSOR_KERNELS(RUN)
#undef RUN
};

// Where a caller's memory ends, by where it begins.
std::map<const std::byte*, const std::byte*>& callers() {
    static std::map<const std::byte*, const std::byte*> ranges;
    return ranges;
}

std::atomic<bool> all_reached = false;
std::atomic<std::uint64_t> launched = 0, uploaded = 0;

// A GPU for data centres, a smaller one ("narrow"), or one that is too old for them ("none").
std::string_view tensor_cores() {
    const char* its = std::getenv("LOWKV_TEST_TENSOR");
    return its == nullptr ? "wide" : its;
}

class EmulatedQueue final : public devices::Queue {
  public:
    EmulatedQueue() : devices::Queue("CUDA", "emulated") {
        set_device(devices::Kind::discrete, std::size_t{4} << 30, std::size_t{1} << 30);
        set_tensor({has_tensor_cores() ? 4u : 0u, tensor_cores() == "wide"});
    }

    devices::Whose whose(const void* address) const noexcept override {
        using devices::Whose;
        const auto* at = static_cast<const std::byte*>(address);
        const auto after = callers().upper_bound(at);
        if (at == others_memory()) return Whose::others;
        const bool own = after != callers().begin() && at < std::prev(after)->second;
        return all_reached || own ? Whose::own : Whose::hosts;
    }
    void use_stream(void*) override {}  // all is done when a call returns

  private:
    using Place = devices::Place;

    static std::byte* at(Place place) { return static_cast<std::byte*>(place.buffer) + place.at; }
    Handle take(std::size_t bytes) noexcept override { return std::malloc(bytes); }
    void give(Handle handle) noexcept override { std::free(handle); }
    int do_write(Place to, const void* from, std::size_t bytes) noexcept override {
        ++uploaded;
        std::memcpy(at(to), from, bytes);
        return 0;
    }
    int do_read(void* to, Place from, std::size_t bytes) noexcept override {
        std::memcpy(to, at(from), bytes);
        return 0;
    }
    int do_copy(Place to, Place from, std::size_t bytes) noexcept override {
        std::memmove(at(to), at(from), bytes);
        return 0;
    }
    int do_clear(Place to, std::size_t bytes) noexcept override {
        std::memset(at(to), 0, bytes);
        return 0;
    }
    int do_run(devices::Kernel kernel, const Grid& grid, const devices::Memories* memories,
               std::span<const Argument> arguments) noexcept override {
        ++launched;
        std::vector<Argument> all;
        if (memories != nullptr) all.push_back({memories, sizeof *memories});
        all.insert(all.end(), arguments.begin(), arguments.end());
        return runs[static_cast<std::size_t>(kernel)](grid, all);
    }
};

}  // namespace

const std::shared_ptr<Device>& shared_device() {
    static const std::shared_ptr<Device> device =
        devices::make_device(std::make_unique<EmulatedQueue>(), "cuda:emulated");
    return device;
}

std::uint64_t launches() { return launched; }
std::uint64_t uploads() { return uploaded; }
bool has_tensor_cores() { return tensor_cores() != "none"; }

void reach_all_memory() { all_reached = true; }

void* others_memory() {
    static std::byte others[4096];
    return others;
}
void* take_callers(std::size_t bytes) {
    auto* memory = new std::byte[bytes];
    callers()[memory] = memory + bytes;
    return memory;
}
void give_callers(void* memory) {
    auto* its = static_cast<std::byte*>(memory);
    callers().erase(its);
    delete[] its;
}
void write_callers(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void read_callers(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void* callers_stream() { return nullptr; }

}  // namespace lowkv::test
