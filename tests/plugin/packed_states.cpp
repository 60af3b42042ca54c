// States that hold the codes of packed units: what comes back is what was there, byte for byte, or
// the cells must not be seen.

#include <cmath>
#include <cstring>
#include <map>
#include <span>

#include "saved_state.h"
#include "unit_codes.h"

namespace {

using namespace lowkv::test;
using lowkv::ggml::CellGroups;

// The packed bytes of each unit of stream 0 by its layer and the rank of its first token. The cache
// holds one sequence.
using Units = std::map<std::pair<int, std::uint32_t>, Bytes>;
Units units(const Cache& cache, int layer_count) {
    Units found;
    for (int layer = 0; layer < layer_count; ++layer) {
        const auto* tensor = lowkv::ggml::cache_tensor(cache.keys(static_cast<std::size_t>(layer)));
        const CellGroups& groups = tensor->buffer->tracker(0).groups();
        const std::vector<Bytes> blocks = packed_bytes(cache, static_cast<std::size_t>(layer));
        for (std::uint32_t unit = 0; unit < groups.generations().size(); ++unit) {
            if (groups.generations()[unit] % 2 == 0) continue;
            Bytes& bytes = found[{layer, groups.group(groups.unit_group(unit)).first_rank}];
            const std::uint32_t each = groups.block() / tensor->layer->plan().block_tokens();
            for (std::uint32_t b = unit * each; b < (unit + 1) * each && b < blocks.size(); ++b)
                bytes.insert(bytes.end(), blocks[b].begin(), blocks[b].end());
        }
    }
    return found;
}

bool has_codes(const State& state) {
    bool found = false;
    for (const Bytes& bytes : state)
        for (std::size_t at = 0; at < bytes.size(); at += row_bytes)
            found |= lowkv::ggml::begins_codes({bytes.data() + at, row_bytes});
    return found;
}

// Rows as numbers: who does not read the keys with the marks first does not save a state.
State numbers_of(const Cache& cache, const Cells& where) {
    State state;
    for (std::size_t tensor = 1; tensor < cache.tensors().size(); ++tensor) {
        Bytes& rows = state.emplace_back();
        for (const std::uint32_t cell : where) {
            const Bytes row = rows_of(cache.tensors()[tensor], cell, 1);
            rows.insert(rows.end(), row.begin(), row.end());
        }
    }
    return state;
}

std::vector<float> row_numbers(const Bytes& rows, std::size_t row) {
    std::vector<ggml_fp16_t> halves(channels);
    std::memcpy(halves.data(), rows.data() + row * row_bytes, row_bytes);
    std::vector<float> numbers(channels);
    ggml_fp16_to_fp32_row(halves.data(), numbers.data(), channels);
    return numbers;
}

// Squared, in parts of the squares.
double error_of(const std::vector<float>& was, const std::vector<float>& is) {
    double error = 0, size = 0;
    for (std::size_t i = 0; i < was.size(); ++i) {
        error += (was[i] - is[i]) * (was[i] - is[i]);
        size += was[i] * was[i];
    }
    return error / size;
}

// A state whose cells are all that its cache holds.
struct Saved {
    std::string scheme;
    int layer_count = 0;
    Cells from, where;
    State state;
    Units units;

    Saved(Random& random, std::string its_scheme) : scheme(std::move(its_scheme)) {
        layer_count = 3 + static_cast<int>(random.below(3));
        Cache source(scheme, cells, 1, layer_count);
        from = scattered(0, 340 + random.below(300), random.below(2) == 0, random);
        request(source, from, random);
        // Draft tokens that were rejected: their cells are written again, and slots die.
        for (unsigned i = random.below(3); i > 0; --i) {
            const auto back = static_cast<std::ptrdiff_t>(1 + random.below(5));
            const Cells again(from.end() - back, from.end());
            REQUIRE(source.step(again, Cells(from.begin(), from.end() - back)) == fine);
        }
        std::ranges::sort(from);
        state = save(source, from);
        units = ::units(source, layer_count);
        where = scattered(0, static_cast<std::uint32_t>(from.size()), random.below(2) == 0, random);
        std::ranges::sort(where);
    }
    Cache cache() const {
        Cache made(scheme, cells, 1, layer_count);
        made.ask();
        return made;
    }
    // Two that it leaves free where it is restored.
    Cells free_cells() const {
        Cells free = range(0, cells);
        std::erase_if(free, [&](auto c) { return std::ranges::binary_search(where, c); });
        free.resize(2);
        return free;
    }
};

std::string with_retention(const std::string& scheme, Random& random) {
    return scheme + ",window=" + std::to_string(random.below(3) * 40) +
           ",sinks=" + std::to_string(random.below(5));
}

}  // namespace

