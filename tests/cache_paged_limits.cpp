// Pages of a host's: what is refused, and what happens when someone else writes them.

#include <doctest/doctest.h>

#include <cmath>
#include <optional>

#include "batch_common.h"
#include "lowkv/paged.h"
#include "sealed_device.h"

using namespace lowkv;

namespace {

constexpr std::uint32_t page_tokens = 128;

// One layer, one sequence.
struct Fixture {
    std::shared_ptr<Store> store = lowkv::test::make_store();
    std::shared_ptr<const Plan> plan;
    std::size_t stride;
    DeviceMemory memory;
    std::optional<PagedLayer> layer;
    AttentionWorkspace workspace;
    std::vector<std::int32_t> pages = {2, 0, 1};
    std::uint32_t cells = 0;

    explicit Fixture(const std::string& scheme, bool whole = false, std::uint32_t spare = 8)
        : plan(batch_test::make_plan(scheme, {1, 32}, RowType::f32)),
          stride((bytes_of(*plan, scheme, whole) + 63) / 64 * 64),
          memory(store->device(), 3 * stride) {
        store->device().clear(memory.data(), 3 * stride);
        layer.emplace(store, plan, parse_scheme(scheme).retention, 0, page_tokens,
                      PageMemory{memory.data(), stride, 3, whole}, spare);
    }
    static std::size_t bytes_of(const Plan& plan, const std::string& scheme, bool whole) {
        return whole ? PagedLayer::whole_page_bytes(plan, page_tokens,
                                                    parse_scheme(scheme).retention.sinks)
                     : PagedLayer::page_bytes(plan, page_tokens);
    }

