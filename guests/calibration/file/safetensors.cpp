#include "calibration/file/safetensors.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <stdexcept>
#include <utility>

#include "lowkv/error.h"
#include "nlohmann/json.hpp"
#include "platform/system.h"
#include "round.h"

namespace lowkv::calibration {
namespace {

using Json = nlohmann::json;

constexpr std::size_t length_bytes = 8;
constexpr std::size_t max_header = std::size_t{16} << 20;
constexpr std::size_t max_file = std::size_t{512} << 20;

template <class... Parts>
[[noreturn]] void fail(const Parts&... why) {
    throw std::runtime_error(concat(why...));
}

std::uint64_t element_bytes(const std::string& dtype) {
    if (dtype == "F32") return sizeof(float);
    if (dtype == "U16") return sizeof(std::uint16_t);
    return 0;
}

template <class T>
Tensor tensor_of(const char* dtype, const std::vector<T>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    return {.dtype = dtype, .data = {bytes.begin(), bytes.end()}};
}

template <class T>
std::vector<T> elements(const Tensor& tensor) {
    std::vector<T> out(tensor.data.size() / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), tensor.data.data(), tensor.data.size());
    return out;
}

// ---- reading ----

std::string read_bytes(const std::string& name) {
    const std::filesystem::path path = platform::path_of(name);
    if (!std::filesystem::is_regular_file(path))
        fail(exists(path) ? "it is no regular file" : "there is no such file");
    const std::uintmax_t size = std::filesystem::file_size(path);
    if (size > max_file) fail("it has ", size, " bytes; a calibration has at most ", max_file);
    errno = 0;
    std::ifstream file(path, std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (!file) fail("it can't be read: ", std::strerror(errno));
    return bytes;
}

std::size_t header_length(std::string_view bytes) {
    if (bytes.size() < length_bytes)
        fail("it ends after ", bytes.size(), " bytes, within the length of its header");
    std::uint64_t length = 0;
    for (std::size_t i = length_bytes; i-- > 0;)
        length = length << 8 | static_cast<unsigned char>(bytes[i]);
    if (length > std::min(max_header, bytes.size() - length_bytes))
        fail("its header would have ", length, " bytes, and ", bytes.size() - length_bytes,
             " follow: it is cut short, or no safetensors file");
    return length;
}

struct Place {
    std::uint64_t begin = 0, end = 0;
    std::string name;
};

// So many whole numbers under a key of a tensor's entry.
std::vector<std::uint64_t> numbers(const std::string& name, const Json& entry, const char* key,
                                   std::size_t count) {
    const Json list = entry.value(key, Json());
    if (!list.is_array() || list.size() != count ||
        !std::ranges::all_of(list, &Json::is_number_unsigned))
        fail("tensor ", name, " has no ", key, " of ", count,
             count == 1 ? " whole number" : " whole numbers");
    return list.get<std::vector<std::uint64_t>>();
}

Tensor tensor_at(Place& place, const Json& entry, std::string_view data) {
    const std::vector<std::uint64_t> at = numbers(place.name, entry, "data_offsets", 2);
    const std::uint64_t elements = numbers(place.name, entry, "shape", 1)[0];
    const Json dtype = entry.value("dtype", Json());
    place.begin = at[0], place.end = at[1];
    if (place.begin > place.end || place.end > data.size())
        fail("tensor ", place.name, " lies at ", place.begin, " to ", place.end, "; the file has ",
             data.size(), " bytes of data");
    const std::size_t bytes = place.end - place.begin;
    const std::uint64_t size = dtype.is_string() ? element_bytes(dtype.get<std::string>()) : 0;
    if (size == 0) fail("tensor ", place.name, " has dtype ", dtype.dump(), "; legal: F32, U16");
    if (bytes % size != 0 || bytes / size != elements)
        fail("tensor ", place.name, " has ", bytes, " bytes; legal: those of ", elements,
             " elements of dtype ", dtype.dump());
    const auto of_it = std::as_bytes(std::span(data.substr(place.begin, bytes)));
    return {.dtype = dtype, .data = {of_it.begin(), of_it.end()}};
}

// Arrays fill the data without gaps and without overlaps.
void check_places(std::vector<Place> places, std::size_t data_bytes) {
    std::ranges::sort(places, {}, [](const Place& p) { return std::pair(p.begin, p.end); });
    std::uint64_t at = 0;
    for (const Place& place : places) {
        if (place.begin != at)
            fail("tensor ", place.name, " begins at byte ", place.begin,
                 " of the data, where those before it end at ", at);
        at = place.end;
    }
    if (at != data_bytes)
        fail("its tensors end at byte ", at, " of the data, the data at ", data_bytes);
}

TensorFile parse(std::string_view bytes) {
    const std::size_t length = header_length(bytes);
    const std::string_view data = bytes.substr(length_bytes + length);
    const Json header = Json::parse(bytes.substr(length_bytes, length), nullptr, false);
    if (!header.is_object()) fail("its header is no JSON object");
    TensorFile file;
    std::vector<Place> places;
    for (const auto& [name, entry] : header.items()) {
        if (!entry.is_object()) fail("entry ", name, " of its header is no JSON object");
        if (name == "__metadata__") {
            for (const auto& [key, value] : entry.items()) {
                if (!value.is_string()) fail("its metadata ", key, " is no text");
                file.metadata[key] = value;
            }
            continue;
        }
        places.push_back({.name = name});
        file.tensors[name] = tensor_at(places.back(), entry, data);
    }
    check_places(std::move(places), data.size());
    return file;
}

// ---- writing ----

std::string header_of(const TensorFile& file, std::string& data) {
    Json header = {{"__metadata__", file.metadata}};
    // F32 first: every array is aligned to its element.
    for (const char* dtype : {"F32", "U16"}) {
        for (const auto& [name, tensor] : file.tensors) {
            if (tensor.dtype != dtype) continue;
            const std::size_t begin = data.size();
            data.append(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size());
            header[name] = {{"dtype", tensor.dtype},
                            {"shape", {tensor.elements()}},
                            {"data_offsets", {begin, data.size()}}};
        }
    }
    std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
    text.resize(round_up(text.size(), length_bytes), ' ');
    return text;
}

}  // namespace

std::size_t Tensor::elements() const { return data.size() / element_bytes(dtype); }

Tensor Tensor::of(const std::vector<float>& values) { return tensor_of("F32", values); }
Tensor Tensor::of(const std::vector<std::uint16_t>& values) { return tensor_of("U16", values); }

const Tensor& TensorFile::find(const std::string& name, std::string_view dtype,
                               std::size_t size) const {
    const auto found = tensors.find(name);
    if (found == tensors.end()) fail("tensor ", name, " is missing");
    const Tensor& tensor = found->second;
    if (tensor.dtype != dtype)
        fail("tensor ", name, " has dtype ", tensor.dtype, "; legal: ", dtype);
    if (tensor.elements() != size)
        fail("tensor ", name, " has ", tensor.elements(), " elements; legal: ", size);
    return tensor;
}

void TensorFile::read(const std::string& name, std::size_t size, std::vector<float>& out) const {
    out = elements<float>(find(name, "F32", size));
}

void TensorFile::read(const std::string& name, std::size_t size,
                      std::vector<std::uint16_t>& out) const {
    out = elements<std::uint16_t>(find(name, "U16", size));
}

const std::string& TensorFile::meta(const std::string& key) const {
    const auto found = metadata.find(key);
    if (found == metadata.end()) fail("its metadata has no ", key);
    return found->second;
}

std::uint64_t TensorFile::number(const std::string& key, std::uint64_t most) const {
    const std::string& text = meta(key);
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > most)
        fail("its metadata ", key, " is \"", text, "\"; legal: a number from 1 to ", most);
    return value;
}

TensorFile read_tensors(const std::string& path) {
    try {
        return parse(read_bytes(path));
    } catch (const std::exception& error) {
        throw Error(ErrorCode::invalid_calibration, path, ": ", error.what());
    }
}

void write_tensors(const std::string& path, const TensorFile& file) {
    std::string data;
    const std::string header = header_of(file, data);
    std::string text;
    for (std::size_t i = 0; i < length_bytes; ++i)
        text += static_cast<char>(header.size() >> (8 * i) & 0xff);
    try {
        platform::replace_file(platform::path_of(path), text + header + data, true);
    } catch (const std::runtime_error& error) {
        throw Error(ErrorCode::invalid_argument, "can't write ", path, ": ", error.what());
    }
}

}  // namespace lowkv::calibration
