// Calibration files: what is saved is loaded, and every damage is refused with its reason.

#include "lowkv/calibration_file.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "calibration/file/safetensors.h"
#include "lowkv/error.h"

using namespace lowkv;
using namespace lowkv::calibration;

namespace {

constexpr Shape shape{.kv_heads = 2, .head_dim = 16};

// A file of this process, removed at the end.
class TemporaryFile {
  public:
    TemporaryFile()
        : path_(std::filesystem::temp_directory_path() /
                ("lowkv-test-" + std::to_string(getpid()) + "-" + std::to_string(++made))) {}
    ~TemporaryFile() { std::filesystem::remove(path_); }
    TemporaryFile(const TemporaryFile&) = delete;
    TemporaryFile& operator=(const TemporaryFile&) = delete;

    std::string path() const { return path_.string(); }
    std::string read() const {
        std::ifstream file(path_, std::ios::binary);
        return {std::istreambuf_iterator<char>(file), {}};
    }
    void write(const std::string& bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }

  private:
    static inline int made = 0;
    std::filesystem::path path_;
};

PartCalibration skvq(std::uint16_t groups) {
    PartCalibration part;
    for (std::uint32_t c = 0; c < shape.channels(); ++c)
        part.group.push_back(static_cast<std::uint16_t>((c * 5) % groups));
    for (std::uint16_t g = 0; g < groups; ++g)
        part.clip.push_back(1.0f / static_cast<float>(g + 1));
    return part;
}

PartCalibration kvquant(bool ranges) {
    PartCalibration part;
    if (ranges) {
        for (std::uint32_t c = 0; c < shape.channels(); ++c) {
            part.low.push_back(-0.25f * static_cast<float>(c));
            part.high.push_back(1.0f + 0.125f * static_cast<float>(c));
        }
    }
    part.levels = {-0.8f, -0.2f, 0.3f, 0.9f};
    part.boundaries = {-0.5f, 0.05f, 0.6f};
    return part;
}

Calibration example(const std::string& scheme) {
    Calibration out{.scheme = to_string(parse_scheme(scheme)),
                    .model = "architecture=llama name=\"tiny \xc3\xa9\"",
                    .shape = shape,
                    .layers = {}};
    for (std::uint16_t i = 0; i < 3; ++i) {
        LayerCalibration layer{.key = skvq(2), .value = skvq(static_cast<std::uint16_t>(i + 1))};
        if (scheme.starts_with("kvquant")) layer = {.key = kvquant(true), .value = kvquant(false)};
        out.layers.push_back(layer);
    }
    if (scheme.find("layer.1") != std::string::npos) out.layers[1] = {};
    return out;
}

const Origin origin{.tool = "lowkv 0.1.0", .text = "book.txt", .tokens = 4096};

std::string refusal(const std::string& path) {
    try {
        load_calibration(path);
    } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::invalid_calibration);
        CHECK(std::string(error.what()).starts_with(path + ": "));
        return error.what();
    }
    return "accepted";
}

std::string framed(const std::string& header, const std::string& data = {}) {
    std::string bytes;
    for (unsigned i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i) & 0xff);
    return bytes + header + data;
}

}  // namespace

TEST_CASE("what is saved is loaded") {
    for (const char* scheme : {"skvq-k2v2", "kvquant2-1%", "kvquant2", "skvq-k2v2,layer.1=kivi2",
                               "skvq-k4v4,window=64"}) {
        CAPTURE(scheme);
        const TemporaryFile file;
        const Calibration saved = example(scheme);
        save_calibration(file.path(), saved, origin);
        const CalibrationFile loaded = load_calibration(file.path());
        CHECK(loaded.calibration == saved);
        CHECK(loaded.origin == origin);
        const std::string first = file.read();
        save_calibration(file.path(), saved, origin);
        CHECK(file.read() == first);
    }
}

