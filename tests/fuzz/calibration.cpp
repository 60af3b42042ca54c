// Files of calibrations and of Fisher weights.

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "calibration/file/safetensors.h"
#include "common/target.h"
#include "lowkv/calibration_file.h"
#include "lowkv/error.h"

namespace lowkv::fuzz {
namespace {

using namespace calibration;

constexpr Shape shape{1, 16};
constexpr std::uint32_t layers = 2;

// For what is written, in memory where the system has such a file system.
class Folder {
  public:
    Folder() {
        std::string name =
            std::filesystem::exists("/dev/shm") ? "/dev/shm/lowkv-XXXXXX" : "/tmp/lowkv-XXXXXX";
        require(mkdtemp(name.data()) != nullptr, "no folder for files");
        path_ = name;
    }
    ~Folder() { std::filesystem::remove_all(path_); }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;

    std::string file() const { return path_ / "file"; }
    std::string contents() const {
        std::ifstream in(file(), std::ios::binary);
        return {std::istreambuf_iterator<char>(in), {}};
    }

  private:
    std::filesystem::path path_;
};

std::string saved(const CalibrationFile& file) {
    static const Folder folder;
    save_calibration(folder.file(), file.calibration, file.origin);
    return folder.contents();
}

Rope rope(Rope::Pairs pairs) {
    return {.pairs = pairs, .frequencies = std::vector<float>(shape.head_dim / 2, 0.5f)};
}

template <class F>
void refusing(F f) {
    try {
        f();
    } catch (const Error& error) {
        require(error.code() == ErrorCode::invalid_calibration, error.what());
    }
}

}  // namespace

std::vector<Bytes> seeds() {
    std::vector<Bytes> all;
    for (const char* name : {"skvq-k2v2", "kvquant2", "kvquant2,layer.1=exact"}) {
        const Scheme scheme = parse_scheme(name);
        Calibration made{
            .scheme = to_string(scheme), .model = "a model", .shape = shape, .layers = {}};
        for (std::uint32_t i = 0; i < layers; ++i)
            made.layers.push_back(neutral_calibration(scheme.layer(i), shape));
        const std::string file = saved({made, {.tool = "lowkv", .text = "a text", .tokens = 9}});
        all.push_back(seed({0}, file));
        // Files that others made may have no hash: what is behind it is then within reach.
        std::string bare = file;
        const std::size_t hash = bare.find("\"hash\"");
        require(hash != std::string::npos, "a calibration without a hash");
        bare[hash + 1] = 'x';
        all.push_back(seed({0}, bare));
    }
    TensorFile fisher;
    for (std::uint32_t i = 0; i < layers; ++i)
        for (const char* part : {".key", ".value"})
            fisher.tensors["layers." + std::to_string(i) + part] =
                Tensor::of(std::vector<float>(shape.channels(), 1.5f));
    for (const char* pairs : {"halves", "neighbours"}) {
        fisher.metadata = {
            {"format", "lowkv-fisher"}, {"version", "1"}, {"pairs", pairs}, {"layers", "2"}};
        const Folder folder;
        write_tensors(folder.file(), fisher);
        all.push_back(seed({1}, folder.contents()));
    }
    return all;
}

void try_bytes(std::span<const std::byte> bytes) {
    Input input(bytes);
    const std::size_t how = input.below(3);
    const MemoryFile file(input.text());
    if (how > 0) {
        const Rope its = rope(how == 1 ? Rope::Pairs::halves : Rope::Pairs::neighbours);
        refusing([&] { load_fisher(file.path(), layers, shape, its); });
        return;
    }
    refusing([&] {
        const CalibrationFile loaded = load_calibration(file.path());
        const std::string once = saved(loaded);
        const MemoryFile again(once);
        require(saved(load_calibration(again.path())) == once,
                "a calibration changes when it is loaded and saved again");
    });
}

}  // namespace lowkv::fuzz
