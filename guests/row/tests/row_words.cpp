// What row codecs' words are refused for, and what shapes have no plan.

#include <doctest/doctest.h>

#include <string>

#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "lowkv/scheme.h"

using namespace lowkv;

namespace {

std::string error_of(const auto& f, ErrorCode code) {
    try {
        f();
    } catch (const Error& error) {
        CHECK(error.code() == code);
        return error.what();
    }
    return {};
}

}  // namespace

TEST_CASE("words of row codecs that can't stand together") {
    const auto says = [](const std::string& scheme, const char* words) {
        const std::string said = error_of([&] { parse_scheme(scheme); }, ErrorCode::invalid_scheme);
        CHECK_MESSAGE(said.find(words) != std::string::npos, said);
    };
    for (const std::string codec : {"token-1-row", "token-1-g64-reorder"}) {
        says("k=" + codec + ",v=exact", codec.c_str());
        says("k=" + codec + ",v=exact", "1 bit needs a trellis");
    }
    says("kivi2,v=channel-2-static", "value codec");
    says("kivi2,v=channel-2-static", "static is for keys");
}

TEST_CASE("an outlier's channel is a byte: heads have at most 256") {
    const std::string said =
        error_of([] { Plan(parse_scheme("k=token-4-row,v=token-4-row").base, {2, 320}); },
                 ErrorCode::unsupported);
    CHECK_MESSAGE(said.find("legal: up to 256") != std::string::npos, said);
}
