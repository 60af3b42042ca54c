// A sequence comes back from its image as it was, and from nothing else.

#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cache_common.h"
#include "image_case.h"
#include "lowkv/attention.h"
#include "lowkv/error.h"
#include "lowkv/serial.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace image_test;
using cache_test::Rng;
using cache_test::Row;

namespace {

constexpr Shape shape{2, 64};
constexpr Retention retention{.window = 40, .sinks = 5};

struct Cache {
    std::shared_ptr<Store> store = lowkv::test::make_store();
    std::shared_ptr<const Plan> plan;
    Sequence sequence;

    explicit Cache(const LayerScheme& scheme)
        : plan(std::make_shared<const Plan>(plan_of(scheme, shape))),
          sequence(store, plan, retention) {}

    // Packs between pieces, as a host does between steps.
    void append(Rng& rng, std::uint32_t tokens) {
        cache_test::append(sequence, rng, tokens);
        sequence.pack();
    }
    Sequence reloaded(const Bytes& image) const {
        return load_sequence(image, lowkv::test::make_store(), plan, retention);
    }
};

Row attention(const Sequence& sequence, std::uint32_t seed) {
    Rng rng(seed);
    const Row q = cache_test::random_rows(rng, 4, shape.head_dim);
    Row out(q.size());
    AttentionIO io;
    io.q = q.data();
    io.out = out.data();
    io.q_head_stride = io.out_head_stride = shape.head_dim;
    io.q_token_stride = io.out_token_stride = out.size();
    io.tokens = 1;
    io.heads = 4;
    io.n_cells = sequence.size();
    AttentionParams params;
    params.scale = 0.125f;
    AttentionWorkspace workspace;
    attend(sequence, io, params, workspace);
    return out;
}

void check_same(const Sequence& a, const Sequence& b) {
    REQUIRE(a.size() == b.size());
    REQUIRE(a.blocks() == b.blocks());
    for (std::uint32_t block = 0; block < a.blocks(); ++block) {
        CHECK(a.packed(block) == b.packed(block));
    }
    for (std::uint32_t cell = 0; cell < a.size(); cell += 29) {
        CHECK(cache_test::read_key(a, cell) == cache_test::read_key(b, cell));
        CHECK(cache_test::read_value(a, cell) == cache_test::read_value(b, cell));
        CHECK(a.position(cell) == b.position(cell));
    }
    if (a.size() > 0) CHECK(attention(a, 9) == attention(b, 9));
    CHECK(save_sequence(a) == save_sequence(b));
}

// What load_sequence() throws.
std::string refusal(const std::function<void()>& load) {
    try {
        load();
    } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::invalid_image);
        return error.what();
    }
    return "";
}

}  // namespace

TEST_CASE("every preset comes back and goes on where it was") {
    for (const Preset& preset : presets()) {
        INFO(preset.name);
        for (const std::uint32_t cut : {0u, 1u, 45u, 203u}) {
            Rng rng(1);
            Cache cache(preset.scheme.base);
            for (const std::uint32_t tokens : {300u, 1u, 90u}) cache.append(rng, tokens);
            cache.sequence.truncate(cache.sequence.size() - cut);
            Sequence loaded = cache.reloaded(save_sequence(cache.sequence));
            check_same(cache.sequence, loaded);
            Rng other = rng;
            cache.append(rng, 140);
            cache_test::append(loaded, other, 140);
            loaded.pack();
            check_same(cache.sequence, loaded);
        }
    }
}

TEST_CASE("an image with gaps, as older versions could save it, is refused") {
    Rng rng(4);
    Cache cache(parse_scheme("kivi2").base);
    cache.append(rng, 300);
    Bytes image = save_sequence(cache.sequence);
    const ImageHeader header = read_image(image);
    REQUIRE(header.spans.size() == 3);
    const auto put = [&](std::size_t at, std::uint32_t value) {
        std::memcpy(image.data() + at, &value, sizeof value);
    };
    put(68, header.tokens + 32);
    put(88 + 2 * 12, header.spans[2].first + 32);
    reseal(image);
    CHECK(refusal([&] { cache.reloaded(image); }) ==
          "image: exact cells [288, 332) after those before 256; an image has its cells in order, "
          "without gaps");
}

