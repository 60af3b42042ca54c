// Schemes as text: round trips over random legal schemes, and what each error says.

#include "lowkv/scheme.h"

#include <doctest/doctest.h>

#include <array>
#include <initializer_list>
#include <random>
#include <string>

#include "lowkv/codec.h"
#include "lowkv/error.h"

using namespace lowkv;

namespace {

class Random {
  public:
    explicit Random(unsigned seed) : engine_(seed) {}
    std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(engine_() % n); }
    template <class T>
    T one_of(std::initializer_list<T> values) {
        return values.begin()[below(static_cast<std::uint32_t>(values.size()))];
    }
    LayerScheme layer() {
        if (below(3) == 0)
            return presets()[below(static_cast<std::uint32_t>(presets().size()))].scheme.base;
        return {.key = below(4) == 0 ? sorted() : codec(), .value = codec()};
    }
    Codec sorted() {
        Codec codec{.axis = Axis::sorted, .group = Group::head};
        codec.quarter_bits[0] = static_cast<std::uint8_t>(2 + below(4));
        for (std::size_t q = 1; q < 4; ++q)
            codec.quarter_bits[q] =
                static_cast<std::uint8_t>(below(codec.quarter_bits[q - 1] + 1u));
        codec.width = sorted_width(codec.quarter_bits[0]);
        codec.weighted = below(2) == 1;
        codec.exact_rows = static_cast<std::uint8_t>(below(5));
        if (std::ranges::any_of(codec.quarter_bits, [](auto bits) { return bits > 0 && bits < 4; }))
            codec.levels = one_of({Levels::uniform, Levels::trellis});
        return codec;
    }
    Codec codec() {
        if (below(4) == 0) return {};
        return {.width = static_cast<Width>(1 + below(std::size(width_table) - 1)),
                .axis = one_of({Axis::channel, Axis::token}),
                .group = one_of({Group::g32, Group::g64, Group::g128}),
                .metadata = one_of({Metadata::fp16, Metadata::fp8_e4m3})};
    }
    Scheme scheme() {
        Scheme result;
        result.base = layer();
        if (below(2)) result.retention.window = below((1u << 20) + 1);
        if (below(2)) result.retention.sinks = below(65537);
        if (below(2)) result.retention.flush = 32 * below((1u << 15) + 1);
        if (below(2)) result.retention.young = below((1u << 20) + 1);
        if (below(2)) {
            result.retention.filter = one_of({Filter::heavy, Filter::random});
            result.retention.keep = below(50);
            result.retention.evict = 1 + below(50);
        }
        for (std::uint32_t n = below(4); n > 0; --n) {
            const std::uint32_t first = below(4096);
            result.overrides.push_back({first, first + below(4096 - first), layer()});
        }
        return result;
    }

  private:
    std::mt19937 engine_;
};

std::string message_of(const std::string& text) {
    try {
        parse_scheme(text);
    } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::invalid_scheme);
        return error.what();
    }
    FAIL("accepted: " << text);
    return {};
}

void check_error(const std::string& text, std::initializer_list<const char*> parts) {
    const std::string message = message_of(text);
    for (const char* part : parts) {
        CHECK_MESSAGE(message.find(part) != std::string::npos,
                      "'" << part << "' is not in: " << message);
    }
}

void check_invalid(const Scheme& scheme, const std::string& part) {
    try {
        validate(scheme);
    } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::invalid_scheme);
        CHECK_MESSAGE(std::string(error.what()).find(part) != std::string::npos,
                      "'" << part << "' is not in: " << error.what());
        return;
    }
    FAIL("validated, but should say: " << part);
}

}  // namespace

TEST_CASE("random legal schemes validate and come back from their text") {
    Random random(20260);
    for (int i = 0; i < 20000; ++i) {
        const Scheme scheme = random.scheme();
        const std::string text = to_string(scheme);
        CAPTURE(text);
        REQUIRE_NOTHROW(validate(scheme));
        REQUIRE(parse_scheme(text) == scheme);
        REQUIRE(to_string(parse_scheme(text)) == text);
    }
}

