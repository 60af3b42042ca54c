// Where the bytes go: packing gives the exact rows' memory back, and reserved memory stays bounded.

#include <doctest/doctest.h>

#include <cstring>
#include <set>

#include "cache/pool.h"
#include "cache_common.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace cache_test;

namespace {

constexpr Shape shape{.kv_heads = 3, .head_dim = 64};
constexpr Retention window{.window = 64, .sinks = 0, .flush = 0};

}  // namespace

TEST_CASE("pool: slots are aligned, disjoint and reused") {
    cache::Pool pool(*cpu_device(), 100);
    std::set<std::byte*> slots;
    for (int i = 0; i < 1000; ++i) {
        std::byte* slot = pool.allocate();
        CHECK(reinterpret_cast<std::uintptr_t>(slot) % cache::Pool::alignment == 0);
        std::memset(slot, i & 255, 100);
        slots.insert(slot);
    }
    CHECK(slots.size() == 1000);
    int i = 0;
    std::byte* previous = nullptr;
    for (std::byte* slot : slots) {
        if (previous != nullptr) CHECK(slot - previous >= 100);
        previous = slot;
        if (++i % 2 == 0) pool.deallocate(slot);
    }
    const std::size_t reserved = pool.reserved_bytes();
    for (i = 0; i < 500; ++i) CHECK(slots.count(pool.allocate()) == 1);
    CHECK(pool.reserved_bytes() == reserved);
}

TEST_CASE("pool: free slabs go back to the system, one spare stays") {
    const std::size_t slot_bytes = cache::Pool::slab_target / 4;
    cache::Pool pool(*cpu_device(), slot_bytes);
    CHECK(pool.reserved_bytes() == 0);
    std::vector<std::byte*> slots;
    for (int i = 0; i < 40; ++i) slots.push_back(pool.allocate());
    CHECK(pool.reserved_bytes() == 10 * cache::Pool::slab_target);
    std::shuffle(slots.begin(), slots.end(), Rng(1));
    for (std::byte* slot : slots) pool.deallocate(slot);
    CHECK(pool.reserved_bytes() == cache::Pool::slab_target);
    for (int i = 0; i < 10; ++i) {  // around a slab's edge: the spare serves
        std::byte* slot = pool.allocate();
        CHECK(pool.reserved_bytes() == cache::Pool::slab_target);
        pool.deallocate(slot);
    }
}

TEST_CASE("pool: a slot larger than a slab's usual size") {
    cache::Pool pool(*cpu_device(), 3 * cache::Pool::slab_target + 1);
    std::byte* slot = pool.allocate();
    slot[3 * cache::Pool::slab_target] = std::byte{1};
    CHECK(pool.reserved_bytes() < 3 * cache::Pool::slab_target + 8192);
    pool.deallocate(slot);
}

TEST_CASE("packing gives exact memory back") {
    const auto plan = make_plan(kivi2, shape);
    const std::uint32_t tokens = plan->block_tokens();
    const auto store = lowkv::test::make_store();
    Sequence sequence(store, plan, window);
    Rng rng(1);
    const std::uint32_t blocks = 400;
    for (std::uint32_t b = 0; b < blocks; ++b) {
        append(sequence, rng, tokens);
        sequence.pack();
    }
    const StoreStats stats = store->stats();
    CHECK(stats.exact_blocks == window.window / tokens);
    CHECK(stats.packed_blocks == blocks - window.window / tokens);
    CHECK(stats.encoded_blocks == stats.packed_blocks);
    CHECK(stats.exact_bytes == stats.exact_blocks * plan->exact_bytes());
    CHECK(stats.packed_bytes == stats.packed_blocks * plan->packed_bytes());
    // The window, the block being packed, and its packed form: never more exact blocks than that.
    CHECK(stats.peak_bytes <= stats.packed_bytes + (stats.exact_blocks + 1) * plan->exact_bytes());
    // At most a part-filled slab and a spare for each of the two pools.
    CHECK(stats.reserved_bytes <=
          stats.exact_bytes + stats.packed_bytes + 4 * cache::Pool::slab_target);
    CHECK(stats.reserved_bytes < blocks * plan->exact_bytes() / 3);
}

TEST_CASE("a prompt packed at once gives its slabs back") {
    const auto plan = make_plan(kivi2, shape);
    const auto store = lowkv::test::make_store();
    Sequence sequence(store, plan, window);
    Rng rng(2);
    append(sequence, rng, 400 * plan->block_tokens());
    sequence.pack();
    const StoreStats stats = store->stats();
    CHECK(stats.reserved_bytes <=
          stats.exact_bytes + stats.packed_bytes + 4 * cache::Pool::slab_target);
}

TEST_CASE("layers of one store: reserved bytes stay bounded over many cycles") {
    const auto store = lowkv::test::make_store();
    const std::shared_ptr<const Plan> plans[] = {make_plan(kivi2, shape), make_plan(exact, shape),
                                                 make_plan(kivi2, {2, 64}),
                                                 make_plan(kivi2, shape)};
    Rng rng(3);
    std::size_t after_first = 0;
    for (int cycle = 0; cycle < 10; ++cycle) {
        std::vector<Sequence> layers;
        for (const auto& plan : plans) layers.emplace_back(store, plan, window);
        for (int step = 0; step < 20; ++step) {
            for (Sequence& layer : layers) {
                append(layer, rng, 33);
                layer.pack();
            }
        }
        for (Sequence& layer : layers) layer.truncate(100);
        std::vector<Sequence> forks;
        for (const Sequence& layer : layers) forks.push_back(layer.fork());
        for (Sequence& fork : forks) append(fork, rng, 50);
        layers.clear();
        forks.clear();
        const StoreStats stats = store->stats();
        CHECK(stats.exact_bytes == 0);
        CHECK(stats.packed_bytes == 0);
        CHECK(stats.exact_blocks + stats.packed_blocks == 0);
        if (cycle == 0) after_first = stats.reserved_bytes;
        CHECK(stats.reserved_bytes == after_first);
    }
    CHECK(after_first <= 4 * cache::Pool::slab_target);  // a spare for each slot size
}
