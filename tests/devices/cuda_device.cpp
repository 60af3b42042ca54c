// LOWKV_TEST_CUDA names it, or it is the first there is.

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <stdexcept>

#include "caller_memory.h"
#include "device_case.h"
#include "lowkv/cuda.h"

namespace lowkv::test {
namespace {

void require(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

}  // namespace

const std::shared_ptr<Device>& shared_device() {
    static const std::shared_ptr<Device> device = [] {
        const char* name = std::getenv("LOWKV_TEST_CUDA");
        return cuda_device(name != nullptr ? name : "cuda");
    }();
    return device;
}

std::uint64_t launches() { return 0; }
std::uint64_t uploads() { return 0; }
bool has_tensor_cores() { return true; }  // since compute capability 8.0

// All is there, whatever streams are under way.
void* take_callers(std::size_t bytes) {
    void* memory = nullptr;
    require(cudaMalloc(&memory, bytes));
    return memory;
}
void* others_memory() { return nullptr; }
void give_callers(void* memory) { cudaFree(memory); }
void write_callers(void* to, const void* from, std::size_t bytes) {
    require(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
    require(cudaDeviceSynchronize());
}
void read_callers(void* to, const void* from, std::size_t bytes) {
    require(cudaDeviceSynchronize());
    require(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}
void* callers_stream() {
    static cudaStream_t stream = [] {
        cudaStream_t made = nullptr;
        require(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
        return made;
    }();
    return stream;
}

}  // namespace lowkv::test