TEST_CASE("presets have the documented contents and are their own canonical text") {
    for (const Preset& preset : presets()) {
        CAPTURE(std::string(preset.name));
        CHECK_NOTHROW(validate(preset.scheme));
        CHECK(to_string(preset.scheme) == preset.name);
        CHECK(parse_scheme(preset.name) == preset.scheme);
        const bool kvquant = preset.name.starts_with("kvquant");  // its paper keeps one sink only
        CHECK(preset.scheme.retention == (kvquant ? Retention{0, 1, 0} : Retention{128, 5, 0}));
        CHECK_FALSE(preset.summary.empty());
    }
    CHECK(parse_scheme("exact").base == LayerScheme{});
    CHECK(parse_scheme("kivi2") == parse_scheme("k=channel-2-g32,v=token-2-g32"));
    CHECK(parse_scheme("kivi4") == parse_scheme("k=channel-4-g32,v=token-4-g32"));
    CHECK(parse_scheme("int8") == parse_scheme("k=channel-8-g32,v=token-8-g128"));
    CHECK(parse_scheme("int4") == parse_scheme("k=token-4-g32,v=token-4-g32"));
}

TEST_CASE("canonical text names presets and only what differs") {
    const auto canonical = [](const char* text) { return to_string(parse_scheme(text)); };
    CHECK(canonical("k=channel-2-g32,v=token-2-g32,window=128,sinks=5") == "kivi2");
    CHECK(canonical(" kivi2 ,\tsinks=0 , window=64 ") == "kivi2,window=64,sinks=0");
    CHECK(canonical("kivi2,k=channel-4-g32") == "k=channel-4-g32,v=token-2-g32");
    CHECK(canonical("k=token-3-g64-fp8,v=exact") == "k=token-3-g64-fp8,v=exact");
    CHECK(canonical("kivi2,layer.0-1=channel-4-g32/token-4-g32,layer.29-29=exact/token-8-g64") ==
          "kivi2,layer.0-1=kivi4,layer.29=exact/token-8-g64");
    CHECK(canonical("kivi2,flush=128") == "kivi2,flush=128");
}

TEST_CASE("words of earlier versions are refused by name, with what to use instead") {
    for (const auto& [text, word, instead] : std::initializer_list<std::array<const char*, 3>>{
             {"kivi2,rows=8", "\"rows\" at position 7", "a budget of memory"},
             {"kivi2,rows=0", "\"rows\" at position 7", "a budget of memory"},
             {"kvarn3", "\"kvarn3\" at position 1", "lowkv2.8"},
             {"kivi2,layer.3=kvarn2", "\"kvarn2\" at position 15", "lowkv2.8"},
             {"k=channel-3-g128-hadamard-varnorm,v=exact", "\"varnorm\" at position 27",
              "lowkv2.8"},
             {"k=token-2.6-head-normal,v=exact", "\"2.6\" at position 9", "2 bits, or 3 bits"}}) {
        INFO(text);
        const std::string said = message_of(text);
        CHECK(said.find(word) != std::string::npos);
        CHECK(said.find("is no longer in lowkv: ") != std::string::npos);
        CHECK(said.find(instead) != std::string::npos);
    }
    check_error("kivi2,window=2.6", {"\"2.6\"", "is not a legal window"});  // a number, here
}

TEST_CASE("the last override that names a layer wins") {
    const Scheme scheme = parse_scheme("kivi2,layer.0-3=kivi4,layer.2=exact");
    CHECK(scheme.layer(0) == parse_scheme("kivi4").base);
    CHECK(scheme.layer(2).exact());
    CHECK(scheme.layer(3) == parse_scheme("kivi4").base);
    CHECK(scheme.layer(4) == parse_scheme("kivi2").base);
}

