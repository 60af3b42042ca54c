#pragma once
// XXH64 with seed 0: the checksum of images, and the identity of what a plan was given. The
// algorithm is Yann Collet's; its specification and test vectors are public.

#include <cstddef>
#include <cstdint>
#include <span>

namespace lowkv {

std::uint64_t xxh64(std::span<const std::byte> bytes) noexcept;

}  // namespace lowkv
