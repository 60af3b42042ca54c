// Encoding and decoding on a device with kernels of devices/kernels/: bit for bit what the CPU has.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "codec/small_floats.h"
#include "device_case.h"
#include "lowkv/error.h"
#include "sample.h"

using namespace lowkv;
using namespace lowkv::test;

namespace {

const char* const codecs[] = {
    "kivi2",
    "kivi4",
    "int8",
    "int4",
    "k=exact,v=token-2-g32",
    "k=channel-2-g32,v=exact",
    "k=channel-1.5-g32,v=token-1.5-g32",
    "k=token-1.5-g64-fp8,v=channel-1.5-g32",
    "k=channel-3-g32,v=token-3-g32",
    "k=token-3-g32-fp8,v=channel-3-g128",
    "k=channel-4-g64-fp8,v=token-4-g128-fp8",
    "k=channel-8-g128,v=token-8-head",
    "k=token-2-g64-search,v=channel-2-g64-search",
    "k=channel-3-g32-search-fp8,v=token-4-head-search-fp8",
    "int4h",
    "turboquant2",
    "turboquant3-qr",
    "k=token-4-head-normal-hadamard-mean,v=token-4-head-normal-hadamard-unbiased",
    "k=token-2-g32-normal-hadamard-mean-fp8,v=token-4-g64-normal-unbiased-fp8",
    "k=token-8-g64-random-mean,v=token-3-head-normal-lsq",
    "k=token-1.5-g64-normal-random-mean,v=token-1.5-head-normal-hadamard",
    "k=token-4-g32-mean-fp8,v=token-4-g64-hadamard-search",
    "k=token-2-head-trellis-hadamard-mean,v=token-2-head-trellis-hadamard-unbiased",
    "k=token-3-head-trellis-random-fp8,v=token-1-head-trellis-lsq",
    "k=token-1-head-trellis-hadamard-mean-e5m3,v=token-3-head-trellis-hadamard-unbiased",
    "k=token-2-g32-normal-fp8,v=token-3-head-normal-random-lsq",
    "k=token-3-g64-hadamard-fp8,v=channel-2-g32",
    "lowkv1.5",
    "lowkv2",
    "lowkv2.8",
    "lowkv3",
    "lowkv4",
    "k=sorted-4321-head,v=exact",
    "k=sorted-5540-head-2rows,v=exact",
    "k=sorted-3110-head-4rows,v=token-2-g32",
    "k=sorted-3221-head-trellis-1row-weighted,v=token-2-head-normal-hadamard",
};

// Blocks of rows that are normal, with outliers, constant, tiny and large, and single long ones.
std::vector<float> rows_of(const Plan& plan, std::size_t blocks, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const std::size_t channels = plan.shape().channels();
    std::vector<float> rows(blocks * plan.block_tokens() * channels);
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const std::size_t token = i / channels, channel = i % channels;
        const float scale = channel % 29 == 3 ? 40.0f : token % 17 == 5 ? 1e-5f : 1.0f;
        rows[i] =
            token / plan.block_tokens() == 1 && channel % 7 == 0 ? 0.25f : normal(random) * scale;
        if (seed % 4 == 3 && i % 101 == 0) rows[i] *= 1500.0f;
        if (seed % 4 == 2 && token % 67 == 9) rows[i] *= 400.0f;  // one or two of a block
    }
    return rows;
}

std::vector<std::byte> out_of(const Device& device, const std::byte* memory, std::size_t bytes) {
    std::vector<std::byte> copy(bytes);
    device.copy_out(copy.data(), memory, bytes);
    return copy;
}

// Keys and values of whole blocks, one after the other.
void write_blocks(Device& device, const Plan& plan, const std::vector<float>& rows,
                  std::size_t blocks, std::byte* exact) {
    const std::size_t channels = plan.shape().channels();
    std::vector<BlockRows<std::byte>> to;
    for (std::size_t b = 0; b < blocks; ++b)
        to.push_back({exact + b * plan.exact_bytes(), 0, plan.block_tokens(),
                      b * plan.block_tokens() * channels});
    for (const Part part : {Part::keys, Part::values})
        device.write_rows(plan, part, to,
                          {rows.data(), RowType::f32, plan.shape().head_dim, channels},
                          serial_executor());
}