TEST_CASE("errors name the word, its position and the legal values") {
    check_error("kivi3", {"\"kivi3\"", "position 1 ",
                          "exact, lowkv1.5, lowkv2, lowkv2.8, lowkv3, lowkv4", "k=channel-2-g32"});
    check_error("KIVI4", {"\"KIVI4\"", "is not a preset"});
    check_error("  nonsense", {"\"nonsense\"", "position 3 ", "is not a preset"});
    check_error("", {"empty", "exact, lowkv1.5, lowkv2"});
    check_error(" \t", {"empty"});
    check_error("kivi2,", {"position 7 ", "is empty"});
    check_error("kivi2,,sinks=0", {"position 7 ", "is empty"});
    check_error("kivi2,exact", {"\"exact\"", "position 7 ", "preset comes first"});
    check_error("kivi2,windows=3",
                {"\"windows\"", "position 7 ",
                 "k=, v=, window=, sinks=, flush=, young=, keep=, evict=, filter=, layer.N="});
    check_error("kivi2,window=1,window=2", {"position 16 ", "given twice"});
    check_error("kivi2,window=many", {"\"many\"", "position 14 ", "a number from 0 to 1048576"});
    check_error("kivi2,window=1048577", {"a number from 0 to 1048576"});
    check_error("kivi2,window=-1", {"\"-1\"", "a number from 0 to 1048576"});
    check_error("kivi2,window=", {"position 14 "});
    check_error("kivi2,sinks=65537", {"a number from 0 to 65536"});
    check_error("kivi2,sinks=99999999999999999999", {"a number from 0 to 65536"});
    check_error("kivi2,flush=33", {"\"33\"", "a multiple of 32 from 0 to 1048576"});
    check_error("kivi2,rows=4", {"\"rows\"", "position 7 ", "is no longer in lowkv"});
}

TEST_CASE("filters: text, canonical text and errors") {
    const Retention retention = parse_scheme("kivi2,evict=50%,keep=5%,filter=heavy").retention;
    CHECK(retention.filter == Filter::heavy);
    CHECK(retention.keep == 5);
    CHECK(retention.evict == 50);
    CHECK(to_string(parse_scheme("kivi2,filter=heavy,keep=5%,evict=50%")) ==
          "kivi2,filter=heavy,keep=5%,evict=50%");
    CHECK(parse_scheme("kivi2,filter=none,keep=0%") == parse_scheme("kivi2"));
    check_error("kivi2,filter=heavi,keep=5%", {"\"heavi\"", "position 14 ", "none, heavy, random"});
    check_error("kivi2,filter=heavy,keep=5", {"\"5\"", "legal keep", "a number from 0% to 100%"});
    check_error("kivi2,filter=heavy,keep=", {"legal keep"});
    check_error("kivi2,filter=heavy,evict=101%", {"\"101%\"", "a number from 0% to 100%"});
    check_error("kivi2,filter=heavy", {"nothing to do", "keep=5%"});
    check_error("kivi2,keep=5%", {"add filter=heavy"});
    check_error("kivi2,filter=random,keep=60%,evict=41%", {"keep=60%", "evict=41%", "100%"});
    Scheme scheme = parse_scheme("kivi2");
    scheme.retention.filter = static_cast<Filter>(9);
    check_invalid(scheme, "9 is not a filter; legal: none, heavy, random");
}