TEST_CASE("a restored state has the codes that were saved, and is saved as the same bytes") {
    const StatesAre packed("packed");
    Random random(41);
    for (unsigned number = 0; number < 40; ++number) {
        const Saved saved(random, with_retention(schemes[number % std::size(schemes)], random));
        CAPTURE(saved.scheme);
        CAPTURE(number);
        Cache cache = saved.cache();
        restore(cache, saved.state, saved.where);
        const State again = save(cache, saved.where);
        const bool fits = saved.scheme.find("int8") == std::string::npos;  // both parts in one
        Units was = saved.units, is = units(cache, saved.layer_count);
        const auto of_first_layer = [](const auto& unit) { return unit.first.first == 0; };
        if (!fits) {
            std::erase_if(was, of_first_layer);
            std::erase_if(is, of_first_layer);
        }
        CHECK(was == is);
        // Marks number their groups anew.
        if (fits) {
            CHECK(unmarked({again[0]}) == unmarked({saved.state[0]}));
            CHECK(
                std::equal(again.begin() + 1, again.end(), saved.state.begin() + 1));  // seals, too
        }
        CHECK(has_codes(saved.state));
        const lowkv::ggml::CacheStats stats = lowkv::ggml::stats();
        CHECK(stats.repacked_cells == (fits ? 0 : stats.cells_packed));
    }
}

TEST_CASE("units that are saved in part are numbers, others are codes") {
    const StatesAre packed("packed");
    Random random(43);
    for (unsigned number = 0; number < 20; ++number) {
        const Saved saved(random, with_retention(schemes[number % std::size(schemes)], random));
        CAPTURE(saved.scheme);
        CAPTURE(number);
        Cache source = saved.cache();
        restore(source, saved.state, saved.where);
        Cells some = saved.where;
        std::erase_if(some, [&](std::uint32_t) { return random.below(150) == 0; });
        const State numbers = numbers_of(source, some), part = save(source, some);
        Cache cache = saved.cache();
        restore(cache, part, some);
        const State back = numbers_of(cache, some);
        const auto* tensor = lowkv::ggml::cache_tensor(source.keys(0));
        const CellGroups& groups = tensor->buffer->tracker(0).groups();
        std::size_t whole_rows = 0;
        for (std::size_t i = 0; i < some.size(); ++i) {
            const std::uint32_t place = groups.packed_row(some[i]);
            const bool whole =
                place != lowkv::ggml::no_cell &&
                std::ranges::all_of(groups.unit_cells(place / groups.block()), [&](auto cell) {
                    return cell == lowkv::ggml::no_cell || std::ranges::binary_search(some, cell);
                });
            whole_rows += whole ? 1 : 0;
            for (std::size_t t = 0; t < numbers.size(); ++t) {
                const auto was = row_numbers(numbers[t], i), is = row_numbers(back[t], i);
                if (whole && !(t == 0 && saved.scheme.find("int8") != std::string::npos))
                    CHECK(was == is);
                else
                    CHECK(error_of(was, is) < 0.3);
            }
        }
        if (groups.block() == 32) CHECK(whole_rows > 0);
        CHECK(has_codes(part) == (whole_rows > 0 && has_codes(saved.state)));
    }
}