// What a device makes of rows: exact blocks, packed ones, and exact ones again.
struct Made {
    std::vector<std::byte> exact, packed, decoded;
    std::uint64_t saturated = 0;
};
Made make(Device& device, const Plan& plan, const std::vector<float>& rows, std::size_t blocks) {
    DeviceMemory exact(device, blocks * plan.exact_bytes());
    DeviceMemory packed(device, blocks * plan.packed_bytes());
    DeviceMemory decoded(device, blocks * plan.exact_bytes());
    std::vector<BlockCopy> encode, decode;
    const std::uint64_t before = device.saturated();
    write_blocks(device, plan, rows, blocks, exact.data());
    for (std::size_t b = 0; b < blocks; ++b) {
        std::byte* its = packed.data() + b * plan.packed_bytes();
        encode.push_back({exact.data() + b * plan.exact_bytes(), its});
        decode.push_back({its, decoded.data() + b * plan.exact_bytes()});
    }
    Made made;
    device.encode(plan, encode, serial_executor());
    made.saturated = device.saturated() - before;
    device.decode(plan, decode, serial_executor());
    made.exact = out_of(device, exact.data(), blocks * plan.exact_bytes());
    made.packed = out_of(device, packed.data(), blocks * plan.packed_bytes());

    // One part, then the other.
    const DeviceMemory parts(device, blocks * plan.packed_bytes());
    for (std::size_t b = 0; b < blocks; ++b) encode[b].to = parts.data() + b * plan.packed_bytes();
    for (const Part part : {Part::values, Part::keys})
        device.encode(plan, encode, serial_executor(), part);
    CHECK(out_of(device, parts.data(), blocks * plan.packed_bytes()) == made.packed);
    made.decoded = out_of(device, decoded.data(), blocks * plan.exact_bytes());
    return made;
}

// Packed, exact and packed again.
using TakenOver = std::array<std::vector<std::byte>, 3>;

// Four blocks: one that makes its own statistics of what queries said, two that take them over, of
// which one comes before it, and one that knows no queries. Then what was decoded, encoded again.
TakenOver take_over(Device& device, const Plan& plan, const std::vector<float>& rows) {
    const std::size_t channels = plan.shape().channels();
    std::vector<float> queries(channels);
    for (std::size_t c = 0; c < channels; ++c)
        queries[c] = std::exp2(static_cast<float>(c * 7 % 19) - 9);
    const DeviceMemory exact(device, 4 * plan.exact_bytes());
    const DeviceMemory packed(device, 4 * plan.packed_bytes());
    const DeviceMemory again(device, 4 * plan.packed_bytes());
    std::vector<BlockCopy> encode, decode, repeat;
    write_blocks(device, plan, rows, 4, exact.data());
    for (std::size_t b = 0; b < 4; ++b) {
        std::byte* own = exact.data() + b * plan.exact_bytes();
        std::byte* to = packed.data() + b * plan.packed_bytes();
        const std::byte* stats_from = b % 2 == 0 ? packed.data() + plan.packed_bytes() : nullptr;
        encode.push_back({own, to, stats_from, b == 1 ? queries.data() : nullptr});
        decode.push_back({to, own});
        repeat.push_back({own, again.data() + b * plan.packed_bytes()});
    }
    device.encode(plan, encode, serial_executor());
    device.decode(plan, decode, serial_executor());
    device.encode(plan, repeat, serial_executor());
    return {out_of(device, packed.data(), 4 * plan.packed_bytes()),
            out_of(device, exact.data(), 4 * plan.exact_bytes()),
            out_of(device, again.data(), 4 * plan.packed_bytes())};
}

// Tokens [first, first + count) of a block, and where their rows are, in elements.
struct Run {
    std::size_t block;
    std::uint32_t first, count;
    std::size_t at;
};

// Blocks that had rows written to them, `at_once` runs at a time, and the same rows read again into
// a buffer like theirs. Head and token strides have room between rows.
std::vector<std::byte> through(Device& device, const Plan& plan, std::size_t blocks,
                               const std::vector<Run>& runs, const std::vector<float>& rows,
                               std::size_t at_once, Executor& executor = serial_executor()) {
    const Shape& shape = plan.shape();
    const std::size_t head = shape.head_dim + 3, token = head * shape.kv_heads;
    const DeviceMemory memory(device, blocks * plan.exact_bytes());
    device.clear(memory.data(), blocks * plan.exact_bytes());
    std::vector<BlockRows<std::byte>> to;
    std::vector<BlockRows<const std::byte>> from;
    for (const Run& run : runs) {
        std::byte* const block = memory.data() + run.block * plan.exact_bytes();
        to.push_back({block, run.first, run.count, run.at});
        from.push_back({block, run.first, run.count, run.at});
    }
    std::vector<std::byte> read, found;
    for (const Part part : {Part::keys, Part::values}) {
        read.assign(rows.size() * element_bytes(plan.rows()), std::byte{0x55});
        const auto each = [&](auto f) {
            for (std::size_t i = 0; i < runs.size(); i += at_once)
                f(i, std::min(at_once, runs.size() - i));
        };
        each([&](std::size_t i, std::size_t n) {
            device.write_rows(plan, part, std::span(to).subspan(i, n),
                              {rows.data(), RowType::f32, head, token}, executor);
        });
        each([&](std::size_t i, std::size_t n) {
            device.read_rows(plan, part, std::span(from).subspan(i, n), {read.data(), head, token},
                             executor);
        });
        found.insert(found.end(), read.begin(), read.end());
    }
    const std::vector<std::byte> exact = out_of(device, memory.data(), blocks * plan.exact_bytes());
    found.insert(found.end(), exact.begin(), exact.end());
    return found;
}

}  // namespace

