// Images of a layer (lowkv/serial.h), as a Batch and a Sequence take them back.

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "common/target.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/serial.h"

namespace lowkv::fuzz {
namespace {

struct Reader {
    std::shared_ptr<const Plan> plan;
    Retention retention;
};

// Every preset, and layers of other kinds.
const std::vector<Reader>& readers() {
    static const auto& all = *[] {
        auto* made = new std::vector<Reader>;
        const auto add = [&](Plan plan) {
            auto shared = std::make_shared<const Plan>(std::move(plan));
            // Without sinks, a first block is packed by the queries that an image brings.
            const Retention retention{.window = 8, .sinks = shared->wants_queries() ? 0u : 4u};
            made->push_back({shared, batch_retention(*shared, retention)});
        };
        const Rope rope{.frequencies = std::vector<float>(32, 0.5f)};
        for (const Preset& preset : presets())
            add(neutral_plan(preset.scheme.base, {1, 64}, &rope));
        const LayerScheme scheme = parse_scheme("lowkv2.8").base;
        add(Plan(scheme, {1, 64}, {}, 3, {.rows = RowType::f32}));
        add(Plan(scheme, {2, 64}, {}, 0, {.rows = RowType::bf16}));
        add(Plan(scheme, {1, 64, 32}));
        return made;
    }();
    return all;
}

void append(Batch& batch, std::uint32_t tokens, unsigned seed) {
    const Shape& shape = batch.plan().shape();
    const std::size_t row = shape.channels(), all = batch.size() * tokens * row;
    const std::vector<float> keys = numbers(all, seed), values = numbers(all, seed + 1);
    const BatchStrides strides{tokens * row, shape.head_dim, row};
    batch.append({keys.data(), RowType::f32, strides}, {values.data(), RowType::f32, strides},
                 tokens);
}

// Some codecs weigh channels by them.
void add_queries(Batch& batch) {
    const Shape& shape = batch.plan().shape();
    constexpr std::uint32_t queries = 20;
    const std::size_t row = shape.channels();
    const std::vector<float> q = numbers(batch.size() * queries * row, 6);
    batch.update_query_stats(q.data(), {queries * row, queries * shape.head_dim, shape.head_dim},
                             queries, shape.kv_heads);
}

struct Attended {
    std::vector<float> out;

    explicit Attended(const Batch& batch) {
        const Shape& shape = batch.plan().shape();
        const std::vector<float> q = numbers(batch.size() * shape.channels(), 3);
        out.resize(q.size());
        BatchAttention its;
        its.io.q = q.data();
        its.io.out = out.data();
        its.io.q_head_stride = its.io.out_head_stride = shape.head_dim;
        its.io.q_token_stride = its.io.out_token_stride = shape.channels();
        its.q_sequence_stride = its.out_sequence_stride = shape.channels();
        its.io.tokens = 1;
        its.io.heads = shape.kv_heads;
        its.params.scale = 0.125f;
        AttentionWorkspace workspace;
        batch.attend(its, workspace);
    }
};

// What the packed blocks of an image take, and blocks of rows: each has one of its rows.
std::size_t most_bytes(const ImageHeader& header, const Plan& plan) {
    std::size_t bytes = 0;
    for (const ImageSpan& span : header.spans)
        bytes += span.packed ? span.tokens / plan.block_tokens() * plan.packed_bytes() +
                                   plan.exact_bytes()  // the last one may be cut, and is decoded
                             : (span.tokens / plan.block_tokens() + 2) * plan.exact_bytes();
    return header.batch * bytes;
}

std::optional<Batch> loaded(const Reader& reader, std::span<const std::byte> image) {
    const auto store = std::make_shared<Store>();
    try {
        Batch batch = Batch::load(image, store, reader.plan, reader.retention);
        require(store->stats().peak_bytes <= most_bytes(read_image(image), *reader.plan),
                "an image takes more memory than its rows need");
        return batch;
    } catch (const Error& error) {
        require(error.code() == ErrorCode::invalid_image, error.what());
        return std::nullopt;
    }
}

// What is loaded can be saved, and that is loaded as the same. Neighbouring spans become one, and
// what the header leaves open takes one form: from then on bytes are equal.
void require_round_trip(const Reader& reader, const Batch& batch,
                        std::span<const std::byte> image) {
    const Bytes saved = batch.save();
    const std::optional<Batch> again = loaded(reader, saved);
    require(again.has_value(), "what was loaded and saved is refused");
    require(again->save() == saved, "an image changes when it is loaded and saved again");
    const ImageHeader header = read_image(image);
    require(std::ranges::equal(Attended(batch).out, Attended(*again).out,
                               [](float a, float b) { return a == b || (a != a && b != b); }),
            "attention differs once an image was loaded and saved");
    if (read_image(saved) != header) return;
    // Rows may have lost infinite numbers; codes are the same.
    const ImageLayout layout = lay_out(header);
    for (std::size_t i = 0; i < header.spans.size(); ++i) {
        const ImagePart& part = layout.parts[i];
        const std::size_t bytes = header.spans[i].packed ? part.end - part.begin : 0;
        require(std::ranges::equal(image.subspan(part.begin, bytes),
                                   std::span(saved).subspan(part.begin, bytes)),
                "codes are others once an image was loaded and saved");
    }
}

// It goes on as any sequence does.
void use(Batch batch) {
    try {
        Batch fork = batch.fork();
        append(batch, 3, 1);
        add_queries(batch);
        batch.pack();
        append(batch, 150, 2);
        batch.pack();
        Attended{batch};
        fork.truncate(fork.first() + (fork.tokens() - fork.first()) / 2);
        append(fork, 5, 4);
        fork.drop_before(fork.tokens() / 2);
        Attended{fork};
        static_cast<void>(fork.save());
    } catch (const Error& error) {
        // Of a batch that is about as long as one may be.
        require(batch.tokens() > Blocks::max_cells - 100, error.what());
    }
}

}  // namespace

std::vector<Bytes> seeds() {
    std::vector<Bytes> all;
    for (unsigned number = 0; number < readers().size(); ++number) {
        const Reader& reader = readers()[number];
        for (const std::uint32_t tokens : {0u, 9u, 300u}) {
            Batch batch(std::make_shared<Store>(), reader.plan, reader.retention,
                        tokens == 9 ? 2 : 1);
            if (tokens > 0) append(batch, tokens, tokens);
            add_queries(batch);
            batch.pack();
            all.push_back(seed({number, 1}, batch.save()));
            if (tokens < 300) continue;
            batch.drop_before(2 * reader.plan->block_tokens());
            all.push_back(seed({number, 1}, batch.save()));
        }
    }
    return all;
}

void try_bytes(std::span<const std::byte> bytes) {
    Input input(bytes);
    const Reader& reader = readers()[input.below(readers().size())];
    const unsigned how = input.byte();
    Bytes image = input.rest();
    if ((how & 1) != 0) seal_images(image);
    if (const std::optional<Batch> batch = loaded(reader, image)) {
        require_round_trip(reader, *batch, image);
        if (batch->size() < 9) use(batch->fork());
    }
    try {
        const auto store = std::make_shared<Store>();
        const auto load = [&](std::span<const std::byte> its) {
            return load_sequence(its, store, reader.plan, reader.retention);
        };
        const Bytes saved = save_sequence(load(image));
        require(save_sequence(load(saved)) == saved,
                "a sequence changes when it is loaded and saved again");
    } catch (const Error& error) {
        require(error.code() == ErrorCode::invalid_image, error.what());
    }
}

}  // namespace lowkv::fuzz
