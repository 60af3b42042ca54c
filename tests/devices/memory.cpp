// The cache's memory on a device: what is taken of it, what it is given to.

#include "devices/host/memory.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "devices/null_queue.h"
#include "lowkv/error.h"

using namespace lowkv;
using devices::Memory;
using devices::Place;
using test::NullQueue;

namespace {

constexpr std::size_t mib = std::size_t{1} << 20, gib = std::size_t{1} << 30;

}  // namespace

TEST_CASE("nearly all of a device's memory can be had, and little is taken in advance") {
    for (const std::size_t all : {gib, 8 * gib, 24 * gib, 80 * gib, 180 * gib}) {
        CAPTURE(all / gib);
        NullQueue queue(all);
        const std::size_t slab = std::max(mib, all / 4000 / mib * mib);
        std::size_t held = 0;
        {
            Memory memory(queue);
            std::vector<std::byte*> slabs;
            const auto fill = [&] {
                for (;; held += slab) {
                    slabs.push_back(memory.allocate(slab));
                    REQUIRE(queue.taken_bytes() <= all);
                    const std::size_t ends = LOWKV_BUFFERS * slab;  // too short for one
                    const std::size_t ahead = std::max({64 * mib, all / 512, (held + ends) / 2});
                    REQUIRE(queue.taken_bytes() <= held + ends + ahead);
                }
            };
            CHECK_THROWS_AS(fill(), Error);
            // A buffer has 16 GiB at most.
            CHECK(held >= std::min(all / 9 * 8, 104 * gib) - LOWKV_BUFFERS * slab);
            for (const std::byte* its : slabs) memory.deallocate(its);
            CHECK(queue.taken_bytes() == 0);
            slabs.assign(1, memory.allocate(slab));
        }
        CHECK(queue.taken_bytes() == 0);
    }
}

TEST_CASE("random allocations never share a byte, and every address has its place") {
    std::mt19937 random(3);
    NullQueue queue(2 * gib);
    Memory memory(queue);
    std::map<std::byte*, std::size_t> live;  // bytes by address
    for (int i = 0; i < 20000; ++i) {
        if (!live.empty() && random() % 5 < (i / 4000 % 2 == 0 ? 2 : 3)) {
            const auto its =
                std::next(live.begin(), random() % std::min<std::size_t>(live.size(), 50));
            memory.deallocate(its->first);
            live.erase(its);
            continue;
        }
        const std::size_t bytes = random() % 9 == 0 ? random() % (40 * mib) : random() % mib;
        std::byte* at = nullptr;
        try {
            at = memory.allocate(bytes);
        } catch (const Error&) {
            continue;  // it is all in use
        }
        REQUIRE(reinterpret_cast<std::uintptr_t>(at) % 64 == 0);
        const auto next = live.lower_bound(at);
        REQUIRE((next == live.end() || at + bytes <= next->first));
        REQUIRE((next == live.begin() || std::prev(next)->first + std::prev(next)->second <= at));
        live[at] = bytes;
        const std::size_t behind = bytes == 0 ? 0 : random() % bytes / 64 * 64;
        const Place first = memory.place(at), there = memory.place(at + behind);
        CHECK(there.buffer == first.buffer);
        CHECK(there.at == first.at + behind);
        const std::uint32_t number = memory.address(at + behind);
        CHECK((number & LOWKV_ADDRESS_OFFSET) * std::size_t{LOWKV_ADDRESS_UNIT} == there.at);
        CHECK(memory.all()[number >> LOWKV_ADDRESS_BITS] == there.buffer);
    }
    CHECK_NOTHROW(queue.check());
    for (const auto& [at, bytes] : live) memory.deallocate(at);
    CHECK(queue.taken_bytes() == 0);
}
