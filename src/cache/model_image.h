#pragma once
// A sequence's layers as one run of bytes: the images of serial.h one after the other, behind a
// header that says how long each is.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowkv/cache.h"
#include "lowkv/serial.h"

namespace lowkv::cache {

// Throws Error(invalid_argument) where layers differ in length: save between steps.
std::vector<std::byte> save_model(std::span<const Sequence> layers);

// Finds each layer's image in what save_model() wrote. Throws Error(invalid_image) if the bytes are
// damaged or have another number of layers. The images themselves are checked by load_sequence().
std::vector<std::span<const std::byte>> layer_images(std::span<const std::byte> bytes,
                                                     std::size_t layers);

// Throws Error(invalid_image) if they differ.
void require_same_length(const Sequence& first, const Sequence& other);

}  // namespace lowkv::cache
