// States with damage anywhere: they are refused, or answer as they did. States of earlier versions,
// whose marks have no check over their rows, are taken still.

#include "saved_state.h"

namespace {

using namespace lowkv::test;

Cells free_cells(const Trial& trial) {
    Cells next = range(0, cells);
    std::erase_if(next, [&](std::uint32_t cell) {
        return std::ranges::find(trial.where, cell) != trial.where.end() ||
               std::ranges::find(trial.other, cell) != trial.other.end();
    });
    next.resize(3);
    return next;
}

// What the next tokens of a restored sequence see; empty: their graph is refused.
std::vector<float> answer(const Trial& trial, const State& state) {
    Cache cache = trial.cache();
    restore(cache, state, trial.where);
    const bool taken = cache.step(free_cells(trial), trial.where) == fine;
    if (!taken) CHECK(logged("a restored state was not taken over: "));
    return taken ? cache.result() : std::vector<float>{};
}

using Damage = void (*)(Bytes&, Random&);
std::uint32_t size_of(const Bytes& bytes) { return static_cast<std::uint32_t>(bytes.size()); }
std::ptrdiff_t any_row(const Bytes& bytes, Random& random) {
    const auto rows = static_cast<std::uint32_t>(bytes.size() / row_bytes);
    return std::ptrdiff_t{random.below(rows)} * std::ptrdiff_t{row_bytes};
}

void flip(Bytes& bytes, Random& random) {
    bytes[random.below(size_of(bytes))] ^= static_cast<std::byte>(1u << random.below(8));
}
// Most of a state of codes is zeros.
void flip_number(Bytes& bytes, Random& random) {
    std::uint32_t at = random.below(size_of(bytes));
    for (int i = 0; i < 1000 && bytes[at] == std::byte{0}; ++i) at = random.below(size_of(bytes));
    bytes[at] ^= static_cast<std::byte>(1u << random.below(8));
}
void cut(Bytes& bytes, Random& random) {
    std::fill(bytes.begin() + random.below(size_of(bytes)), bytes.end(), std::byte{0});
}
void clear_some(Bytes& bytes, Random& random) {
    const std::uint32_t at = random.below(size_of(bytes));
    std::fill_n(bytes.begin() + at, std::min(1 + random.below(4096), size_of(bytes) - at),
                std::byte{0});
}
void swap_rows(Bytes& bytes, Random& random) {
    const auto a = bytes.begin() + any_row(bytes, random),
               b = bytes.begin() + any_row(bytes, random);
    if (a != b) std::swap_ranges(a, a + row_bytes, b);
}
void repeat_row(Bytes& bytes, Random& random) {
    const auto from = bytes.begin() + any_row(bytes, random);
    const Bytes row(from, from + row_bytes);
    std::ranges::copy(row, bytes.begin() + any_row(bytes, random));
}

}  // namespace

TEST_CASE("a damaged state is refused, or its answer is the same") {
    constexpr Damage kinds[] = {flip,       flip_number, flip_number, cut,
                                clear_some, swap_rows,   repeat_row};
    Random random(71);
    unsigned refused = 0, all = 0;
    for (unsigned number = 0; number < 20; ++number) {
        const StatesAre are(number % 4 == 3 ? "f16" : "packed");
        const Trial trial(random, number);
        CAPTURE(trial.scheme);
        CAPTURE(number);
        const std::vector<float> right = answer(trial, trial.state);
        REQUIRE_FALSE(right.empty());
        for (unsigned i = 0; i < 14; ++i, ++all) {
            State damaged = trial.state;
            const std::size_t tensor =
                i % 5 == 0 ? 0 : random.below(static_cast<std::uint32_t>(damaged.size()));
            kinds[i % std::size(kinds)](damaged[tensor], random);
            CAPTURE(i);
            CAPTURE(tensor);
            const std::vector<float> found = answer(trial, damaged);
            if (found.empty())
                ++refused;
            else
                CHECK(distance_of(found, right) < 1e-5f);  // sums in another order
        }
        // Two tensors change places.
        State damaged = trial.state;
        std::swap(damaged[1], damaged[2]);
        CHECK(answer(trial, damaged).empty());
    }
    MESSAGE(refused, " of ", all, " refused");
    CHECK(refused > all / 2);
    CHECK(refused < all);
}

TEST_CASE("a state of an earlier version is taken as it was") {
    Random random(73);
    for (unsigned number = 0; number < 10; ++number) {
        const StatesAre are(number % 2 == 0 ? "packed" : "f16");
        const Trial trial(random, number);
        CAPTURE(trial.scheme);
        const std::vector<float> right = answer(trial, trial.state);
        State before = trial.state;
        mark_as_before(before[0]);
        const std::vector<float> found = answer(trial, before);
        REQUIRE_FALSE(found.empty());
        CHECK(distance_of(found, right) < 0.02f);  // the marks are in other bits of the first keys
    }
}

TEST_CASE("tokens whose keys or values are zeros are restored, also packed ones as numbers") {
    Random random(79);
    for (const std::string scheme : {"lowkv2.8,window=0,sinks=0", "lowkv4,window=32,sinks=4"}) {
        for (const char* states : {"packed", "f16"}) {
            const StatesAre are(states);
            CAPTURE(scheme);
            CAPTURE(states);
            Cache source(scheme, cells, 1, 3);
            const Cells from = range(0, 512);
            request(source, from, random);
            // Layers of zeros: keys of the second, values of the third.
            const Bytes zeros(from.size() * row_bytes, std::byte{0});
            ggml_backend_tensor_set(source.keys(1), zeros.data(), 0, zeros.size());
            ggml_backend_tensor_set(source.values(2), zeros.data(), 0, zeros.size());
            REQUIRE(source.step({900}, from) == fine);
            REQUIRE(source.shift(std::vector<std::int32_t>(cells, -7)) == fine);  // now as numbers
            const State state = save(source, from);
            Cache cache(scheme, cells, 1, 3);
            cache.ask();
            restore(cache, state, from);
            CHECK(cache.step({900}, from) == fine);
        }
    }
}
