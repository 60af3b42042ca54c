// Restored states of numbers: packed as they arrive, to the same bytes as if all rows had come
// first.

#include "saved_state.h"

namespace {

using namespace lowkv::test;

}  // namespace

TEST_CASE("a state that is packed as it arrives has the bytes of one that is packed at once") {
    Random random(23);
    for (unsigned number = 0; number < 30; ++number) {
        Trial trial(random, number);
        CAPTURE(trial.scheme);
        CAPTURE(number);
        const bool damaged = number % 3 == 2;
        if (damaged) mark_as_before(trial.state[0]);  // whose rows are not checked
        for (unsigned i = 0; damaged && i < 40; ++i) {
            const auto count = static_cast<std::uint32_t>(trial.state.size());
            Bytes& bytes = trial.state[random.below(count)];
            bytes[random.below(static_cast<std::uint32_t>(bytes.size()))] ^= std::byte{4};
            Bytes& marked = trial.state[0];
            marked[random.below(static_cast<std::uint32_t>(marked.size()))] ^= std::byte{1};
        }
        Cache arriving = trial.cache(), whole = trial.cache();
        restore(arriving, trial.state, trial.where);
        restore_at_once(whole, trial.state, trial.where);
        const Cells all = range(0, cells);
        CHECK(save(arriving, all) == save(whole, all));
        bool any = false;
        for (std::size_t layer = 0; layer < static_cast<std::size_t>(trial.layer_count); ++layer) {
            const std::vector<Bytes> blocks = packed_bytes(arriving, layer);
            CHECK(blocks == packed_bytes(whole, layer));
            for (const Bytes& block : blocks) any = any || !block.empty();
        }
        CHECK((any || damaged));
        Cells next = scattered(0, cells, true, random);
        std::erase_if(next, [&](std::uint32_t cell) {
            return std::ranges::find(trial.where, cell) != trial.where.end() ||
                   std::ranges::find(trial.other, cell) != trial.other.end();
        });
        next.resize(3);
        REQUIRE(arriving.step(next, trial.where) == fine);
        REQUIRE(whole.step(next, trial.where) == fine);
        CHECK(arriving.result() == whole.result());
    }
}

TEST_CASE("a state that ends early costs nobody a row, and may come again") {
    Random random(29);
    for (unsigned number = 0; number < 30; ++number) {
        const StatesAre are(number % 2 == 0 ? "f16" : "packed");
        const Trial trial(random, number);
        CAPTURE(trial.scheme);
        CAPTURE(number);
        Cache cache = trial.cache(), never = trial.cache();
        const State before = save(cache, trial.other);
        for (unsigned times = 1 + random.below(3); times > 0; --times) {
            const auto count = static_cast<std::uint32_t>(trial.state.size());
            const std::size_t tensors = random.below(count);
            restore(cache, trial.state, trial.where, tensors);
            set(cache, trial.state, trial.where, tensors,
                random.below(static_cast<std::uint32_t>(trial.where.size())));
            if (random.below(2) == 0) CHECK(unmarked(save(cache, trial.other)) == unmarked(before));
        }
        restore(cache, trial.state, trial.where);
        restore(never, trial.state, trial.where);
        CHECK(unmarked(save(cache, trial.other)) == unmarked(before));
        CHECK(unmarked(save(cache, trial.where)) == unmarked(save(never, trial.where)));
    }
}

TEST_CASE("a restore needs the packed state and the rows of two layers") {
    for (const std::string scheme : {"lowkv2.8", "kivi2", "turboquant3", "kivi4"}) {
        CAPTURE(scheme);
        constexpr std::uint32_t many = 4096;
        constexpr int layer_count = 8;
        const std::string text = scheme + ",window=32,sinks=0";
        State state;
        const Cells where = range(0, many);
        {
            Cache source(text, many, 1, layer_count);
            for (std::uint32_t t = 0; t < many; t += 512)
                REQUIRE(source.step(range(t, t + 512), range(t > 64 ? t - 64 : 0, t)) == fine);
            state = save(source, where);
        }
        Cache cache(text, many, 1, layer_count);
        cache.ask();
        for (std::size_t i = 0; i < state.size(); ++i)
            ggml_backend_tensor_set(cache.tensors()[i], state[i].data(), 0, state[i].size());
        rows_of(cache.keys(0), 0, 1);
        const lowkv::ggml::CacheStats stats = lowkv::ggml::stats();
        CHECK(stats.cells_packed > many / 2);
        const std::size_t layer_rows = 2 * many * row_bytes;
        MESSAGE(text, ": packed ", stats.packed_bytes, ", exact ", stats.exact_bytes, ", peak ",
                stats.peak_bytes, ", a layer's rows ", layer_rows);
        CHECK(stats.peak_bytes <= stats.packed_bytes + 2 * layer_rows);
    }
}