TEST_CASE("damaged codes are not seen") {
    const StatesAre packed("packed");
    Random random(47);
    unsigned unseen = 0;
    for (unsigned number = 0; number < 40; ++number) {
        const Saved saved(random, with_retention(schemes[number % 5], random));
        CAPTURE(saved.scheme);
        CAPTURE(number);
        State damaged = saved.state;
        std::vector<std::size_t> begins;
        const std::size_t tensor = 1 + random.below(static_cast<std::uint32_t>(damaged.size() - 1));
        Bytes& bytes = damaged[tensor];
        for (std::size_t at = 0; at < bytes.size(); at += row_bytes)
            if (lowkv::ggml::begins_codes({bytes.data() + at, row_bytes})) begins.push_back(at);
        if (begins.empty()) continue;  // all is in the window
        const std::size_t at = begins[random.below(static_cast<std::uint32_t>(begins.size()))];
        const std::uint32_t most = number % 2 == 0 ? 48 : row_bytes;
        bytes[at + random.below(most)] ^= static_cast<std::byte>(1u << random.below(8));
        Cache cache = saved.cache();
        restore(cache, damaged, saved.where);
        const Cells next = saved.free_cells();
        CHECK(cache.step(next, saved.where) != fine);
        CHECK(logged("a restored state was not taken over: its codes are"));
        ++unseen;
        // What was right of it may be seen, and it may come again.
        restore(cache, saved.state, saved.where);
        rows_of(cache.keys(0), 0, 1);  // ends it
        CHECK(units(cache, saved.layer_count) == saved.units);
        CHECK(cache.step(next, saved.where) == fine);
    }
    CHECK(unseen > 20);
}

TEST_CASE("codes that come before the keys with the marks are refused") {
    const StatesAre packed("packed");
    Random random(53);
    const Saved saved(random, "lowkv2.8,window=0,sinks=0");
    Cache cache = saved.cache();
    restore_at_once(cache, saved.state, saved.where);
    const Cells next = saved.free_cells();
    CHECK(cache.step(next, saved.where) != fine);
    CHECK(logged("it has packed rows, which come after the keys of its first layer"));
}

TEST_CASE("codes come back into a cache with a budget") {
    const StatesAre packed("packed");
    Random random(59);
    for (const char* scheme : {"lowkv2.8", "lowkv1.5", "lowkv4"}) {
        const Saved saved(random, std::string(scheme) + ",window=32,sinks=4");
        setenv("LOWKV_BUDGET", "1GiB", 1);
        Cache cache = saved.cache();
        unsetenv("LOWKV_BUDGET");
        restore(cache, saved.state, saved.where);
        const Cells next = saved.free_cells();
        CHECK(cache.step(next, saved.where) == fine);
        CHECK(units(cache, saved.layer_count) == saved.units);
    }
}

TEST_CASE("moved units are numbers, and the next shift finds them where they are") {
    const StatesAre packed("packed");
    Random random(61);
    Cache source("lowkv2.8,window=0,sinks=0", cells, 1, 3);
    const Cells from = range(0, 512);
    request(source, from, random);
    REQUIRE(source.shift(std::vector<std::int32_t>(cells, -7)) == fine);
    const State numbers = numbers_of(source, from), state = save(source, from);
    Cache cache("lowkv2.8,window=0,sinks=0", cells, 1, 3);
    cache.ask();
    restore(cache, state, from);
    const State back = numbers_of(cache, from);
    for (std::size_t t = 0; t < numbers.size(); ++t)
        for (std::size_t i = 0; i < from.size(); ++i)
            CHECK(error_of(row_numbers(numbers[t], i), row_numbers(back[t], i)) < 0.3);
}

namespace {

constexpr const char* whole_scheme = "lowkv2.8,window=0,sinks=0";

State state_of(const Cells& from) {
    Cache source(whole_scheme, cells, 1, 3);
    REQUIRE(source.step(from, {}) == fine);
    REQUIRE(source.step({900}, from) == fine);
    return save(source, from);
}

// Whether a cache that has taken it shows its rows.
bool is_seen(const State& state, const Cells& from) {
    Cache cache(whole_scheme, cells, 1, 3);
    cache.ask();
    restore(cache, state, from);
    return cache.step({900}, from) == fine;
}

// Where the rows of the first unit of a tensor begin.
std::size_t first_codes(const Bytes& rows) {
    for (std::size_t at = 0; at < rows.size(); at += row_bytes)
        if (lowkv::ggml::begins_codes({rows.data() + at, row_bytes})) return at;
    FAIL("no codes");
    return 0;
}

bool has_nan(const Bytes& rows) {
    for (std::size_t row = 0; row < rows.size() / row_bytes; ++row)
        for (const float x : row_numbers(rows, row))
            if (std::isnan(x)) return true;
    return false;
}

}  // namespace

