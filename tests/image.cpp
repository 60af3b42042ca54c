// Images by themselves (docs/images.md): their bytes, and that nothing in them is trusted.

#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "image_case.h"
#include "lowkv/error.h"
#include "lowkv/serial.h"
#include "xxh64.h"

using namespace lowkv;
using namespace image_test;

namespace {

std::uint64_t xxh64_of(std::string_view text) { return xxh64(std::as_bytes(std::span(text))); }

// Parts of all kinds, in a batch: 2 sequences of 3 heads, 16 channels, with positions.
ImageHeader sample() {
    ImageHeader header;
    header.identity = {.scheme = "k=exact,v=exact",
                       .shape = {3, 16},
                       .layer = 7,
                       .inputs = 0x0123456789abcdef,
                       .block_tokens = 32,
                       .packed_bytes = 200,
                       .rows = RowType::f16,
                       .positions = true};
    header.batch = 2;
    header.tokens = 120;
    header.spans = {{0, 5, false}, {5, 64, true}, {69, 1, false}, {70, 64, true}};
    return header;
}

Bytes random_image(const ImageHeader& header, unsigned seed = 1) {
    std::mt19937 random(seed);
    Bytes image(lay_out(header).bytes);
    for (std::byte& b : image) b = static_cast<std::byte>(random());
    seal_image(header, image);
    return image;
}

template <class Call>
std::string error_of(Call call) {
    try {
        call();
    } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::invalid_image);
        return error.what();
    }
    return "";
}

bool refused(std::span<const std::byte> bytes) {
    return !error_of([&] { check_image(read_image(bytes), sample().identity); }).empty();
}

}  // namespace

