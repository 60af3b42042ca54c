// Batches: images of them, what can't be packed, attention to them, and steps of plain sequences.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <thread>

#include "batch_common.h"
#include "cache_common.h"
#include "image_case.h"
#include "lowkv/error.h"

using namespace lowkv;
using namespace batch_test;

namespace {

constexpr RowType types[] = {RowType::f32, RowType::f16, RowType::bf16};
constexpr Shape shape{2, 32};

struct Held {
    std::shared_ptr<const Plan> plan;
    std::shared_ptr<Store> store = std::make_shared<Store>();
    Retention retention;
    Batch batch;

    Held(const std::string& scheme, RowType rows, std::uint32_t sequences)
        : plan(batch_test::make_plan(scheme, shape, rows)),
          retention(parse_scheme(scheme).retention),
          batch(store, plan, retention, sequences) {}
};

std::vector<Row> all_rows(const Batch& batch) {
    const std::uint32_t count = batch.tokens() - batch.first();
    Buffer keys(batch.plan().rows(), batch.plan().shape(), batch.size(), count), values = keys;
    batch.read(batch.first(), count, keys.out(), values.out());
    std::vector<Row> rows;
    for (std::uint32_t s = 0; s < batch.size(); ++s) {
        for (std::uint32_t t = 0; t < count; ++t) {
            rows.push_back(keys.get(s, t));
            rows.push_back(values.get(s, t));
        }
    }
    return rows;
}

void fill(Batch& batch, unsigned seed, std::uint32_t tokens) {
    Rng rng(seed);
    append(batch, random_rows(rng, batch.size(), tokens, batch.plan().shape().channels()),
           batch.plan().rows());
}

bool refused(ErrorCode code, const std::string& word, const auto& f) {
    try {
        f();
    } catch (const Error& error) {
        INFO(error.what());
        CHECK(error.code() == code);
        CHECK(std::string(error.what()).find(word) != std::string::npos);
        return true;
    }
    return false;
}

}  // namespace

TEST_CASE("a batch's image gives the batch back, and it goes on as the other would") {
    for (const char* scheme : {"kivi2,window=20,sinks=4", "lowkv2.8,window=5,sinks=0", "exact"}) {
        for (const RowType type : types) {
            Held held(scheme, type, 3);
            fill(held.batch, 1, 150);
            held.batch.settle();
            Batch again = Batch::load(held.batch.save(), held.store, held.plan, held.retention);
            CHECK(again.size() == 3);
            for (unsigned i = 0; i < 3; ++i) {
                CHECK(again.save() == held.batch.save());
                CHECK(all_rows(again) == all_rows(held.batch));
                fill(held.batch, 10 + i, 30);
                fill(again, 10 + i, 30);
                held.batch.settle();
                again.settle();
                CHECK(again.packed_end() == held.batch.packed_end());
                again.truncate(again.tokens() - 11);
                held.batch.truncate(held.batch.tokens() - 11);
            }
        }
    }
}

TEST_CASE("an image of a range is the batch without the tokens before it") {
    Held held("kivi2,window=20,sinks=4", RowType::bf16, 2);
    fill(held.batch, 1, 200);
    held.batch.settle();  // [4, 164) is packed
    CHECK(held.batch.packed_end() == 164);
    const std::vector<Row> all = all_rows(held.batch);
    const std::pair<std::uint32_t, std::uint32_t> ranges[] = {
        {0, 4}, {0, 200}, {4, 164}, {36, 190}, {170, 181}, {2, 100}, {9, 9}, {0, 0}};
    for (const auto& [first, last] : ranges) {
        INFO(first, " to ", last);
        if (first == 9 || (first == 2 && last == 100)) {
            CHECK(refused(ErrorCode::invalid_argument, "inside of a packed block",
                          [&] { held.batch.save(first, last == 9 ? 10 : last + 1); }));
            if (first == 9) continue;
        }
        Batch again =
            Batch::load(held.batch.save(first, last), held.store, held.plan, held.retention);
        CHECK(again.first() == first);
        CHECK(again.tokens() == last);
        const std::vector<Row> rows = all_rows(again);
        REQUIRE(rows.size() == std::size_t{4} * (last - first));
        for (std::uint32_t s = 0; s < 2; ++s) {
            CHECK(std::equal(rows.begin() + s * 2 * (last - first),
                             rows.begin() + (s + 1) * 2 * (last - first),
                             all.begin() + (s * 200 + first) * 2));
        }
        fill(again, 3, 50);
        again.settle();
        CHECK(again.tokens() == last + 50);
    }
    CHECK(refused(ErrorCode::invalid_argument, "it holds", [&] { held.batch.save(0, 201); }));
}

