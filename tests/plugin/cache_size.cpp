// What llama.cpp is told that cache tensors take: ggml asks three times per tensor and aborts if
// the answers differ.

#include "cache_size.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "ggml_cache.h"

namespace {

using namespace lowkv::test;
using lowkv::ggml::packed_bytes;
using lowkv::ggml::Setting;
using lowkv::ggml::SizeAnswers;

Setting setting_of(const std::string& text) {
    Setting setting;
    setting.text = text;
    setting.scheme = lowkv::parse_scheme(text);
    return setting;
}

enum class Kind : std::uint8_t { same, apart, alone };  // values as keys, of another width, none

// The tensors of a cache in the order in which llama.cpp makes them.
struct Model {
    Context context{ggml_init({600 * ggml_tensor_overhead(), nullptr, true})};
    std::vector<ggml_tensor*> tensors;

    Model(const std::vector<Kind>& kinds, std::int64_t width, std::int64_t tokens) {
        for (std::size_t layer = 0; layer < kinds.size(); ++layer) {
            const std::string number = std::to_string(layer);
            add("cache_k_l" + number, width, tokens);
            if (kinds[layer] != Kind::alone)
                add("cache_v_l" + number, kinds[layer] == Kind::same ? width : width / 3 * 2,
                    tokens);
        }
    }

    void add(const std::string& name, std::int64_t width, std::int64_t tokens) {
        tensors.push_back(ggml_new_tensor_3d(context.get(), GGML_TYPE_F16, width, tokens, 1));
        ggml_set_name(tensors.back(), name.c_str());
    }
};

}  // namespace

TEST_CASE("a tensor's size is the same whenever and however often it is asked for") {
    std::mt19937 random(17);
    const auto below = [&](std::size_t n) { return std::size_t{random()} % n; };
    const std::vector<std::string> schemes = {"lowkv2.8", "kivi2", "int8", "exact"};
    std::vector<Setting> settings;
    for (const std::string& scheme : schemes) settings.push_back(setting_of(scheme));
    SizeAnswers answers;
    for (int round = 0; round < 200; ++round) {
        std::vector<Model> models;
        for (std::size_t m = 0; m <= below(3); ++m) {
            std::vector<Kind> kinds(1 + below(40));
            for (Kind& kind : kinds) kind = static_cast<Kind>(below(3));
            models.emplace_back(kinds, std::int64_t{192} * (1 + static_cast<int>(below(3))), 4096);
        }
        std::map<std::pair<const ggml_tensor*, std::size_t>, std::size_t> said;
        for (int i = 0; i < 400; ++i) {
            const Model& model = models[below(models.size())];
            const ggml_tensor* tensor = model.tensors[below(model.tensors.size())];
            const std::size_t scheme = below(settings.size());
            const std::size_t bytes = answers.bytes(*tensor, settings[scheme]);
            REQUIRE(bytes >= packed_bytes(*tensor, settings[scheme]));
            const auto [first, is_new] = said.try_emplace({tensor, scheme}, bytes);
            REQUIRE(first->second == bytes);
        }
        for (const Model& model : models)
            for (const ggml_tensor* tensor : model.tensors) answers.forget(*tensor);
    }
}

TEST_CASE("in llama.cpp's order the sum is what the layers take, repeats or not") {
    std::mt19937 random(18);
    const Setting setting = setting_of("lowkv2.8");
    SizeAnswers answers;
    for (int round = 0; round < 300; ++round) {
        // A model's layers are alike, but the last ones of some have no values. Keys alone of 576
        // channels are latent rows.
        const auto kind = static_cast<Kind>(random() % 3);
        const std::int64_t width = random() % 2 == 0 ? 576 : 384;
        const bool packs = kind == Kind::same || (kind == Kind::alone && width == 576);
        const Model model(std::vector<Kind>(2 + random() % 60, kind), width, 4096);
        std::size_t sum = 0, right = 0;
        for (std::size_t i = 0; i < model.tensors.size(); ++i) {
            const ggml_tensor& tensor = *model.tensors[i];
            sum += answers.bytes(tensor, setting);
            right += packs ? packed_bytes(tensor, setting) : ggml_nbytes(&tensor);
            if (random() % 2 == 0) answers.bytes(*model.tensors[random() % (i + 1)], setting);
        }
        REQUIRE(sum == right);
        for (const ggml_tensor* tensor : model.tensors) answers.forget(*tensor);
    }
}

TEST_CASE("the memory of a cache of keys alone is made, however many layers it has") {
    lowkv::ggml::backend_reg();
    for (const char* scheme : {"lowkv2.8", "kivi2", "int8", "exact"})
        for (const std::size_t layers : {1, 2, 3, 4, 27, 61}) {
            CAPTURE(scheme);
            CAPTURE(layers);
            lowkv::ggml::set_scheme(scheme);
            for (const std::int64_t width : {384, 576}) {
                const Model model(std::vector<Kind>(layers, Kind::alone), width, 4096);
                const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(
                    model.context.get(), ggml_backend_dev_buffer_type(lowkv::ggml::device())));
                REQUIRE(buffer != nullptr);
                const ggml_tensor& one = *model.tensors.front();
                const std::size_t each =
                    width == 576 ? packed_bytes(one, setting_of(scheme)) : ggml_nbytes(&one);
                if (layers > 1) CHECK(ggml_backend_buffer_get_size(buffer.get()) == layers * each);
            }
        }
}

TEST_CASE("a random rotation is made once for all layers of a form") {
    // A width that no other test asks for. One plan per question took seconds.
    const Setting setting = setting_of("turboquant3-qr");
    const Model model(std::vector<Kind>(80, Kind::same), 1536, 4096);
    SizeAnswers answers;
    answers.bytes(*model.tensors.front(), setting);
    const auto begin = std::chrono::steady_clock::now();
    for (const ggml_tensor* tensor : model.tensors) answers.bytes(*tensor, setting);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(100));
}