TEST_CASE("only a file is replaced, the one that a link names too, and nothing is left behind") {
    namespace fs = std::filesystem;
    TemporaryFile name;
    const fs::path folder = name.path();
    fs::create_directory(folder);
    const TensorFile file{.metadata = {{"format", "any"}}, .tensors = {}};
    const auto save = [&](const char* to) { write_tensors((folder / to).string(), file); };
    const auto names = [&] {
        std::set<std::string> found;
        for (const auto& entry : fs::directory_iterator(folder))
            found.insert(entry.path().filename().string());
        return found;
    };

    std::ofstream(folder / "file") << "old";
    fs::create_symlink("file", folder / "link");
    fs::create_symlink(folder / "link", folder / "second");
    fs::create_symlink("new", folder / "dangling");
    for (const char* link : {"link", "second", "dangling"}) {
        CAPTURE(link);
        save(link);
        CHECK(fs::is_symlink(folder / link));
        CHECK(read_tensors((folder / link).string()).metadata == file.metadata);
    }
    CHECK(read_tensors((folder / "file").string()).metadata == file.metadata);
    CHECK(read_tensors((folder / "new").string()).metadata == file.metadata);

    REQUIRE(mkfifo((folder / "pipe").c_str(), 0600) == 0);
    fs::create_symlink("/dev/null", folder / "device");
    fs::create_symlink("around", folder / "around");
    fs::create_directory(folder / "folder");
    CHECK_THROWS_WITH_AS(save("pipe"), doctest::Contains("/pipe: it is a device or a pipe"), Error);
    CHECK_THROWS_WITH_AS(save("device"), doctest::Contains("it is a device or a pipe"), Error);
    CHECK_THROWS_WITH_AS(save("folder"), doctest::Contains("/folder: it is a folder"), Error);
    CHECK_THROWS_WITH_AS(save("around"), doctest::Contains("Too many levels"), Error);
    CHECK_THROWS_WITH_AS(save("none/file"), doctest::Contains("No such file"), Error);
    CHECK(fs::is_character_file("/dev/null"));

    std::ofstream(folder / "file") << "old";
    const auto before = names();
    rlimit limit{};  // a full disk
    getrlimit(RLIMIT_FSIZE, &limit);
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit none{.rlim_cur = 16, .rlim_max = limit.rlim_max};
    setrlimit(RLIMIT_FSIZE, &none);
    CHECK_THROWS_WITH_AS(save("file"), doctest::Contains("File too large"), Error);
    setrlimit(RLIMIT_FSIZE, &limit);
    std::signal(SIGXFSZ, handler);
    CHECK(names() == before);
    CHECK(std::string(std::istreambuf_iterator<char>(std::ifstream(folder / "file").rdbuf()), {}) ==
          "old");
    fs::remove_all(folder);
}

TEST_CASE("a calibration that can't be loaded again isn't saved, and the old file stays") {
    const TemporaryFile file;
    file.write("old");
    Calibration bad = example("skvq-k2v2");
    bad.layers[2].value.clip.clear();
    CHECK_THROWS_WITH_AS(save_calibration(file.path(), bad, origin),
                         doctest::Contains("layers.2.value: clip is missing"), Error);
    CHECK(file.read() == "old");
    CHECK_THROWS_WITH_AS(
        save_calibration("/nowhere/a/file", example("skvq-k2v2"), origin),
        doctest::Contains("can't write /nowhere/a/file: No such file or directory"), Error);
}

TEST_CASE("every truncation and extension is refused") {
    const TemporaryFile good, bad;
    save_calibration(good.path(), example("kvquant2-1%"), origin);
    const std::string bytes = good.read();
    for (std::size_t n = 0; n < bytes.size(); n += n < 64 ? 1 : 37) {
        bad.write(bytes.substr(0, n));
        CHECK(refusal(bad.path()) != "accepted");
    }
    bad.write(bytes + '\0');
    CHECK(refusal(bad.path()).find("its tensors end at byte") != std::string::npos);
    CHECK(refusal("/nowhere").find("there is no such file") != std::string::npos);
    CHECK(refusal("/tmp").find("it is no regular file") != std::string::npos);
}

TEST_CASE("random damage is refused or leaves a calibration that is in order") {
    const TemporaryFile good, bad;
    save_calibration(good.path(), example("skvq-k2v2"), origin);
    const std::string bytes = good.read();
    std::mt19937 random(1);
    int refused = 0;
    for (int i = 0; i < 3000; ++i) {
        std::string damaged = bytes;
        for (unsigned n = random() % 4 + 1; n > 0; --n)
            damaged[random() % damaged.size()] = static_cast<char>(random());
        bad.write(damaged);
        if (refusal(bad.path()) != "accepted") ++refused;
    }
    CHECK(refused > 1000);
}

