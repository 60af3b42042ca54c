#pragma once
// A sequence's layers as one run of bytes: the images of serial.h one after the other, behind a
// header that says how long each is.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowkv/cache.h"
#include "lowkv/serial.h"

namespace lowkv::c {

// Throws Error(invalid_argument) where layers differ in length: save between steps.
std::vector<std::byte> save_model(std::span<const Sequence> layers);

// Each layer's image. Throws Error(invalid_image) for bytes that are none, or of another number of
// layers. What an image holds is for load_sequence() to check.
std::vector<std::span<const std::byte>> layer_images(std::span<const std::byte> bytes,
                                                     std::size_t layers);

// Throws Error(invalid_image).
void require_same_length(const Sequence& first, const Sequence& other);

}  // namespace lowkv::c
