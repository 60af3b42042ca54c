// The text of schemes and sizes, which come from command lines, requests and files.

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "common/target.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "lowkv/grammar.h"
#include "lowkv/scheme.h"

namespace lowkv::fuzz {
namespace {

void try_size(const std::string& text) {
    try {
        require(parse_size(text, "it") >= 1, "a size of 0 bytes");
    } catch (const Error& error) {
        require(error.code() == ErrorCode::invalid_argument, error.what());
    }
    if (const std::optional<Quantity> quantity = parse_quantity(text))
        require(quantity->value >= 0 && quantity->value <= 1e18, "a quantity out of its range");
}

void try_plan(const Scheme& scheme) {
    try {
        static_cast<void>(neutral_plan(scheme.base, {1, 64}));
    } catch (const Error& error) {  // a shape that it does not serve
        require(error.code() == ErrorCode::unsupported ||
                    error.code() == ErrorCode::invalid_argument ||
                    error.code() == ErrorCode::invalid_scheme,
                error.what());
    }
}

void try_scheme(const std::string& text, const Retention* unnamed) {
    Scheme scheme;
    try {
        scheme = parse_scheme(text, unnamed);
    } catch (const Error& error) {
        require(error.code() == ErrorCode::invalid_scheme, error.what());
        return;
    }
    const std::string printed = to_string(scheme);
    require(parse_scheme(printed) == scheme, "a scheme's own text means another scheme");
    require(to_string(parse_scheme(printed)) == printed, "a scheme's text changes");
    validate(scheme);
    for (const Host host : {Host::sequence, Host::pages, Host::model_cache, Host::llama_cpp,
                            Host::python, Host::vllm, Host::lmcache})
        static_cast<void>(unserved(scheme, host));
    static_cast<void>(words_of(scheme.retention));
    static_cast<void>(words_of(scheme.base.key));
    try_plan(scheme);
}

}  // namespace

std::vector<Bytes> seeds() {
    std::vector<Bytes> all;
    for (const Preset& preset : presets()) {
        all.push_back(seed({0}, preset.name));
        all.push_back(seed({0}, to_string(preset.scheme)));
        all.push_back(seed({0}, "k=" + to_string(preset.scheme.base.key) +
                                    ",v=" + to_string(preset.scheme.base.value) + ",flush=32"));
        all.push_back(seed({1}, std::string(preset.name) + ",layer.1=exact,window=64,sinks=2"));
    }
    for (const SchemeWord& word : scheme_options())
        all.push_back(seed({0}, "lowkv2.8," + word.word));
    for (const char* text : {"24MiB", "1.5GiB", "2GB", "16G", "1000000", "1e3", "128Ki"})
        all.push_back(seed({2}, text));
    return all;
}

void try_bytes(std::span<const std::byte> bytes) {
    Input input(bytes);
    const std::size_t how = input.below(3);
    const Retention unnamed{.window = 77, .sinks = 3};
    if (how == 2)
        try_size(input.text());
    else
        try_scheme(input.text(), how == 1 ? &unnamed : nullptr);
}

}  // namespace lowkv::fuzz
