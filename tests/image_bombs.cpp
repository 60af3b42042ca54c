// Random images that are crafted: a generator that knows the format changes two or more fields of a
// good image, and makes its sizes and checksum right again. Whatever it says of itself, loading
// allocates no more than the bytes behind it bear. LOWKV_TEST_SECONDS: how long, 1 by default.

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "image_case.h"
#include "lowkv/batch.h"
#include "lowkv/device.h"
#include "lowkv/error.h"
#include "sealed_device.h"

namespace {

std::atomic<std::size_t> allocated;  // by operator new and by the store's device, never less

void* counted(std::size_t bytes) {
    allocated += bytes;
    // More than any image here may take: found as such, without taking it.
    void* memory = bytes > std::size_t{1} << 30 ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) { return counted(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return counted(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

using namespace lowkv;
using namespace image_test;

namespace {

// The store's slabs come from mmap(): its device counts them.
class CountingDevice final : public lowkv::test::SealedDevice {
  public:
    std::byte* allocate(std::size_t bytes) override {
        allocated += bytes;
        if (bytes > std::size_t{1} << 30) throw std::bad_alloc();
        return SealedDevice::allocate(bytes);
    }
};

struct Reader {
    std::shared_ptr<const Plan> plan;
    Retention retention;
    std::vector<ImageHeader> good;

    explicit Reader(const char* name) {
        const Scheme scheme = parse_scheme(name);
        plan = std::make_shared<const Plan>(plan_of(scheme.base, {2, 64}));
        retention = batch_retention(*plan, {.window = 40, .sinks = 4});
        const std::uint32_t block = plan->block_tokens();
        ImageHeader header;
        header.identity = image_identity(*plan, retention);
        const bool packs = header.identity.block_tokens > 0;
        for (const std::uint32_t sinks : {retention.sinks, 0u}) {
            header.batch = 2;
            header.tokens = sinks + 2 * block + 7;
            header.spans = {{sinks, 2 * block, packs}, {sinks + 2 * block, 7, false}};
            if (sinks > 0) header.spans.insert(header.spans.begin(), {0, sinks, false});
            header.queries = plan->wants_queries();
            good.push_back(header);
        }
        good.push_back(header);
        good.back().spans.clear();
    }
};

// What the rows of an image take in blocks at most: each block has one of its rows.
std::size_t block_bytes(const ImageHeader& header, const Plan& plan) {
    std::size_t blocks = 0;
    for (const ImageSpan& span : header.spans) {
        if (!span.packed)
            blocks += (span.tokens + plan.block_tokens() - 1) / plan.block_tokens() + 1;
    }
    return header.batch * blocks * plan.exact_bytes();
}

std::uint32_t odd_number(std::mt19937& random, std::uint32_t was) {
    const std::uint32_t block = 32u << random() % 3;
    const std::uint32_t numbers[] = {
        0,
        1,
        was + 1,
        was - 1,
        was * 2,
        was + block,
        was - block,
        (1u << random() % 32) + static_cast<std::uint32_t>(random() % 3) - 1,
        static_cast<std::uint32_t>(random()),
        0xffffffff - static_cast<std::uint32_t>(random() % 200),
        Blocks::max_cells - 1 - static_cast<std::uint32_t>(random() % 300) / block * block,
        static_cast<std::uint32_t>(random() % 5) * block};
    return numbers[random() % std::size(numbers)];
}

void change(std::mt19937& random, ImageHeader& header) {
    ImageIdentity& identity = header.identity;
    const auto at = header.spans.empty() ? 0 : random() % header.spans.size();
    switch (random() % 13) {
        case 0: header.batch = odd_number(random, header.batch); break;
        case 1: header.tokens = odd_number(random, header.tokens); break;
        case 2: header.spans.clear(); break;
        case 3: header.queries = !header.queries; break;
        case 4: identity.block_tokens = odd_number(random, identity.block_tokens); break;
        case 5: identity.packed_bytes = odd_number(random, 1); break;
        case 6: identity.shape.head_dim = odd_number(random, identity.shape.head_dim); break;
        case 7:
            header.spans.push_back({odd_number(random, header.tokens),
                                    1 + static_cast<std::uint32_t>(random()) % 3, false});
            break;
        case 8:
            header.spans.push_back(
                {header.tokens - 1 - static_cast<std::uint32_t>(random() % 3), 1, false});
            break;
        default:  // most images that hold together differ in cells
            if (header.spans.empty()) break;
            if (random() % 2 == 0)
                header.spans[at].first = odd_number(random, header.spans[at].first);
            if (random() % 2 == 0)
                header.spans[at].tokens = odd_number(random, header.spans[at].tokens);
            if (random() % 4 == 0) header.spans[at].packed = !header.spans[at].packed;
            if (random() % 2 == 0)
                header.tokens = header.spans.back().first + header.spans.back().tokens;
    }
}

Bytes crafted(std::mt19937& random, const ImageHeader& good) {
    constexpr std::size_t most = 1 << 20;
    ImageHeader header = good;
    for (auto n = 2 + random() % 4; n > 0; --n) change(random, header);
    if (random() % 2 == 0 && !header.spans.empty()) {  // without gaps
        for (std::size_t i = 1; i < header.spans.size(); ++i)
            header.spans[i].first = header.spans[i - 1].first + header.spans[i - 1].tokens;
        header.tokens = header.spans.back().first + header.spans.back().tokens;
    }
    std::size_t size = 0;
    try {
        size = lay_out(header).bytes;
    } catch (const Error&) {
    }
    if (size > 0 && size <= most) {
        Bytes image(size);
        for (std::size_t i = 0; i < 64; ++i)
            image[random() % size] = static_cast<std::byte>(random());
        if (random() % 2 == 0) std::fill(image.begin(), image.end(), std::byte{0});
        seal_image(header, image);
        return image;
    }
    // One that does not hold together, or whose parts are not there: its fields as they are, in the
    // bytes of the good one.
    Bytes image(lay_out(good).bytes);
    seal_image(good, image);
    const auto put = [&](std::size_t at, std::uint32_t value) {
        std::memcpy(image.data() + at, &value, sizeof value);
    };
    put(48, header.identity.block_tokens);
    put(56, header.identity.shape.head_dim);
    put(64, header.batch);
    put(68, header.tokens);
    if (random() % 2 == 0) put(80, odd_number(random, 3));
    if (random() % 4 == 0) put(84, odd_number(random, 80));
    for (std::size_t i = 0; i < std::min(header.spans.size(), good.spans.size()); ++i) {
        put(88 + 12 * i, header.spans[i].first);
        put(92 + 12 * i, header.spans[i].tokens);
        put(96 + 12 * i, header.spans[i].packed ? 1 : 0);
    }
    reseal(image);
    return image;
}

}  // namespace

TEST_CASE("a crafted image allocates at most four times its bytes, whole blocks, and 4 MiB") {
    // Of the 4 MiB: a slab of each pool that is not full (1 MiB each, three pools), and 1 MiB for
    // sequences and lists of blocks.
    constexpr std::size_t constant = std::size_t{4} << 20;
    const char* seconds = std::getenv("LOWKV_TEST_SECONDS");
    const auto end = std::chrono::steady_clock::now() +
                     std::chrono::duration<double>(seconds == nullptr ? 1.0 : std::atof(seconds));
    std::mt19937 random(seconds == nullptr ? 1 : std::random_device{}());
    std::vector<Reader> readers;
    for (const char* name : {"lowkv2.8", "kivi2", "exact", "turboquant3"})
        readers.emplace_back(name);
#ifdef LOWKV_GUESTS
    readers.emplace_back("kvquant2");
#endif
    std::size_t tried = 0, read = 0, loaded = 0;
    double worst = 0;
    const auto use = [&](const Reader& reader, const Bytes& image, const auto& load) {
        std::size_t limit = 4 * image.size() + constant;
        try {
            limit += block_bytes(read_image(image), *reader.plan);
            ++read;
        } catch (const Error&) {
        }
        const auto store = std::make_shared<Store>(0, std::make_shared<CountingDevice>());
        allocated = 0;
        try {
            load(image, store, reader.plan, reader.retention);
            ++loaded;
        } catch (const Error&) {
        } catch (const std::bad_alloc&) {
        }
        const std::size_t took = allocated;
        worst = std::max(worst, static_cast<double>(took) / static_cast<double>(limit));
        if (took <= limit) return true;
        FAIL_CHECK(image.size(), " bytes allocate ", took, ", and at most ", limit, " is right");
        return false;
    };
    // However slow the machine is, some get through.
    while (std::chrono::steady_clock::now() < end || (loaded <= 100 && tried < 100000)) {
        const Reader& reader = readers[random() % readers.size()];
        const Bytes image = crafted(random, reader.good[random() % reader.good.size()]);
        ++tried;
        if (!use(reader, image, [](const auto&... its) { return load_sequence(its...); })) break;
        if (!use(reader, image, [](const auto&... its) { return Batch::load(its...); })) break;
    }
    MESSAGE(tried, " images, ", read, " read, ", loaded, " loaded; at most ", worst,
            " of the limit");
    CHECK(read > 100);
    CHECK(loaded > 100);
}

TEST_CASE("a header without rows allocates nothing by its counts") {
    const Reader reader("lowkv2.8");
    ImageHeader header = reader.good.back();
    REQUIRE(header.spans.empty());
    header.queries = false;
    const std::pair<std::uint32_t, std::uint32_t> counts[] = {{1, Blocks::max_cells - 200},
                                                              {1 << 16, Blocks::max_cells - 200},
                                                              {1 << 16, 1},
                                                              {4000000000u, 1},
                                                              {10000, 100},
                                                              {0x80000000u, 0}};
    for (const auto& [batch, tokens] : counts) {
        header.batch = batch;
        header.tokens = tokens;
        Bytes image(lay_out(header).bytes);
        seal_image(header, image);
        const auto store = std::make_shared<Store>(0, std::make_shared<CountingDevice>());
        allocated = 0;
        std::string error;
        try {
            Batch::load(image, store, reader.plan, reader.retention);
        } catch (const Error& refused) {
            error = refused.what();
        } catch (const std::bad_alloc&) {
            error = "no memory";
        }
        CHECK(allocated < std::size_t{1} << 20);
        CHECK_MESSAGE(error.find("bytes without a row, and its rows only") != std::string::npos,
                      error);
    }
    // Legal: tokens that a sliding window has passed, and a batch that has none yet.
    header.batch = 4;
    header.tokens = 1 << 20;
    Bytes image(lay_out(header).bytes);
    seal_image(header, image);
    CHECK(Batch::load(image, lowkv::test::make_store(), reader.plan, reader.retention).first() ==
          1 << 20);
}