TEST_CASE("damage that leaves a legal calibration does not fit the hash") {
    const TemporaryFile file;
    save_calibration(file.path(), example("kvquant2"), origin);
    CHECK(refusal(file.path()) == "accepted");
    const auto damaged = [&](const std::function<void(TensorFile&)>& damage) {
        TensorFile tensors = read_tensors(file.path());
        damage(tensors);
        const TemporaryFile bad;
        write_tensors(bad.path(), tensors);
        CHECK(refusal(bad.path()).find("do not match their hash") != std::string::npos);
    };
    damaged([](TensorFile& f) { f.tensors["layers.1.key.low"].data[3] ^= std::byte{1}; });
    damaged([](TensorFile& f) { f.metadata["model"] += "x"; });
    damaged([](TensorFile& f) { f.metadata["hash"][0] ^= 1; });
    damaged([](TensorFile& f) {
        std::swap(f.tensors["layers.0.key.low"], f.tensors["layers.0.key.high"]);
    });
}

TEST_CASE("a header that lies is refused with what is wrong") {
    const TemporaryFile file;
    const auto says = [&](const std::string& bytes, const std::string& words) {
        file.write(bytes);
        const std::string said = refusal(file.path());
        CAPTURE(said);
        CHECK(said.find(words) != std::string::npos);
    };
    says("GGUF\x03____gguf", "its header would have");
    says(std::string(8, '\xff'), "its header would have 18446744073709551615 bytes");
    says(std::string(7, '\0'), "it ends after 7 bytes");
    says(framed("[1, 2]"), "no JSON object");
    says(framed("{\"a\": "), "no JSON object");
    says(framed(std::string(200000, '[')), "no JSON object");
    says(framed("{\"a\": 3}"), "entry a of its header");
    says(framed("{\"__metadata__\": {\"format\": 1}}"), "metadata format is no text");
    says(framed("{}"), "no calibration of lowkv");
    const auto tensor = [](const std::string& what) {
        return framed("{\"t\": {" + what + "}}", "1234");
    };
    says(tensor("\"dtype\":\"F32\",\"shape\":[1]"), "no data_offsets");
    says(tensor("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]"), "4 bytes of data");
    says(tensor("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]"), "lies at 4 to 0");
    says(tensor("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]"), "whole number");
    says(tensor("\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[0,4]"), "legal: F32, U16");
    says(tensor("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]"),
         "4 bytes; legal: those of 2 elements");
    says(tensor("\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,4]"),
         "those of 4611686018427387904 elements");
    says(tensor("\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[0,4]"),
         "no shape of 1 whole number");
    says(tensor("\"dtype\":4,\"shape\":[1],\"data_offsets\":[0,4]"), "dtype 4; legal: F32, U16");
    says(tensor("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,3]"), "has 3 bytes");
    says(tensor("\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]"), "whole number");
    says(tensor("\"dtype\":\"U16\",\"shape\":[1],\"data_offsets\":[2,4]"),
         "begins at byte 2 of the data, where those before it end at 0");
    says(framed(R"({"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                R"( "b": {"dtype":"U16","shape":[1],"data_offsets":[2,4]}})",
                "1234"),
         "begins at byte 2 of the data, where those before it end at 4");
}