TEST_CASE("every codec has the CPU's bits, packed and decoded") {
    unsigned seed = 0;
    for (const char* codec : codecs) {
        for (const std::uint32_t head_dim : {32u, 80u, 128u, 576u}) {
            for (const RowType type : {RowType::f16, RowType::f32, RowType::bf16}) {
                if (!in_sample(++seed)) continue;
                const Plan plan(parse_scheme(codec).base, {2, head_dim}, {}, 0, {.rows = type});
                // More blocks than are encoded at once.
                const std::size_t blocks = head_dim == 32 ? 35 : 3;
                const std::vector<float> rows = rows_of(plan, blocks, seed);
                const Made want = make(*cpu_device(), plan, rows, blocks);
                const Made got = make(device(), plan, rows, blocks);
                INFO(std::string(codec), " head_dim ", head_dim, " rows ",
                     static_cast<unsigned>(type));
                CHECK(got.exact == want.exact);
                CHECK(got.packed == want.packed);
                CHECK(got.decoded == want.decoded);
                CHECK(got.saturated == want.saturated);
            }
        }
    }
}

TEST_CASE("sorted keys take over statistics and find their codes again, as on the CPU") {
    unsigned seed = 0;
    for (const char* codec :
         {"lowkv1.5", "lowkv2.8", "lowkv4", "k=sorted-3210-head-1row,v=exact"}) {
        for (const std::uint32_t head_dim : {16u, 80u, 128u, 272u}) {
            if (!in_sample(++seed)) continue;
            const RowType type = seed % 2 == 0 ? RowType::f16 : RowType::f32;
            const Plan plan(parse_scheme(codec).base, {2, head_dim}, {}, 0, {.rows = type});
            const std::vector<float> rows = rows_of(plan, 4, seed);
            const TakenOver want = take_over(*cpu_device(), plan, rows);
            INFO(std::string(codec), " head_dim ", head_dim);
            CHECK(take_over(device(), plan, rows) == want);
            // It did carry: what a plain encode of other rows would hardly find. Beside a long key
            // (rows_of) the tokens of its trellis' word may get other codes.
            for (std::size_t b = 0; seed % 4 < 2 && b < 4; ++b)
                CHECK(std::equal(want[0].data() + b * plan.packed_bytes(),
                                 want[0].data() + b * plan.packed_bytes() + plan.keys().bytes(),
                                 want[2].data() + b * plan.packed_bytes()));
        }
    }
}

TEST_CASE("numbers that no f16 holds are counted once, on any row") {
    for (const RowType type : {RowType::f16, RowType::f32, RowType::bf16}) {
        const Plan plan(parse_scheme("kivi2").base, {2, 64}, {}, 0, {.rows = type});
        for (const float bad : {65504.0f, 70000.0f, INFINITY, NAN}) {
            std::vector<float> rows = rows_of(plan, 2, 4);
            rows[rows.size() - 3] = bad;
            // A key and a value; the bf16 next to 65504 is above it.
            const std::uint64_t want = type == RowType::f32 && bad == 65504.0f ? 0 : 2;
            for (Device* its : {&device(), cpu_device().get()})
                CHECK(make(*its, plan, rows, 2).saturated == want);
        }
    }
}

TEST_CASE("rows of any stride go in and out, and are copied as on the CPU") {
    for (const RowType type : {RowType::f16, RowType::f32, RowType::bf16}) {
        const Plan plan(parse_scheme("kivi2").base, {3, 48}, {}, 0, {.rows = type});
        const std::vector<float> rows = rows_of(plan, 2, 5);
        std::vector<std::vector<std::byte>> results;
        for (Device* its : {cpu_device().get(), &device()}) {
            DeviceMemory memory(*its, 2 * plan.exact_bytes());
            its->clear(memory.data(), 2 * plan.exact_bytes());
            std::byte* other = memory.data() + plan.exact_bytes();
            for (const Part part : {Part::keys, Part::values})  // [head][token][channel]
                its->write_rows(plan, part, std::array{BlockRows<std::byte>{memory.data(), 3, 20}},
                                {rows.data() + 7, RowType::f32, 48 * 30, 48}, serial_executor());
            its->copy_rows(plan, other, 1, memory.data(), 4, 9, false);
            its->copy_rows(plan, other, 11, memory.data(), 5, 6, true);
            its->copy(other + plan.exact_bytes() - 128, memory.data() + 64, 100);
            std::vector<float> read(std::size_t{30} * plan.shape().channels());
            its->read_rows(plan, Part::keys,
                           std::array{BlockRows<const std::byte>{memory.data(), 2, 25}},
                           {read.data(), 48, plan.shape().channels()}, serial_executor());
            results.push_back(out_of(*its, memory.data(), 2 * plan.exact_bytes()));
            const auto bytes = std::as_bytes(std::span(read));
            results.back().insert(results.back().end(), bytes.begin(), bytes.end());
        }
        CHECK(results[0] == results[1]);
    }
}