TEST_CASE("an image whose tokens a batch does not have so is refused") {
    Held held("kivi2,window=20,sinks=4", RowType::f16, 2);
    fill(held.batch, 1, 150);
    held.batch.settle();
    const std::vector<std::byte> image = held.batch.save();
    const ImageHeader good = read_image(image);
    REQUIRE(good.spans == std::vector<ImageSpan>{{0, 4, false}, {4, 96, true}, {100, 50, false}});
    const auto load = [&](const std::vector<ImageSpan>& spans, std::uint32_t tokens) {
        ImageHeader header = good;
        header.spans = spans;
        header.tokens = tokens;
        std::vector<std::byte> bytes(lay_out(header).bytes);
        seal_image(header, bytes);
        return Batch::load(bytes, held.store, held.plan, held.retention);
    };
    CHECK(load(good.spans, 150).packed_end() == 100);
    CHECK(load({{4, 96, true}, {100, 50, false}}, 150).first() == 4);
    CHECK(load({{36, 64, true}}, 100).first() == 36);
    CHECK(load({}, 150).first() == 150);
    const auto bad = [&](const std::string& word, const std::vector<ImageSpan>& spans,
                         std::uint32_t tokens) {
        CHECK(refused(ErrorCode::invalid_image, word, [&] { load(spans, tokens); }));
    };
    bad("sinks", {{0, 5, false}, {5, 96, true}}, 101);  // one sink too many
    bad("sinks", {{0, 3, false}, {3, 96, true}}, 99);
    bad("sinks", {{0, 96, true}}, 96);
    bad("sinks", {{0, 36, false}, {36, 64, true}}, 100);
    bad("after those before", {{0, 4, false}, {36, 64, true}}, 100);
    bad("more than one", {{4, 32, true}, {36, 32, true}}, 68);
    bad("more than one", {{4, 32, true}, {36, 9, false}, {45, 32, true}}, 77);
    bad("its rows end", {{4, 96, true}}, 90);  // the last block goes past the tokens
    bad("its rows end", {{0, 90, false}}, 91);
    bad("too many", {}, std::uint32_t{1} << 31);
    ImageHeader many = good;
    many.spans.clear();
    many.batch = 1u << 31;
    std::vector<std::byte> bytes(lay_out(many).bytes);
    seal_image(many, bytes);
    CHECK(refused(ErrorCode::invalid_image, "without rows",
                  [&] { Batch::load(bytes, held.store, held.plan, held.retention); }));
    // Another type of rows means other bytes.
    Held other("kivi2,window=20,sinks=4", RowType::bf16, 2);
    CHECK(refused(ErrorCode::invalid_image, "exact rows are f16",
                  [&] { Batch::load(image, other.store, other.plan, other.retention); }));
}

TEST_CASE("keys that know their positions keep them") {
    const auto store = std::make_shared<Store>();
    const auto plan =
        std::make_shared<const Plan>(image_test::plan_of(parse_scheme("skvq-k4v4").base, {2, 64}));
    REQUIRE(plan->has_positions());
    const Retention retention{.window = 10, .sinks = 3};
    Batch batch(store, plan, retention, 2);
    fill(batch, 1, 100);
    batch.settle();
    Batch again = Batch::load(batch.save(), store, plan, retention);
    CHECK(again.save() == batch.save());
    CHECK(all_rows(again) == all_rows(batch));
    Sequence sequence(store, plan, retention);
    cache_test::Rng rng(4);
    cache_test::append(sequence, rng, 90);
    sequence.settle();
    CHECK(save_sequence(load_sequence(save_sequence(sequence), store, plan, retention)) ==
          save_sequence(sequence));
}

TEST_CASE("sequences with the same spans are one image, whatever the rows") {
    for (const RowType type : types) {
        const auto store = std::make_shared<Store>();
        const auto plan = batch_test::make_plan("kivi2,window=20,sinks=4", shape, type);
        const Retention retention{.window = 20, .sinks = 4};
        std::vector<Sequence> sequences;
        cache_test::Rng rng(7);
        for (int i = 0; i < 3; ++i) {
            Sequence& its = sequences.emplace_back(store, plan, retention);
            cache_test::append(its, rng, 133);
            its.settle();
        }
        const Sequence* pointers[] = {&sequences[0], &sequences[1], &sequences[2]};
        const auto image = save_sequences(pointers);
        const auto again = load_sequences(image, store, plan, retention);
        REQUIRE(again.size() == 3);
        for (std::size_t i = 0; i < 3; ++i)
            CHECK(save_sequence(again[i]) == save_sequence(sequences[i]));
        CHECK(refused(ErrorCode::invalid_image, "a Sequence is one",
                      [&] { load_sequence(image, store, plan, retention); }));
        cache_test::append(sequences[1], rng, 1);
        CHECK(refused(ErrorCode::invalid_argument, "other plans, sizes",
                      [&] { save_sequences(pointers); }));
    }
}