TEST_CASE("XXH64 gives its published values") {
    CHECK(xxh64_of("") == 0xEF46DB3751D8E999);
    CHECK(xxh64_of("a") == 0xD24EC4F1A98C6E5B);
    CHECK(xxh64_of("abc") == 0x44BC2CF5AD770999);
    CHECK(xxh64_of("Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1);
    // xxHash's own sanity check: bytes of a generator, cut at several lengths.
    Bytes bytes;
    std::uint64_t generator = 2654435761u;
    while (bytes.size() < 222) {
        bytes.push_back(static_cast<std::byte>(generator >> 56));
        generator *= 11400714785074694797u;
    }
    CHECK(xxh64(std::span(bytes).first(1)) == 0xE934A84ADB052768);
    CHECK(xxh64(std::span(bytes).first(4)) == 0x9136A0DCA57457EE);
    CHECK(xxh64(std::span(bytes).first(14)) == 0x8282DCC4994E35C8);
    CHECK(xxh64(bytes) == 0xB641AE8CB691C174);
}

TEST_CASE("every byte is where docs/images.md says") {
    const ImageHeader header = sample();
    const Bytes image = random_image(header);
    CHECK(std::memcmp(image.data(), "LOWKVIMG", 8) == 0);
    CHECK(number<std::uint32_t>(image, 8) == 4);
    CHECK(number<std::uint32_t>(image, 12) == 192);  // 88 + 4 spans of 12 + 15 letters, padded
    CHECK(number<std::uint64_t>(image, 16) == image.size());
    CHECK(number<std::uint64_t>(image, 24) == xxh64(std::span(image).subspan(32)));
    CHECK(number<std::uint64_t>(image, 32) == 0x0123456789abcdef);
    CHECK(number<std::uint64_t>(image, 40) == 200);
    const std::uint32_t words[] = {32, 3, 16, 7, 2,  120, 2,  1, 4, 15,          // fields
                                   0,  5, 0,  5, 64, 1,   69, 1, 0, 70, 64, 1};  // spans
    for (std::size_t i = 0; i < std::size(words); ++i)
        CHECK(number<std::uint32_t>(image, 48 + 4 * i) == words[i]);
    CHECK(std::memcmp(image.data() + 136, "k=exact,v=exact", 15) == 0);
    const ImageLayout layout = lay_out(header);
    const std::size_t rows = 2 * 5 * 3 * 16 * 2;  // batch, tokens, heads, channels, f16
    CHECK(layout.parts[0].begin == 192);
    CHECK(layout.parts[0].values == 192 + rows);
    CHECK(layout.parts[0].positions == 192 + 2 * rows);
    CHECK(layout.parts[0].end == 192 + 2 * rows + 2 * 5 * 4);
    CHECK(layout.parts[1].begin == 2176);  // 2152, padded
    CHECK(layout.parts[1].end == 2176 + 2 * 2 * 200);
    CHECK(layout.bytes == image.size());
    CHECK(image.size() % 64 == 0);
}

TEST_CASE("what was sealed is read: every preset, every type of rows") {
    for (const Preset& preset : presets()) {
        for (const RowType rows : {RowType::f32, RowType::f16, RowType::bf16}) {
            const Plan plan = plan_of(preset.scheme.base, {2, 64});
            ImageHeader header;
            header.identity = image_identity(plan, preset.scheme.retention);
            header.identity.rows = rows;
            header.batch = 3;
            header.tokens = 300;
            header.spans = {{0, 300, false}};
            if (!plan.scheme().exact())
                header.spans = {{0, 5, false}, {5, 256, true}, {261, 39, false}};
            const Bytes image = random_image(header);
            CHECK(read_image(image) == header);
            Bytes more = image;
            more.resize(image.size() + 77, std::byte{5});
            CHECK(read_image(more) == header);
            ImageIdentity wanted = image_identity(plan, preset.scheme.retention);
            wanted.rows = rows;
            check_image(header, wanted);
        }
    }
}

TEST_CASE("nothing at all") {
    ImageHeader header = sample();
    header.spans.clear();
    header.tokens = 0;
    CHECK(read_image(random_image(header)) == header);
}

TEST_CASE("a preset's name is spelled out") {
    const Scheme scheme = parse_scheme("kivi2,window=7,sinks=3");
    const std::string text = layer_text(scheme.base, scheme.retention);
    CHECK(text == "k=channel-2-g32,v=token-2-g32,window=7,sinks=3,flush=0");
    CHECK(parse_scheme(text) == scheme);
}

TEST_CASE("each field, corrupted") {
    struct Field {
        const char* name;
        std::size_t offset, bytes;
    };
    std::vector<Field> fields{
        {"magic", 0, 8},     {"version", 8, 4},   {"header bytes", 12, 4}, {"bytes", 16, 8},
        {"checksum", 24, 8}, {"inputs", 32, 8},   {"packed bytes", 40, 8}, {"block tokens", 48, 4},
        {"kv heads", 52, 4}, {"head_dim", 56, 4}, {"layer", 60, 4},        {"batch", 64, 4},
        {"tokens", 68, 4},   {"rows", 72, 4},     {"flags", 76, 4},        {"spans", 80, 4},
        {"text", 84, 4}};
    for (std::size_t i = 0; i < 4; ++i) {
        fields.push_back({"first", 88 + 12 * i, 4});
        fields.push_back({"count", 92 + 12 * i, 4});
        fields.push_back({"packed", 96 + 12 * i, 4});
    }
    const Bytes good = random_image(sample());
    REQUIRE(!refused(good));
    for (const Field& field : fields) {
        std::uint64_t was = 0;
        std::memcpy(&was, good.data() + field.offset, field.bytes);
        for (const std::uint64_t now :
             {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{2}, was + 1, was - 1, was * 2,
              was ^ 0x80000000, was + 0x10000, ~std::uint64_t{0}, ~std::uint64_t{0} / 2,
              std::uint64_t{1} << 63, std::uint64_t{0x7fffffff}, std::uint64_t{0xffffffff}}) {
            Bytes bad = good;
            std::memcpy(bad.data() + field.offset, &now, field.bytes);
            if (bad == good) continue;
            const std::string name = field.name;
            if (name == "version" && now == oldest_image_version) continue;  // all else is the same
            INFO(field.name << " at " << field.offset << ": " << was << " to " << now);
            CHECK(refused(bad));
            if (field.offset == 24) continue;
            reseal(bad);
            // Room behind, so that a length that is too long does not end the matter.
            bad.resize(2 * bad.size());
            // Other cells may hold together; then they are what is read.
            const bool cells = name == "tokens" || name == "first";
            CHECK((refused(bad) || (cells && read_image(bad) != sample())));
        }
    }
}

TEST_CASE("every truncation is refused, its checksum made right or not") {
    const Bytes good = random_image(sample());
    for (std::size_t n = 0; n < good.size(); ++n) {
        Bytes bad(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(n));
        CHECK(refused(bad));
        if (n < 32) continue;
        const std::uint64_t bytes = n;
        std::memcpy(bad.data() + 16, &bytes, sizeof bytes);
        reseal(bad);
        CHECK(refused(bad));
    }
}

TEST_CASE("every flipped bit is noticed") {
    const Bytes good = random_image(sample());
    for (std::size_t i = 0; i < 8 * good.size(); ++i) {
        Bytes bad = good;
        bad[i / 8] ^= static_cast<std::byte>(1u << (i % 8));
        CHECK(refused(bad));
    }
}

TEST_CASE("bytes that are random behind a right checksum") {
    const Bytes good = random_image(sample());
    std::mt19937 random(3);
    for (int i = 0; i < 20000; ++i) {
        Bytes bad = good;
        for (unsigned n = 1 + random() % 4; n > 0; --n)
            bad[32 + random() % 176] = static_cast<std::byte>(random());
        reseal(bad);
        // Read: then it is what it says, whatever that is.
        error_of([&] {
            const ImageHeader header = read_image(bad);
            const ImageLayout layout = lay_out(header);
            CHECK(layout.bytes == bad.size());
            for (const ImagePart& part : layout.parts) CHECK(part.end <= bad.size());
            Bytes again = bad;
            again[8] = std::byte{image_version};  // of an older one
            bad[8] = again[8];
            reseal(bad);
            seal_image(header, again);
            CHECK(again == bad);
        });
    }
}

TEST_CASE("what can't be an image is named") {
    struct Case {
        const char* message;
        std::function<void(ImageHeader&)> change;
    };
    const Case cases[] = {
        {"its scheme is no text", [](auto& h) { h.identity.scheme.clear(); }},
        {"its scheme is no text", [](auto& h) { h.identity.scheme[3] = '\n'; }},
        {"its scheme is no text", [](auto& h) { h.identity.scheme.resize(1025, 'x'); }},
        {"each is at least 1", [](auto& h) { h.identity.shape.kv_heads = 0; }},
        {"each is at least 1", [](auto& h) { h.identity.shape.head_dim = 0; }},
        {"each is at least 1", [](auto& h) { h.batch = 0; }},
        {"blocks of 0 tokens in 200 bytes", [](auto& h) { h.identity.block_tokens = 0; }},
        {"blocks of 32 tokens in 0 bytes", [](auto& h) { h.identity.packed_bytes = 0; }},
        {"rows of type 4", [](auto& h) { h.identity.rows = static_cast<RowType>(4); }},
        {"tokens; legal: up to", [](auto& h) { h.tokens = Blocks::max_cells + 1; }},
        {"exact cells [0, 0)", [](auto& h) { h.spans[0].tokens = 0; }},
        {"packed cells [4, 68) after", [](auto& h) { h.spans[1].first = 4; }},
        {"packed cells [6, 70) after those before 5; an image has its cells in order, without gaps",
         [](auto& h) { h.spans[1].first = 6; }},
        {"packed cells [5, 68) are no whole", [](auto& h) { h.spans[1].tokens = 63; }},
        {"its rows end at 134, its tokens at 102", [](auto& h) { h.tokens = 102; }},
        {"its rows end at 134, its tokens at 135", [](auto& h) { h.tokens = 135; }},
        {"its rows end at 121, its tokens at 120",
         [](auto& h) {
             h.spans[2].tokens = 52;
             h.spans.pop_back();
         }},
        {"more bytes than there can be",
         [](auto& h) { h.identity.packed_bytes = ~std::uint64_t{0}; }},
        {"more bytes than there can be",
         [](auto& h) { h.identity.packed_bytes = ~std::uint64_t{0} / 4 - 200; }},
        {"more bytes than there can be",
         [](auto& h) { h.identity.shape = {0xffffffff, 0xffffffff}; }},
    };
    for (const Case& c : cases) {
        ImageHeader header = sample();
        c.change(header);
        const std::string error = error_of([&] { lay_out(header); });
        CHECK_MESSAGE(error.find(c.message) != std::string::npos, error);
    }
}

TEST_CASE("what means something else is named") {
    struct Case {
        const char* message;
        std::function<void(ImageIdentity&)> change;
    };
    const Case cases[] = {
        {"made for the scheme k=exact,v=exact, not kivi2", [](auto& i) { i.scheme = "kivi2"; }},
        {"of layer 7, not 8", [](auto& i) { i.layer = 8; }},
        {"kv heads: 3, not 4", [](auto& i) { i.shape.kv_heads = 4; }},
        {"head_dim: 16, not 32", [](auto& i) { i.shape.head_dim = 32; }},
        {"rows are f16, not bf16", [](auto& i) { i.rows = RowType::bf16; }},
        {"another calibration or another rope", [](auto& i) { i.inputs = 0; }},
        {"tokens of a block: 32, not 128", [](auto& i) { i.block_tokens = 128; }},
        {"bytes of a packed block: 200, not 1", [](auto& i) { i.packed_bytes = 1; }},
        {"keys' positions: 1, not 0", [](auto& i) { i.positions = false; }},
    };
    for (const Case& c : cases) {
        ImageIdentity wanted = sample().identity;
        c.change(wanted);
        const std::string error = error_of([&] { check_image(sample(), wanted); });
        CHECK_MESSAGE(error.find(c.message) != std::string::npos, error);
    }
}