TEST_CASE("errors inside a codec") {
    check_error("k=chanel-2-g32,v=exact", {"\"chanel\"", "position 3 ", "axis", "channel, token"});
    check_error("k=exakt,v=exact", {"\"exakt\"", "(a codec is exact, or axis-bits-group"});
    check_error("k=channel-5-g32,v=exact", {"\"5\"", "position 11 ", "bits", "1.5, 2, 3, 4, 8"});
    check_error("v=token-2-32,k=exact", {"\"32\"", "position 11 ", "group", "g32, g64, g128"});
    check_error("kivi2,v=token-2", {"\"token-2\"", "lacks its group", "g32, g64, g128"});
    check_error("kivi2,v=token", {"lacks its number of bits"});
    check_error("kivi2,v=", {"position 9 ", "axis"});
    check_error("kivi2,v=token-2-g32-fp9", {"\"fp9\"", "position 21 ", "does not belong"});
    check_error("kivi2,v=token-2-g32-fp8-x", {"\"x\"", "does not belong"});
    check_error("k=token-2-g32", {"names no value codec", "add v="});
    check_error("window=3", {"names no key codec", "start with a preset"});
}

TEST_CASE("fields that exclude each other are refused with the reason") {
    check_error("k=channel-2-head,v=exact", {"key codec channel-2-head", "g32, g64 or g128"});
    check_error("k=channel-2-g32-hadamard,v=exact", {"channel-2-g32-hadamard", "scale per token"});
    check_error("k=channel-2-g32-normal,v=exact", {"scale per token"});
    check_error("k=token-8-head-normal,v=exact", {"1.5, 2, 3 or 4 bits"});
    check_error("k=token-4-head-lsq,v=exact", {"add normal"});
    for (const char* codec :
         {"token-4-head-trellis", "token-1.5-head-trellis", "token-1-g32-trellis"})
        check_error("k=" + std::string(codec) + ",v=exact",
                    {codec, "1, 2 or 3 bits and one scale"});
    for (const char* codec : {"token-1-head", "token-1-head-normal", "channel-1-g32"})
        check_error("k=" + std::string(codec) + ",v=exact", {codec, "1 bit needs a trellis"});
    CHECK(to_string(parse_scheme("k=token-1-head-trellis,v=token-3-head-trellis-lsq")) ==
          "k=token-1-head-trellis,v=token-3-head-trellis-lsq");
    check_error("k=token-2-head-normal-search,v=exact", {"range of a uniform group"});
    check_error("kivi2,v=token-2-head-normal-mean", {"value codec", "mean is for keys"});
    check_error("kivi2,v=token-2-g32-e5m3", {"e5m3 has no sign"});
    check_error("kivi2,k=channel-2-g32-mean", {"normal, trellis and mean need a scale per token"});
    check_error("kivi2,layer.3=exact/token-2-g32-mean", {"layer.3-3", "mean is for keys"});
    // The words have one order, so that a scheme has one text.
    check_error("k=token-3-head-hadamard-normal,v=exact",
                {"\"normal\"", "stands in the wrong place"});
}

#ifndef LOWKV_GUESTS
TEST_CASE("what guests store is refused by name in a build without them") {
    for (const char* text : {"kvquant3", "skvq-k2v2,window=64", "kivi2,layer.1=kvquant2-1%",
                             "k=token-4-row,v=token-2-g32", "k=token-4-g64-reorder,v=exact",
                             "k=channel-2-static,v=exact", "k=token-2-g64-1%,v=exact",
                             "k=token-2-g64-learned,v=exact", "k=token-2-g64-pre,v=exact"})
        check_error(text, {"this lowkv was built without SKVQ and KVQuant", "LOWKV_GUESTS=ON"});
    for (const Preset& preset : presets()) CHECK_FALSE(preset.scheme.needs_calibration());
    Codec codec = parse_scheme("int4").base.key;
    codec.group = Group::row;
    CHECK_THROWS_AS(Plan({.key = codec, .value = {}}, {2, 64}), Error);
}
#endif