TEST_CASE("rows that no f16 holds are not packed, and nothing is lost") {
    for (const RowType type : types) {
        for (const float value : {65520.0f, 1e30f, INFINITY, NAN}) {
            if (type == RowType::f16 && std::isfinite(value)) continue;
            Held held("kivi2,window=0,sinks=0", type, 2);
            fill(held.batch, 1, 40);
            std::vector<float> row(shape.channels(), 1.0f);
            row[40] = value;
            const BatchRows rows{row.data(), RowType::f32, {0, shape.head_dim, 0}};
            held.batch.append(rows, rows, 1);
            fill(held.batch, 1, 30);
            const StoreStats before = held.store->stats();
            CHECK(
                refused(ErrorCode::invalid_argument, "above 65504", [&] { held.batch.settle(); }));
            CHECK(held.batch.packed_end() == 0);
            CHECK(held.store->stats().exact_bytes == before.exact_bytes);
            CHECK(held.store->stats().packed_bytes == 0);
            held.batch.truncate(40);
            held.batch.settle();
            CHECK(held.batch.packed_end() == 32);
        }
    }
}

TEST_CASE("rows of other types are rounded to the plan's") {
    for (const RowType type : types) {
        for (const RowType given : types) {
            Held held("exact", type, 1);
            Rng rng(3);
            const auto rows = random_rows(rng, 1, 70, shape.channels());
            append(held.batch, rows, given);
            const std::vector<Row> read = all_rows(held.batch);
            for (std::size_t t = 0; t < 70; ++t) {
                CHECK(read[2 * t] == rows.keys[0][t]);
                CHECK(read[2 * t + 1] == rows.values[0][t]);
            }
        }
    }
    Held held("exact", RowType::bf16, 1);
    Row row(shape.channels(), 1.00390625f);  // 1 + 2^-8: half way, to even
    row[1] = 1.01171875f;                    // 1 + 3 * 2^-8: half way, to even
    row[2] = NAN;
    const BatchRows rows{row.data(), RowType::f32, {0, shape.head_dim, 0}};
    held.batch.append(rows, rows, 1);
    const Row read = all_rows(held.batch).front();
    CHECK(read[0] == 1.0f);
    CHECK(read[1] == 1.015625f);
    CHECK(std::isnan(read[2]));
}

TEST_CASE("attention to a batch is that over the rows that it reads back") {
    const auto threads = make_thread_executor(2);
    AttentionWorkspace workspace;
    Rng rng(5);
    for (const char* scheme : {"int8,window=20,sinks=4", "int8,window=20,sinks=0", "exact"}) {
        for (const RowType type : types) {
            for (unsigned kind = 0; kind < 6; ++kind) {
                Held held(scheme, type, 3);
                fill(held.batch, 1 + kind, 180);
                held.batch.settle();
                const bool dropped = kind == 4 && held.retention.sinks == 0;
                if (dropped) held.batch.drop_before(100);
                const std::uint32_t queries = kind % 2 == 0 ? 1 : 40, heads = 4;
                BatchAttention a;
                a.queries = queries;
                a.heads = heads;
                a.scale = 0.2f;
                a.first_token = kind == 3 ? 50 : 0;
                a.window = kind == 2 ? 60 : 0;
                const std::uint32_t first = std::max(held.batch.first(), a.first_token);
                std::vector<float> mask(3 * queries * (180 - a.first_token));
                for (float& x : mask)
                    x = rng() % 3 == 0 ? -INFINITY : static_cast<float>(rng() % 5);
                const std::size_t cells = 180 - a.first_token;
                if (kind >= 3) {
                    a.mask = mask.data();
                    a.mask_strides = {queries * cells, 0, cells};
                }
                a.causal = kind != 1;
                const Row sinks{0.5f, -1.0f, 2.0f, 0.0f};
                if (kind == 5) a.sink_logits = sinks.data();
                std::vector<float> q(3 * heads * queries * shape.head_dim), out(q.size(), NAN);
                for (float& x : q) x = static_cast<float>(rng() % 17) / 16 - 0.5f;
                a.q = q.data();
                a.out = out.data();
                a.q_strides = a.out_strides = {heads * queries * shape.head_dim,
                                               queries * shape.head_dim, shape.head_dim};
                held.batch.attend(a, workspace, *threads);
                const std::vector<Row> rows = all_rows(held.batch);
                const std::size_t count = 180 - held.batch.first();
                double worst = 0;
                for (std::size_t at = 0; at < q.size(); at += shape.head_dim) {
                    const std::size_t s = at / a.q_strides.sequence,
                                      head = at / a.q_strides.head % heads,
                                      query = at / shape.head_dim % queries;
                    const std::size_t own = 180 - queries + query;
                    std::vector<double> want(shape.head_dim);
                    double sum = kind == 5 ? std::exp(double{sinks[head]}) : 0;
                    for (std::size_t t = first; t < 180; ++t) {
                        double added = 0;
                        if (kind >= 3)
                            added = mask[(s * queries + query) * cells + t - a.first_token];
                        else if (a.causal && (t > own || (a.window && own - t >= a.window)))
                            continue;
                        const Row* row = &rows[2 * (s * count + t - held.batch.first())];
                        const float* key = row[0].data() + head / 2 * shape.head_dim;
                        const float* value = row[1].data() + head / 2 * shape.head_dim;
                        double score = 0;
                        for (std::size_t c = 0; c < shape.head_dim; ++c)
                            score += double{q[at + c]} * key[c];
                        const double weight = std::exp(0.2 * score + added);
                        sum += weight;
                        for (std::size_t c = 0; c < shape.head_dim; ++c)
                            want[c] += weight * value[c];
                    }
                    for (std::size_t c = 0; c < shape.head_dim; ++c)
                        worst = std::max(worst, std::fabs(out[at + c] - want[c] / sum));
                }
                INFO(scheme, " rows ", static_cast<int>(type), " kind ", kind);
                CHECK(worst < 0.03);  // of values up to 8; the decoded rows are rounded, too
            }
        }
    }
}

