#pragma once
// Sequences to an image and back: what a Sequence and a Batch do alike.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowkv/cache.h"
#include "lowkv/serial.h"

namespace lowkv {

struct SequenceImage {
    struct Access;
    // The image's cells [first, last); no packed block begins before and ends behind `first`.
    static std::vector<std::byte> save(std::span<const Sequence* const> sequences,
                                       std::uint32_t first, std::uint32_t last);

    // header.batch sequences, of what read_image() gave for these bytes and check_image() accepted.
    // Packed spans begin at blocks.
    static std::vector<Sequence> load(const ImageHeader& header, const std::byte* image,
                                      const std::shared_ptr<Store>& store,
                                      const std::shared_ptr<const Plan>& plan,
                                      const Retention& retention);
};

}  // namespace lowkv