TEST_CASE("sorted keys: text and errors") {
    const Codec key = parse_scheme("k=sorted-4211-head-2rows,v=exact").base.key;
    CHECK(key.axis == Axis::sorted);
    CHECK(key.quarter_bits == std::array<std::uint8_t, 4>{4, 2, 1, 1});
    CHECK(key.exact_rows == 2);
    CHECK(to_string(key) == "sorted-4211-head-2rows");
    check_error("k=exact,v=sorted-4211-head", {"value codec", "sorted is for keys"});
    check_error("k=sorted-4-head,v=exact", {"sorted-4-head", "bits of each quarter"});
    check_error("k=token-4211-head,v=exact", {"token-4211-head", "are for sorted keys"});
    check_error("k=token-4-head-2rows,v=exact", {"exact rows are for sorted keys"});
    check_error("k=sorted-4211-g32,v=exact", {"sorted-4211-head-2rows"});
    check_error("k=sorted-4211-head-normal,v=exact", {"levels", "of their own"});
    CHECK(to_string(parse_scheme("k=sorted-4211-head-trellis-2rows,v=exact").base.key) ==
          "sorted-4211-head-trellis-2rows");
    check_error("k=sorted-4444-head-trellis,v=exact", {"groups of 1, 2 or 3 bits"});
    check_error("k=sorted-1111-head,v=exact",
                {"\"1111\"", "position 10 ", "1.5, 2, 3, 4, 8, 4211"});
    check_error("k=sorted-4212-head,v=exact", {"\"4212\"", "bits"});
    check_error("k=sorted-4211-head-5rows,v=exact",
                {"\"5rows\"", "does not belong to a codec", "1row, 2rows"});
    Scheme scheme = parse_scheme("k=sorted-4211-head,v=exact");
    scheme.base.key.width = Width::two;
    check_invalid(scheme, "their first quarter");
    scheme.base.key.quarter_bits = {4, 2, 3, 1};
    check_invalid(scheme, "is not a legal number of bits");
}

TEST_CASE("errors in layer overrides") {
    check_error("kivi2,layer.3-1=kivi4", {"\"layer.3-1\"", "position 7 ", "A <= B < 4096"});
    check_error("kivi2,layer.4096=kivi4", {"\"layer.4096\"", "A <= B < 4096"});
    check_error("kivi2,layer.1-2-3=kivi4", {"\"layer.1-2-3\""});
    check_error("kivi2,layer.x=kivi4", {"\"layer.x\""});
    check_error("kivi2,layer.=kivi4", {"\"layer.\""});
    check_error("kivi2,layer.1=kivi5", {"\"kivi5\"", "position 15 "});
    check_error("kivi2,layer.1=exact/token-9-g32", {"\"9\"", "position 27 ", "2, 3, 4, 8"});
}

TEST_CASE("schemes built in code are validated field by field") {
    Scheme scheme = parse_scheme("kivi2");
    scheme.base.key.width = static_cast<Width>(9);
    check_invalid(scheme, "key codec: 9 is not a legal number of bits; legal: 1, 1.5, 2, 3, 4, 8");
    scheme = parse_scheme("kivi2");
    scheme.base.value.group = static_cast<Group>(48);
    check_invalid(scheme, "value codec: 48 is not a legal group; legal: g32, g64, g128");
    scheme = parse_scheme("kivi2");
    scheme.base.value.axis = static_cast<Axis>(7);
    check_invalid(scheme, "axis");
    scheme = parse_scheme("exact");
    scheme.base.key.group = Group::g64;
    check_invalid(scheme, "exact codec");
    scheme = parse_scheme("kivi2");
    scheme.retention.flush = 40;
    check_invalid(scheme, "flush is 40; legal: a multiple of 32");
    scheme = parse_scheme("kivi2");
    scheme.overrides.push_back({5, 4, scheme.base});
    check_invalid(scheme, "layer.5-4");
    scheme.overrides = {{0, 4096, scheme.base}};
    check_invalid(scheme, "layer.0-4096");
}