TEST_CASE("rows of many blocks at once are those of one token after the other") {
    std::mt19937 random(11);
    const auto executor = make_thread_executor(3);
    for (const RowType type : {RowType::f16, RowType::f32, RowType::bf16}) {
        // More blocks than a launch has, and more rows than the staging memory holds at a time.
        for (const auto& [shape, blocks] :
             {std::pair<Shape, std::size_t>{{2, 16}, 90}, {{8, 128}, 14}}) {
            const Plan plan(parse_scheme("kivi2").base, shape, {}, 0, {.rows = type});
            const std::size_t token = shape.kv_heads * (shape.head_dim + 3);
            std::vector<Run> runs, single;
            std::size_t end = 0;
            for (std::size_t b = blocks; b-- > 0;) {
                if (random() % 8 == 0) continue;
                const auto first = static_cast<std::uint32_t>(random() % plan.block_tokens());
                const auto count =
                    static_cast<std::uint32_t>(1 + random() % (plan.block_tokens() - first));
                runs.push_back({b, first, count, end += random() % 7});
                for (std::uint32_t t = 0; t < count; ++t)
                    single.push_back({b, first + t, 1, end + t * token});
                end += count * token;
            }
            std::vector<float> rows(end);
            std::normal_distribution<float> normal;
            for (float& x : rows) x = normal(random);
            INFO("rows ", static_cast<unsigned>(type), " blocks ", blocks);
            const auto want = through(*cpu_device(), plan, blocks, single, rows, 1);
            CHECK(through(device(), plan, blocks, runs, rows, runs.size()) == want);
            CHECK(through(*cpu_device(), plan, blocks, runs, rows, runs.size(), *executor) == want);
        }
    }
}

TEST_CASE("a row may be larger than the memory that rows pass through") {
    const Plan plan(parse_scheme("kivi2").base, {4096, 128}, {}, 0, {.rows = RowType::f32});
    std::vector<float> rows(2 * std::size_t{4096} * (128 + 3));
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 1013);
    const std::vector<Run> runs{{0, 5, 2, 0}};
    CHECK(through(device(), plan, 1, runs, rows, 1) ==
          through(*cpu_device(), plan, 1, runs, rows, 1));
}

TEST_CASE("small: a token that is named twice keeps the later row") {
    const Plan plan(parse_scheme("kivi2").base, {1, 16}, {}, 0, {.rows = RowType::f32});
    const std::vector<Run> runs{{0, 3, 5, 0}, {1, 0, 4, 100}, {0, 5, 2, 200}, {0, 2, 4, 300}};
    std::vector<float> rows(400);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
    CHECK(through(device(), plan, 2, runs, rows, runs.size()) ==
          through(*cpu_device(), plan, 2, runs, rows, 1));
}

// Each kernel, in as little as an interpreter goes through in a minute (make test-opencl-races).
TEST_CASE("small: a block of each kind of codes") {
    for (const char* codec :
         {"k=channel-3-g32-search-fp8,v=exact", "k=token-2-head-hadamard-mean,v=token-1.5-g32",
          "k=token-4-head-normal-random-mean-e5m3,v=token-2-head-trellis-hadamard-unbiased",
          "k=sorted-3210-head-trellis-2rows-weighted,v=exact", "k=sorted-5000-head,v=exact"}) {
        const Plan plan(parse_scheme(codec).base, {1, 16}, {}, 0, {.rows = RowType::f32});
        const std::vector<float> rows = rows_of(plan, 1, 1);
        const Made want = make(*cpu_device(), plan, rows, 1);
        const Made got = make(device(), plan, rows, 1);
        INFO(std::string(codec));
        CHECK(got.exact == want.exact);
        CHECK(got.packed == want.packed);
        CHECK(got.decoded == want.decoded);
        CHECK(got.saturated == want.saturated);
    }
}

TEST_CASE("small: sorted keys that take over statistics and find their codes again") {
    const Plan plan(parse_scheme("k=sorted-3210-head-trellis-2rows-weighted,v=exact").base, {1, 16},
                    {}, 0, {.rows = RowType::f32});
    const std::vector<float> rows = rows_of(plan, 4, 1);
    CHECK(take_over(device(), plan, rows) == take_over(*cpu_device(), plan, rows));
}
