#include "cache/model_image.h"

#include <cstring>
#include <string>

#include "lowkv/error.h"
#include "round.h"

namespace lowkv::cache {

namespace {

struct Header {
    char magic[8];
    std::uint32_t version, layers;
    // Each image's bytes follow, a u64 a layer, and zeros up to a multiple of `alignment`.
};
static_assert(sizeof(Header) == 16);

constexpr Header current = {{'L', 'O', 'W', 'K', 'V', 'M', 'D', 'L'}, 1, 0};
constexpr std::size_t alignment = 64;

std::size_t header_bytes(std::size_t layers) {
    return round_up(sizeof(Header) + layers * sizeof(std::uint64_t), alignment);
}

[[noreturn]] void refuse(const std::string& what) {
    throw Error(ErrorCode::invalid_image, "saved sequence: " + what);
}

}  // namespace

std::vector<std::byte> save_model(std::span<const Sequence> layers) {
    Header header = current;
    header.layers = static_cast<std::uint32_t>(layers.size());
    std::vector<std::byte> out(header_bytes(layers.size()));
    std::memcpy(out.data(), &header, sizeof header);
    for (std::size_t i = 0; i < layers.size(); ++i) {
        if (layers[i].size() != layers[0].size())
            throw Error(ErrorCode::invalid_argument,
                        "layer " + std::to_string(i) + " has " + std::to_string(layers[i].size()) +
                            " tokens and layer 0 has " + std::to_string(layers[0].size()) +
                            ": save between steps");
        const std::vector<std::byte> image = save_sequence(layers[i]);
        const std::uint64_t bytes = image.size();
        std::memcpy(out.data() + sizeof header + i * sizeof bytes, &bytes, sizeof bytes);
        out.insert(out.end(), image.begin(), image.end());
    }
    return out;
}

std::vector<std::span<const std::byte>> layer_images(std::span<const std::byte> bytes,
                                                     std::size_t layers) {
    Header header;
    if (bytes.size() < sizeof header)
        refuse("its " + std::to_string(bytes.size()) + " bytes are too few for one");
    std::memcpy(&header, bytes.data(), sizeof header);
    if (std::memcmp(header.magic, current.magic, sizeof header.magic) != 0)
        refuse("these bytes don't begin as one");
    if (header.version != current.version)
        refuse("version " + std::to_string(header.version) + "; this lowkv reads version " +
               std::to_string(current.version));
    if (header.layers != layers)
        refuse("it has " + std::to_string(header.layers) + " layers, the cache " +
               std::to_string(layers));
    std::size_t at = header_bytes(layers);
    if (bytes.size() < at) refuse("it is cut off");
    std::vector<std::span<const std::byte>> images;
    for (std::size_t i = 0; i < layers; ++i) {
        std::uint64_t size = 0;
        std::memcpy(&size, bytes.data() + sizeof header + i * sizeof size, sizeof size);
        if (size > bytes.size() - at) refuse("it is cut off in layer " + std::to_string(i));
        images.push_back(bytes.subspan(at, size));
        at += size;
    }
    if (at != bytes.size())
        refuse(std::to_string(bytes.size() - at) + " bytes follow its last layer");
    return images;
}

void require_same_length(const Sequence& first, const Sequence& other) {
    if (first.size() != other.size())
        refuse("its layers have " + std::to_string(first.size()) + " and " +
               std::to_string(other.size()) + " tokens");
}

}  // namespace lowkv::cache