TEST_CASE("damaged text is refused or round-trips, never worse") {
    Random random(7);
    const std::string alphabet = "kv=,-./0123456789 gxlayerctnfpwisu\xff";
    for (int i = 0; i < 20000; ++i) {
        std::string text = to_string(random.scheme());
        for (std::uint32_t n = 1 + random.below(3); n > 0; --n) {
            const auto size = static_cast<std::uint32_t>(alphabet.size());
            text[random.below(static_cast<std::uint32_t>(text.size()))] =
                alphabet[random.below(size)];
        }
        CAPTURE(text);
        try {
            const Scheme scheme = parse_scheme(text);
            REQUIRE_NOTHROW(validate(scheme));
            REQUIRE(parse_scheme(to_string(scheme)) == scheme);
        } catch (const Error& error) {
            REQUIRE(error.code() == ErrorCode::invalid_scheme);
        }
    }
}

TEST_CASE("each host refuses the words that it can't serve, and says what to do instead") {
    const std::string filter = "kivi2,filter=heavy,evict=50%";
    const struct {
        Host host;
        std::string text, words;  // none: it is served
    } rows[] = {
        {Host::sequence, filter,
         "are not served in a Sequence (use a FilteredSequence); leave that out, or take another"},
        {Host::sequence, "kvquant3,flush=64", ""},
        {Host::sequence, "lowkv2.8,young=32", "young= is not served in a Sequence"},
        {Host::pages, filter, "filter="},
        {Host::pages, "kivi2,flush=64", "flush= is not served in a PagedLayer; leave that out, or"},
        {Host::pages, "kvquant3", "keys before RoPE"},
        {Host::pages, "k=token-2-row,v=exact", ""},
        {Host::model_cache, filter, "filter="},
        {Host::model_cache, "lowkv2,layer.3=skvq-k2v2", "need a calibration"},
        {Host::model_cache, "k=token-2-row-pre,v=exact", "keys before RoPE"},
        {Host::model_cache, "kivi2,flush=64", ""},
        {Host::llama_cpp, filter, "filter=, keep= and evict= are not served in llama.cpp"},
        {Host::llama_cpp, "kvquant3,flush=64", ""},
        {Host::llama_cpp, "lowkv2.8,young=32", ""},
        {Host::llama_cpp, "lowkv2.8,layer.0=kvquant3,young=32", "young= with keys before RoPE"},
        {Host::python, filter, "filter="},
        {Host::python, "lowkv2.8,layer.0=kvquant3", "a token's row of all heads"},
        {Host::python, "kivi2,flush=64", ""},
        {Host::python, "lowkv2.8,young=32", "young= is not served in Python"},
        {Host::vllm, "kivi2,flush=64", "flush= is not served in vLLM"},
        {Host::vllm, "skvq-k2v2", "a token's row of all heads"},
        {Host::lmcache, "kivi2,flush=64", "flush= is not served in LMCache's chunks"},
        {Host::lmcache, "lowkv4,window=3", ""},
    };
    for (const auto& row : rows) {
        CAPTURE(row.text);
#ifndef LOWKV_GUESTS
        if (row.text.find("kvq") != std::string::npos || row.text.find("row") != std::string::npos)
            continue;
#endif
        const Scheme scheme = parse_scheme(row.text);
        const std::string why = unserved(scheme, row.host);
        CHECK_MESSAGE(why.empty() == row.words.empty(), why);
        CHECK_MESSAGE(why.find(row.words) != std::string::npos, why);
        if (why.empty())
            CHECK_NOTHROW(require_served(scheme, row.host));
        else
            CHECK_THROWS_WITH_AS(require_served(scheme, row.host), why.c_str(), Error);
    }
}

TEST_CASE("the retention that a text doesn't name may be the caller's") {
    const Retention none{.window = 0, .sinks = 0};
    for (const std::string codecs : {"kivi2", "int8", "k=token-2-g32,v=exact"}) {
        CHECK(parse_scheme(codecs, &none).retention == none);
        CHECK(parse_scheme(codecs + ",sinks=2", &none).retention ==
              Retention{.window = 0, .sinks = 2});
        CHECK(parse_scheme(codecs + ",window=128", &none).retention ==
              Retention{.window = 128, .sinks = 0});
    }
}
