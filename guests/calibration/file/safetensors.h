#pragma once
// Files of named arrays of one dimension: https://github.com/huggingface/safetensors. Eight bytes
// with the length of a JSON header, the header, then the arrays, back to back. Read with suspicion:
// a file comes from anywhere.

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lowkv::calibration {

struct Tensor {
    std::string dtype;  // "F32", "U16"
    std::vector<std::byte> data;

    std::size_t elements() const;

    static Tensor of(const std::vector<float>& values);
    static Tensor of(const std::vector<std::uint16_t>& values);
};

struct TensorFile {
    std::map<std::string, std::string> metadata;
    std::map<std::string, Tensor> tensors;

    // The elements of a vector with `size` elements. Throws std::runtime_error, without the file's
    // name, if there is no such tensor or if it is another.
    void read(const std::string& name, std::size_t size, std::vector<float>& out) const;
    void read(const std::string& name, std::size_t size, std::vector<std::uint16_t>& out) const;
    // Its text. Throws std::runtime_error if it is not there.
    const std::string& meta(const std::string& key) const;
    // The same as a number from 1 to `most`.
    std::uint64_t number(const std::string& key, std::uint64_t most) const;

  private:
    const Tensor& find(const std::string& name, std::string_view dtype, std::size_t size) const;
};

// Throws Error(invalid_calibration) with the path and what is damaged.
TensorFile read_tensors(const std::string& path);

// A reader sees the old file or the new one (platform::replace_file()). Throws
// Error(invalid_argument) when it can't be written.
void write_tensors(const std::string& path, const TensorFile& file);

}  // namespace lowkv::calibration
