#pragma once
// What the host decides by what kind of device it has, in one place. The row of CPU runtimes is
// what was tried, under PoCL; the others are reckoned from what such devices have, and no GPU has
// said yet whether they are right.
//
// What kernels have registers and local memory for is no matter of the host's: items of a group,
// rows and scores of a tile (call.h) are the same on all devices.

#include <array>
#include <cstddef>
#include <cstdint>

#include "devices/kernels/call.h"

namespace lowkv::devices {

enum class Kind : std::uint8_t {
    cpu_runtime,  // a CPU that runs kernels
    integrated,   // a GPU in the host's memory
    discrete,     // a GPU with memory of its own
};

struct Tuning {
    // Groups of a sequence's attention from which on a device is busy: fewer rows have their cells
    // parted into more tasks. An H100 has 396 at a time, by their registers; by its threads and
    // local memory DG2 has 128, Tiger Lake 12.
    std::size_t groups;
    // Cells of such a task, at least: a multiple of the largest block, 128. With 8 kv heads 4,096
    // cells are 128 groups of 256 cells, fewer than an H100 has processors.
    std::uint32_t cells;
    // Blocks that are encoded in a launch, which bounds the scratch memory: for 8 kv heads of 128
    // channels about .65 MiB a block. Some of its kernels have one group a block and head.
    std::size_t blocks;
    // Of rows on their way in or out. Over a bus a turn of 1 MiB takes about as long as its launch.
    std::size_t staging_bytes;
};

inline constexpr std::array<Tuning, 3> tunings{{
    {256, 256, 32, std::size_t{1} << 20},    // cpu_runtime
    {256, 256, 32, std::size_t{1} << 20},    // integrated
    {1024, 128, 128, std::size_t{4} << 20},  // discrete
}};
constexpr const Tuning& tuning_of(Kind kind) noexcept {
    return tunings[static_cast<std::size_t>(kind)];
}

// Rows of a task without tensor cores, of all that share a kv head: few, or as many as there are
// registers for.
constexpr std::uint32_t task_rows(std::size_t rows, std::uint32_t head_dim) noexcept {
    if (rows <= LOWKV_TASK_ROWS) return LOWKV_TASK_ROWS;
    std::uint32_t most = LOWKV_TILE_ROWS, height = 16;
    while (most * head_dim > LOWKV_TILE_OUTPUTS) most /= 2;
    while (height < most && height < rows) height *= 2;
    return height;
}

}  // namespace lowkv::devices