TEST_CASE("what a file says must fit what it holds") {
    const TemporaryFile file;
    const auto damaged = [&](const std::string& words,
                             const std::function<void(TensorFile&)>& damage,
                             const char* scheme = "skvq-k2v2") {
        save_calibration(file.path(), example(scheme), origin);
        TensorFile tensors = read_tensors(file.path());
        tensors.metadata.erase("hash");  // a file by others
        damage(tensors);
        write_tensors(file.path(), tensors);
        const std::string said = refusal(file.path());
        CAPTURE(said);
        CHECK(said.find(words) != std::string::npos);
    };
    using File = TensorFile;
    damaged("no calibration of lowkv", [](File& f) { f.metadata["format"] = "pt"; });
    damaged("it has version 2 of the format; this lowkv reads version 1",
            [](File& f) { f.metadata["version"] = "2"; });
    damaged("its metadata has no scheme", [](File& f) { f.metadata.erase("scheme"); });
    damaged("skvq-k3", [](File& f) { f.metadata["scheme"] = "skvq-k3"; });
    damaged("group is given, but channel-2-static",
            [](File& f) { f.metadata["scheme"] = "kvquant2"; });
    damaged("legal: a number from 1 to 4096", [](File& f) { f.metadata["layers"] = "-3"; });
    damaged("legal: a number from 1 to 576", [](File& f) { f.metadata["head_dim"] = "1e9"; });
    damaged("group has 32 elements", [](File& f) { f.metadata["kv_heads"] = "3"; });
    damaged("layers.3.key: group is missing", [](File& f) { f.metadata["layers"] = "4"; });
    damaged("tensor layers.2.", [](File& f) { f.metadata["layers"] = "2"; });
    damaged("layers.1.key: group is missing",
            [](File& f) { f.tensors.erase("layers.1.key.group"); });
    damaged("is none of a calibration",
            [](File& f) { f.tensors["layers.0.key.x"] = Tensor::of(std::vector<float>{1}); });
    damaged("has dtype F32; legal: U16", [](File& f) {
        f.tensors["layers.1.key.group"] = Tensor::of(std::vector<float>(32, 0.0f));
    });
    damaged("clip[0] is nan", [](File& f) {
        f.tensors["layers.0.key.clip"] = Tensor::of(std::vector<float>{NAN, 1});
    });
    damaged(
        "they must ascend",
        [](File& f) {
            f.tensors["layers.0.key.levels"] = Tensor::of(std::vector<float>{0, 1, 1, 2});
        },
        "kvquant2");
}

TEST_CASE("a calibration of something else is refused") {
    const Calibration made = example("skvq-k2v2");
    CHECK_NOTHROW(
        require_scheme(made, parse_scheme("skvq-k2v2,window=32,sinks=1"), "a.safetensors"));
    CHECK_THROWS_WITH_AS(
        require_scheme(made, parse_scheme("skvq-k4v4"), "a.safetensors"),
        doctest::Contains("a.safetensors was made for skvq-k2v2, not for skvq-k4v4"), Error);
    CHECK_THROWS_WITH_AS(require_scheme(made, parse_scheme("skvq-k2v2,layer.1=kivi2"), "a"),
                         doctest::Contains("layer 1 differs"), Error);
    CHECK_NOTHROW(require_layer(made, 2, shape, "a"));
    CHECK_THROWS_WITH_AS(require_layer(made, 3, shape, "a"),
                         doctest::Contains("a model of 3 layers; this one has more"), Error);
    CHECK_THROWS_WITH_AS(require_layer(made, 0, {.kv_heads = 4, .head_dim = 16}, "a"),
                         doctest::Contains("2 kv heads of 16 channels; this model has 4 kv heads"),
                         Error);
    CHECK_NOTHROW(require_model(made, made.model, "a"));
    CHECK_THROWS_WITH_AS(require_model(made, "other", "a"), doctest::Contains("this one is other"),
                         Error);
}

TEST_CASE("Fisher weights come in the order of the model's pairs") {
    const TemporaryFile file;
    TensorFile tensors;
    tensors.metadata = {
        {"format", "lowkv-fisher"}, {"version", "1"}, {"layers", "1"}, {"pairs", "halves"}};
    std::vector<float> key, value(32, 2.0f);
    for (int c = 0; c < 32; ++c) key.push_back(static_cast<float>(c));
    tensors.tensors = {{"layers.0.key", Tensor::of(key)}, {"layers.0.value", Tensor::of(value)}};
    write_tensors(file.path(), tensors);
    Rope rope{.pairs = Rope::Pairs::halves, .frequencies = std::vector<float>(6), .magnitude = 1};
    CHECK(load_fisher(file.path(), 1, shape, rope).key[0] == key);
    rope.pairs = Rope::Pairs::neighbours;
    const FisherWeights found = load_fisher(file.path(), 1, shape, rope);
    const std::vector<float> head(found.key[0].begin(), found.key[0].begin() + 16);
    CHECK(head == std::vector<float>{0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11, 12, 13, 14, 15});
    CHECK(found.value[0] == value);
    CHECK_THROWS_WITH_AS(load_fisher(file.path(), 2, shape, rope),
                         doctest::Contains("a model of 1 layers"), Error);
    value[3] = -1;
    tensors.tensors["layers.0.value"] = Tensor::of(value);
    write_tensors(file.path(), tensors);
    CHECK_THROWS_WITH_AS(load_fisher(file.path(), 1, shape, rope),
                         doctest::Contains("legal: finite, from 0 on"), Error);
}