    void write(std::uint32_t first, std::uint32_t count, float x = 1.0f) {
        std::vector<float> rows(std::size_t{count} * 32);
        for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = x * static_cast<float>(1 + i % 32);
        std::vector<std::int64_t> slots;
        for (std::uint32_t t = first; t < first + count; ++t)
            slots.push_back(std::int64_t{pages[t / page_tokens]} * page_tokens + t % page_tokens);
        const Rows its{rows.data(), RowType::f32, 32, 32};
        layer->write(its, its, slots);
        cells = first + count;
    }
    // As a connector brings them.
    void load(std::size_t page, const Fixture& from) {
        std::vector<std::byte> bytes(std::min(stride, from.stride));
        from.store->device().copy_out(
            bytes.data(),
            from.memory.data() + static_cast<std::size_t>(from.pages[page]) * from.stride,
            bytes.size());
        store->device().copy_in(memory.data() + static_cast<std::size_t>(pages[page]) * stride,
                                bytes.data(), bytes.size());
    }
    // Of the newest token.
    std::vector<float> attend() {
        const std::vector<float> q(32);
        std::vector<float> out(32, -1.0f);
        const PagedSequence sequence{pages, cells, 1, 0};
        AttentionIO io;
        io.q = q.data();
        io.out = out.data();
        io.heads = 1;
        layer->attend(std::span(&sequence, 1), io, {}, workspace);
        return out;
    }
};

template <class F>
std::string message_of(F f) {
    try {
        f();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

}  // namespace

TEST_CASE("a packed page that someone else has written is read as it is now") {
    Fixture f("int8,window=256,sinks=3");
    f.write(0, 128, 2.0f);
    f.attend();
    // The bytes of a page of ones, as a connector would bring them.
    Fixture other("int8,window=256,sinks=3");
    other.write(0, 128, 1.0f);
    other.attend();
    f.load(0, other);
    f.write(128, 1, 1.0f);
    CHECK(f.attend()[0] == doctest::Approx(1.0).epsilon(0.01));
    CHECK(f.layer->stats().replaced == 1);
    CHECK(f.layer->stats().exact_pages == 1);
    CHECK(f.layer->stats().sink_bytes == 0);
}

TEST_CASE("a page that is loaded over one that is being filled is read as it is now") {
    const std::string scheme = "int8,window=0,sinks=3";
    Fixture other(scheme, true);
    other.write(0, 128, 1.0f);
    other.attend();
    for (const bool evicted : {false, true}) {
        CAPTURE(evicted);
        // A sequence that ends after 127 tokens, and another one's page in its place.
        Fixture f(scheme, true, 0);
        f.write(0, 127, 2.0f);
        f.attend();
        f.load(0, other);
        if (evicted) {
            f.pages = {1, 0, 2};
            f.write(0, 1, 3.0f);
            f.attend();
            CHECK(f.layer->stats().evicted == 0);  // nothing was written over the bytes
            f.pages = {2, 0, 1};
        }
        f.cells = 128;
        SUBCASE("as it is") {}
        SUBCASE("and its last row written again") { f.write(127, 1, 1.0f); }
        CHECK(f.attend()[0] == doctest::Approx(1.0).epsilon(0.01));
        CHECK(f.layer->stats().replaced == 1);
    }
}

TEST_CASE("a whole page has its sinks, and says what it was packed with") {
    const std::string scheme = "kivi2,window=0,sinks=3";
    Fixture other(scheme, true), f(scheme, true);
    // Sinks of 5, which 2 bits of rows from 0.01 to 1 would not keep.
    other.write(0, 3, 5.0f);
    other.write(3, 125, 0.01f);
    other.attend();
    f.load(0, other);
    f.cells = 128;
    const float expected = (3 * 5.0f + 125 * 0.01f) / 128;
    CHECK(f.attend()[0] == doctest::Approx(double{expected}).epsilon(0.01));
    CHECK(f.layer->stats().sink_bytes == 0);

    const auto refused = [](Fixture& by) {
        by.cells = 128;
        return message_of([&] { by.attend(); });
    };
    CHECK(refused(f) == "");
    Fixture never(scheme, true), more("kivi2,window=0,sinks=4", true);
    CHECK(refused(never).find("page 2 has not been packed with k=") == 0);
    CHECK(message_of([&] { never.write(127, 1); }).find("page 2 has not been packed") == 0);
    more.load(0, other);
    CHECK(refused(more).find("sinks=4,flush=0 of layer 0, 1 x 32 channels") != std::string::npos);
    // A page that was saved before it was full.
    Fixture open(scheme, true), later(scheme, true);
    open.load(0, other);
    open.write(0, 60, 1.0f);
    open.attend();
    later.load(0, open);
    CHECK(refused(later).find("page 2 has not been packed") == 0);
    // Another window is the reader's own affair.
    Fixture wide("kivi2,window=64,sinks=3", true);
    wide.load(0, other);
    CHECK(refused(wide) == "");
}

TEST_CASE("what can't be right is refused, and changes nothing") {
    Fixture f("lowkv2.8");
    f.write(0, 3);
    CHECK(message_of([&] { f.write(5, 1); }) == "row 5 of page 2, of which 3 have been written");
    f.cells = 4;
    CHECK(message_of([&] { f.attend(); }).find("of which 3 have been written") !=
          std::string::npos);
    f.cells = 3;
    const PagedSequence one{f.pages, 3, 1, 0};
    AttentionIO none;
    none.heads = 1;
    CHECK(message_of([&] {
              f.layer->attend(std::span(&one, 1), none, {}, f.workspace);
          }).find("q or out is null") != std::string::npos);
    CHECK(f.attend()[0] == doctest::Approx(1.0));
    f.pages[0] = 3;
    CHECK(message_of([&] { f.attend(); }) == "page 3 of 3");
    CHECK(message_of([&] { f.write(0, 1); }) == "slot 384 of 384");
    f.pages[0] = 2;
    f.write(0, 128, INFINITY);
    CHECK(message_of([&] { f.attend(); }).empty());

    const auto made = [&](const std::string& scheme, std::size_t stride, std::uint32_t tokens) {
        return message_of([&] {
            const auto plan = batch_test::make_plan(scheme, {1, 32}, RowType::f32);
            PagedLayer(f.store, plan, parse_scheme(scheme).retention, 0, tokens,
                       {f.memory.data(), stride, 1}, 0);
        });
    };
    CHECK(made("lowkv2.8", f.stride, page_tokens) == "");
    CHECK(made("lowkv2.8", f.stride - 64, page_tokens).find("bytes apart") != std::string::npos);
    CHECK(made("lowkv2.8", f.stride + 32, page_tokens).find("multiples of 64") !=
          std::string::npos);
    CHECK(made("lowkv2.8", f.stride, 64).find("a multiple of 128") != std::string::npos);
    CHECK(message_of([&] {
              PagedLayer(f.store, f.plan, {}, 0, page_tokens, {.pages = 1, .whole = true}, 0);
          }) == "whole pages come from elsewhere: the host has memory for them");
    CHECK(made("kivi2,sinks=129", 1 << 20, 128).find("129 sinks") != std::string::npos);
    CHECK(made("kivi2,flush=128", 1 << 20, 128).find("not served") != std::string::npos);
}

TEST_CASE("a sequence without queries has nothing attended to, sinks apart and ALiBi or not") {
    Fixture f("int8,window=0,sinks=3", false, 0);
    for (const std::uint32_t first : {0u, 128u}) {
        f.write(first, 128);
        f.attend();
    }
    REQUIRE(f.layer->stats().sink_bytes > 0);
    REQUIRE(f.layer->stats().exact_pages == 0);
    const PagedSequence sequence{f.pages, f.cells, 0, 0};
    const std::vector<float> slopes{0.5f}, q(32);
    std::vector<float> out(32, -1.0f);
    AttentionIO io;
    io.q = q.data();
    io.out = out.data();
    io.heads = 1;
    AttentionParams params;
    params.alibi_slopes = slopes.data();
    f.layer->attend(std::span(&sequence, 1), io, params, f.workspace);
    CHECK(out == std::vector<float>(32, -1.0f));
}

TEST_CASE("a page with numbers that no f16 holds is packed, and counted") {
    for (const float bad : {NAN, INFINITY, -INFINITY, 7e4f, 1e30f}) {
        Fixture its("kivi2,window=0,sinks=0");
        const std::uint64_t before = its.store->device().saturated();
        its.write(0, 20);
        its.write(20, 1, bad);
        its.write(21, 107);
        for (const float x : its.attend()) CHECK(std::isfinite(x));
        CHECK(its.layer->stats().packed == 1);
        CHECK(its.store->device().saturated() > before);
        for (const float x : its.attend()) CHECK(std::isfinite(x));
    }
}