TEST_CASE("what means something else is refused") {
    Rng rng(5);
    const auto image_of = [&](const char* scheme) {
        Cache cache(parse_scheme(scheme).base);
        cache.append(rng, 300);
        return save_sequence(cache.sequence);
    };
    const auto load_as = [&](const Bytes& image, const Plan& plan, Retention kept) {
        return refusal([&] {
            load_sequence(image, lowkv::test::make_store(), std::make_shared<const Plan>(plan),
                          kept);
        });
    };
    const Bytes lowkv = image_of("lowkv2.8");
    const LayerScheme scheme = parse_scheme("lowkv2.8").base;
    CHECK(load_as(lowkv, plan_of(scheme, shape), retention).empty());
    const auto says = [](const std::string& error, const char* words) {
        CHECK_MESSAGE(error.find(words) != std::string::npos, error);
    };
    says(load_as(lowkv, plan_of(parse_scheme("kivi2").base, shape), retention), "for the scheme");
    says(load_as(lowkv, plan_of(scheme, shape), Retention{}), "for the scheme");
    says(load_as(lowkv, plan_of(scheme, {4, 64}), retention), "kv heads: 2, not 4");
    says(load_as(lowkv, Plan(scheme, shape, {}, 3), retention), "of layer 0, not 3");
    // One that does not use a calibration and a rope does not depend on them.
    LayerCalibration calibration;
    calibration.key.clip = {0.5f};
    const Rope turned = rope(0.8f);
    CHECK(load_as(lowkv, Plan(scheme, shape, {}, 0, {&calibration, &turned}), retention).empty());
}

TEST_CASE("what a sequence can't hold is refused") {
    Rng rng(6);
    Cache cache(parse_scheme("kivi2").base);
    cache.append(rng, 300);
    const Bytes image = save_sequence(cache.sequence);
    const auto changed = [&](const std::function<void(ImageHeader&)>& change) {
        ImageHeader header = read_image(image);
        change(header);
        Bytes bytes(lay_out(header).bytes);
        seal_image(header, bytes);
        return refusal([&] { cache.reloaded(bytes); });
    };
    CHECK(changed([](ImageHeader&) {}).empty());
    CHECK(changed([](ImageHeader& h) { h.batch = 2; }).find("a batch of 2") != std::string::npos);
    const auto only = [&](std::uint32_t first) {
        return changed([&](ImageHeader& h) {
            h.spans = {{first, 64, true}};
            h.tokens = first + 64;
        });
    };
    CHECK(only(3).find("packed tokens [3, 67), but its scheme has 5 sinks") != std::string::npos);
    CHECK(only(64).find("from token 64 on; a Sequence is one") != std::string::npos);
    CHECK(changed([](ImageHeader& h) { h.identity.rows = RowType::bf16; }).find("bf16, not f16") !=
          std::string::npos);
}

TEST_CASE("an order of channels that lacks one is refused") {
    Rng rng(8);
    Cache cache(parse_scheme("lowkv2.8").base);
    cache.append(rng, 300);
    Bytes image = save_sequence(cache.sequence);
    const ImageHeader header = read_image(image);
    const ImageLayout layout = lay_out(header);
    std::size_t block = 0;  // the first packed one
    for (std::size_t i = header.spans.size(); i-- > 0;)
        if (header.spans[i].packed) block = layout.parts[i].begin;
    const std::size_t order = block + cache.plan->keys().section_offset(1) +
                              cache.plan->keys().sorted_table()->section.order;
    image[order + 1] = image[order];
    reseal(image);
    CHECK(refusal([&] { cache.reloaded(image); }).find("lack channels of the keys") !=
          std::string::npos);
}

TEST_CASE("every truncation is refused") {
    Rng rng(8);
    Cache cache({});
    cache.append(rng, 3);
    const Bytes image = save_sequence(cache.sequence);
    for (std::size_t n = 0; n < image.size(); ++n) {
        const Bytes cut(image.begin(), image.begin() + static_cast<std::ptrdiff_t>(n));
        CHECK(!refusal([&] { cache.reloaded(cut); }).empty());
    }
}

// The sanitizers watch: whatever blocks and rows hold, nothing outside of them is touched.
TEST_CASE("random bytes behind a right checksum: refused, or harmless") {
    for (const Preset& preset : presets()) {
        INFO(preset.name);
        Rng rng(9);
        Cache cache(preset.scheme.base);
        cache.append(rng, 230);
        const Bytes good = save_sequence(cache.sequence);
        const std::size_t header_bytes = number<std::uint32_t>(good, 12);
        const auto scatter = [&](Bytes& bytes, std::size_t from, std::size_t to,
                                 std::size_t count) {
            for (; count > 0; --count)
                bytes[from + rng() % (to - from)] = static_cast<std::byte>(rng());
        };
        const auto use = [&](const Bytes& image) {
            return refusal([&] {
                const Sequence sequence = cache.reloaded(image);
                attention(sequence, 1);
                for (std::uint32_t cell = 0; cell < sequence.size(); cell += 32) {
                    cache_test::read_key(sequence, cell);
                    cache_test::read_value(sequence, cell);
                }
            });
        };
        for (int i = 0; i < 4; ++i) {
            Bytes bad = good;
            scatter(bad, 32, header_bytes, 2);
            reseal(bad);
            use(bad);
        }
        for (int i = 0; i < 8; ++i) {
            Bytes bad = good;
            scatter(bad, header_bytes, bad.size(), bad.size() / 10);
            seal_image(read_image(good), bad);  // the padding is zero again
            CHECK(use(bad) == "");
        }
    }
}