TEST_CASE("a graph's views are numbers, also right behind a state's first tensor") {
    const StatesAre packed("packed");
    Cache cache(whole_scheme, cells, 1, 3);
    const Cells from = range(0, 512);
    REQUIRE(cache.step(from, {}) == fine);
    REQUIRE(cache.step({900}, from) == fine);
    REQUIRE(has_codes(save(cache, from)));
    rows_of(cache.keys(0), 0, 512);
    const Context context = new_context();
    for (std::size_t layer = 0; layer < 3; ++layer)
        for (ggml_tensor* tensor : {cache.keys(layer), cache.values(layer)}) {
            ggml_tensor* view = cache.view(context.get(), tensor);
            view->buffer = tensor->buffer;
            Bytes rows(ggml_nbytes(view));
            ggml_backend_tensor_get(view, rows.data(), 0, rows.size());
            CHECK_FALSE(has_nan(rows));
        }
}

TEST_CASE("codes without their beginning, and rows without their marks, are not seen") {
    const StatesAre packed("packed");
    const Cells from = range(0, 512);
    const State state = state_of(from);
    CHECK(is_seen(state, from));
    for (std::size_t tensor = 1; tensor < state.size(); ++tensor) {
        State damaged = state;
        const std::size_t at = first_codes(state[tensor]);
        std::fill_n(damaged[tensor].begin() + static_cast<std::ptrdiff_t>(at), row_bytes,
                    std::byte{0});
        CHECK_FALSE(is_seen(damaged, from));
    }
    State unmarked = state;
    for (std::size_t i = 0; i < 64 * row_bytes; i += 2) unmarked[0][i] ^= std::byte{1};
    CHECK_FALSE(is_seen(unmarked, from));
}

TEST_CASE("what was not taken over stays so when it is saved again") {
    const StatesAre packed("packed");
    const Cells from = range(0, 300);
    const State state = state_of(from);
    for (std::size_t tensor = 1; tensor < state.size(); ++tensor) {
        State damaged = state;
        damaged[tensor][first_codes(state[tensor]) + 60] ^= std::byte{4};
        Cache cache(whole_scheme, cells, 1, 3);
        cache.ask();
        restore(cache, damaged, from);
        const State again = save(cache, from);
        CHECK_FALSE(is_seen(again, from));
        CHECK(logged("had not been taken over itself when it was saved"));
        REQUIRE(cache.step(from, {}) == fine);  // written again, all is well
        REQUIRE(cache.step({900}, from) == fine);
        CHECK(is_seen(save(cache, from), from));
    }
}

TEST_CASE("a save that breaks off says nothing of the next one") {
    const StatesAre packed("packed");
    const State state = state_of(range(0, 300));
    for (const std::uint32_t tokens : {100u, 130u, 150u, 158u}) {
        Cache cache(whole_scheme, cells, 1, 3);
        cache.ask();
        restore(cache, state, range(0, 300));
        const Cells some = range(0, tokens);
        const State expected = save(cache, some);
        lowkv::ggml::cache_tensor(cache.keys(0))->buffer->prepare();
        rows_of(cache.keys(0), 0, 300);  // the disk is full
        CHECK(save(cache, some) == expected);
        CHECK(is_seen(expected, some));
    }
}

TEST_CASE("another scheme's codes are refused by that name, once, and clearing forgets them") {
    const StatesAre packed("packed");
    const Cells from = range(0, 300);
    const State state = state_of(from);
    Cache cache("kivi2,window=0,sinks=0", cells, 1, 3);
    cache.ask();
    log_text().clear();
    restore(cache, state, from);
    CHECK(std::ranges::count(log_text(), '\n') < 4);
    CHECK(cache.step({900}, from) != fine);
    CHECK(logged("another scheme than kivi2"));
    Cache other(whole_scheme, cells, 1, 3);
    other.ask();
    set(other, state, from, 1, from.size());  // without the keys with the marks
    other.clear();
    restore(other, state, from);
    CHECK(other.step({900}, from) == fine);
}