TEST_CASE("forks in two threads do not disturb each other") {
    Held held("kivi2,window=20,sinks=4", RowType::bf16, 2);
    fill(held.batch, 1, 60);
    const auto work = [&](Batch& batch, unsigned seed) {
        AttentionWorkspace workspace;
        std::vector<float> q(2 * shape.channels(), 0.1f), out(q.size());
        for (unsigned i = 0; i < 60; ++i) {
            batch.begin();
            fill(batch, seed + i, 3);
            BatchAttention a;
            a.queries = 1;
            a.heads = shape.kv_heads;
            a.q = q.data();
            a.out = out.data();
            a.q_strides = a.out_strides = {shape.channels(), shape.head_dim, shape.head_dim};
            batch.attend(a, workspace);
            batch.settle();
            if (i % 7 == 3)
                batch.rollback();
            else
                batch.commit();
            if (i % 10 == 9) batch.truncate(batch.tokens() - 20);
            Batch copy = batch.fork();
            const std::uint32_t rows[] = {i % 2, 1 - i % 2};
            copy.select(rows);
            batch = std::move(copy);
        }
    };
    Batch fork = held.batch.fork(), alone = held.batch.fork(), reference = held.batch.fork();
    work(alone, 100);
    work(reference, 500);
    std::thread other([&] { work(fork, 500); });
    work(held.batch, 100);
    other.join();
    CHECK(held.batch.save() == alone.save());
    CHECK(fork.save() == reference.save());
}

TEST_CASE("a step of a sequence that is rolled back has not been") {
    for (const RowType type : types) {
        for (unsigned seed = 0; seed < 40; ++seed) {
            const auto store = std::make_shared<Store>();
            const auto plan = batch_test::make_plan("kivi2,window=20,sinks=4", {1, 32}, type);
            Sequence sequence(store, plan, {.window = 20, .sinks = 4});
            cache_test::Rng rng(seed);
            const auto below = [&](std::uint32_t n) {
                return static_cast<std::uint32_t>(rng() % n);
            };
            const auto change = [&] {
                const std::uint32_t dice = below(7), size = sequence.size();
                const std::uint32_t b = below(sequence.blocks() + 1);
                if (dice <= 1) cache_test::append(sequence, rng, 1 + below(70));
                if (dice == 2) sequence.settle();
                if (dice == 3) sequence.pack(std::span(&b, 1));
                if (dice == 4 && size > 0) sequence.truncate(size - below(std::min(size, 50u)));
                if (dice == 5) sequence.drop(std::span(&b, 1));
                if (dice == 6) {
                    const std::uint32_t cell = below(size + 40);
                    const auto row = cache_test::random_rows(rng, 1, 32);
                    sequence.write_keys(std::span(&cell, 1), row.data(), 32);
                    sequence.write_values(std::span(&cell, 1), row.data(), 32);
                }
            };
            for (int i = 0; i < 6; ++i) change();
            std::optional<Sequence> fork;  // with shared blocks, and without
            if (seed % 2 == 0) fork = sequence.fork();
            for (int round = 0; round < 6; ++round) {
                const auto image = save_sequence(sequence);
                const StoreStats before = store->stats();
                sequence.begin();
                for (int i = 0; i < 8; ++i) change();
                if (round % 3 == 2) {
                    sequence.commit();
                    continue;
                }
                sequence.rollback();
                INFO("seed ", seed, " round ", round);
                CHECK(save_sequence(sequence) == image);
                CHECK(store->stats().exact_bytes == before.exact_bytes);
                CHECK(store->stats().packed_bytes == before.packed_bytes);
            }
        }
    }
}
