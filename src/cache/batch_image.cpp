// Sequences and batches to images and back.

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cache/block.h"
#include "cache/store.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "lowkv/serial.h"
#include "round.h"

namespace lowkv {
namespace {

constexpr ErrorCode saving = ErrorCode::invalid_argument, loading = ErrorCode::invalid_image;

template <class... Parts>
[[noreturn]] void refuse(ErrorCode code, const Parts&... what) {
    throw Error(code, code == loading ? "image: " : "save: ", what...);
}

std::string range_text(std::uint32_t first, std::uint64_t end) {
    return concat("tokens [", first, ", ", end, ")");
}

// Sequences and their lists of blocks, which dropped tokens make longer, may take so much memory as
// the image has bytes, and 1 MiB.
void check_lists(const ImageHeader& header, const ImageLayout& layout, const Plan& plan,
                 ErrorCode code) {
    const std::uint64_t bytes =
        header.batch *
        (sizeof(Blocks) + sizeof(QueryEnergy) +
         ceil_div<std::uint64_t>(header.tokens, plan.block_tokens()) * sizeof(cache::Block*));
    if (bytes > layout.bytes + (1 << 20))
        refuse(code, "its sequences take ", bytes, " bytes without a row, and its rows only ",
               layout.bytes);
}

std::size_t record_bytes(std::size_t channels) {
    return sizeof(QueryRecord) + channels * sizeof(float);
}

void write_queries(const QueryState& state, std::byte* at) {
    if (state.values.empty()) return;  // zeros
    const QueryRecord record{state.tokens, state.heads, state.kept ? 2u : 1u, 0};
    std::memcpy(at, &record, sizeof record);
    std::memcpy(at + sizeof record, state.values.data(), state.values.size() * sizeof(float));
}

QueryState read_queries(const std::byte* at, std::size_t channels) {
    QueryRecord record;
    std::memcpy(&record, at, sizeof record);
    if (record.kind > 2 || record.zero != 0)
        refuse(loading, "query energies of kind ", record.kind, ", ", record.zero,
               "; legal: 0 to 2, 0");
    QueryState state{record.tokens, record.heads, record.kind == 2, {}};
    if (record.kind == 0) return state;
    state.values.resize(channels);
    std::memcpy(state.values.data(), at + sizeof record, channels * sizeof(float));
    return state;
}

// Tokens [first, end); no packed block begins before and ends behind `first`.
std::vector<ImageSpan> spans_of(const Blocks& sequence, std::uint32_t first, std::uint32_t end) {
    const std::uint32_t tokens = sequence.plan().block_tokens();
    std::vector<ImageSpan> spans;
    for (std::uint32_t cell = first, count = 0; cell < end; cell += count) {
        const std::uint8_t rung = sequence.rung(cell / tokens);
        count = rung > 0 ? tokens : std::min(tokens - cell % tokens, end - cell);
        if (rung > 0 && rung < sequence.ladder().size())
            refuse(saving, range_text(cell, cell + count), " are packed by another rung");
        if (spans.empty() || spans.back().packed != (rung > 0))
            spans.push_back({cell, 0, rung > 0});
        spans.back().tokens += count;
    }
    return spans;
}

void save_span(std::span<const Blocks> sequences, const ImageSpan& span, const ImagePart& part,
               std::byte* image) {
    const Plan& plan = sequences.front().plan();
    const Shape& shape = plan.shape();
    if (span.packed) {
        const std::uint32_t tokens = plan.block_tokens(), end = span.first + span.tokens;
        std::byte* at = image + part.begin;
        for (const Blocks& sequence : sequences)
            for (std::uint32_t b = span.first / tokens; b < end / tokens; ++b) {
                sequence.device().copy_out(at, sequence.view(b).keys, plan.packed_bytes());
                at += plan.packed_bytes();
            }
        return;
    }
    const std::size_t channels = shape.channels();
    const BatchStrides strides{span.tokens * channels, shape.head_dim, channels};
    const BatchRowsOut values{image + part.values, strides};
    Blocks::read(sequences, span.first, span.tokens, {image + part.begin, strides},
                 shape.latent() ? BatchRowsOut{} : values, serial_executor());
    if (!plan.has_positions()) return;
    std::byte* at = image + part.positions;
    for (const Blocks& sequence : sequences)
        for (std::uint32_t t = 0; t < span.tokens; ++t) {
            const std::int32_t position = sequence.position(span.first + t);
            std::memcpy(at, &position, sizeof position);
            at += sizeof position;
        }
}

}  // namespace

// Of a batch before it takes the image's rows. Checks that the spans are what a sequence has that
// was appended to and packed in order.
Batch::State Batch::order_of(const ImageHeader& header) const {
    const std::uint32_t tokens = plan().block_tokens();
    const std::uint32_t sinks = whole_sinks(retention_, tokens).sinks;
    if (header.tokens >= Blocks::max_cells) refuse(loading, header.tokens, " tokens are too many");
    const std::uint32_t first = header.spans.empty() ? header.tokens : header.spans.front().first;
    // What was cut off before the first token is no whole block, and stays unquantized, as sinks
    // do.
    const std::uint32_t unpacked = first < sinks ? sinks : round_up(first, tokens);
    State order{first, first, unpacked, unpacked, 0, {}, {}};
    for (const ImageSpan& span : header.spans) {
        if (!span.packed) continue;
        if (order.packed_first < order.packed_end)
            refuse(loading, "more than one range of packed tokens");
        order.packed_end = span.first + span.tokens;
        if (span.first != unpacked)
            refuse(loading, "packed ", range_text(span.first, order.packed_end),
                   ", but its scheme has ", retention_.sinks, " sinks and blocks of ", tokens);
    }
    return order;
}

std::vector<std::byte> Batch::save(std::uint32_t first, std::uint32_t last) const {
    if (std::ranges::any_of(state_.padding, [](const auto& ranges) { return !ranges.empty(); }))
        refuse(saving, "its padding can't be saved; compute the prompts without padding");
    if (first < state_.first || first > last || last > state_.tokens)
        refuse(saving, range_text(first, last), " of a batch that holds ",
               range_text(state_.first, state_.tokens));
    for (const std::uint32_t end : {first, last})
        if (end > state_.packed_first && end < state_.packed_end &&
            (end - state_.packed_first) % plan().block_tokens() != 0)
            refuse(saving, "token ", end, " is inside of a packed block of ",
                   plan().block_tokens());
    ImageHeader header{image_identity(plan(), retention()), size(), last,
                       spans_of(sequences_.front(), first, last), false};
    for (const Blocks& sequence : sequences_)
        if (spans_of(sequence, first, last) != header.spans)
            refuse(saving, "its sequences have packed different tokens");
    // A range that ends at 0 has no history, as after a truncation to 0.
    if (plan().wants_queries() && (last > 0 || tokens() == 0))
        header.queries = std::ranges::any_of(state_.queries, [](const QueryEnergy& queries) {
            return !queries.state().values.empty();
        });
    const ImageLayout layout = lay_out(header);
    check_lists(header, layout, plan(), saving);
    std::vector<std::byte> image(layout.bytes);
    for (std::size_t i = 0; i < header.spans.size(); ++i)
        save_span(sequences_, header.spans[i], layout.parts[i], image.data());
    const std::size_t channels = plan().shape().channels();
    for (std::size_t s = 0; header.queries && s < size(); ++s)
        write_queries(state_.queries[s].state(),
                      image.data() + layout.queries + s * record_bytes(channels));
    device().finish();
    seal_image(header, image);
    return image;
}

Batch Batch::load(std::span<const std::byte> image, const std::shared_ptr<Store>& store,
                  const std::shared_ptr<const Plan>& plan, const Retention& retention) {
    const Batch like(store, plan, retention, 1);
    return like.load(image, true);
}

// One like this, which is empty. `several`: it may be more than a Sequence.
Batch Batch::load(std::span<const std::byte> image, bool several) const {
    const ImageHeader header = read_image(image);
    check_image(header, image_identity(plan(), retention_));
    const ImageLayout layout = lay_out(header);
    State order = order_of(header);
    if (!several && (header.batch != 1 || order.first != 0))
        refuse(loading, "a batch of ", header.batch, " from token ", order.first,
               " on; a Sequence is one from token 0 on");
    if (several && order.packed_end > std::max(header.tokens, order.packed_first))
        refuse(loading, "its rows end at ", order.packed_end, ", its tokens at ", header.tokens);
    check_lists(header, layout, plan(), loading);
    if (header.queries && !plan().wants_queries())
        refuse(loading, "it has query energies, and its scheme weighs no keys by them");
    const std::uint32_t tokens = plan().block_tokens();
    std::size_t bytes = 0;  // of all blocks, so that what is over budget is refused at once
    for (const auto& [first, count, packed] : header.spans)
        bytes += (ceil_div(first + count, tokens) - first / tokens) * header.batch *
                 (packed ? plan().packed_bytes() : plan().exact_bytes());
    {
        Store::Impl& impl = sequences_.front().store().impl();
        const std::scoped_lock lock(impl.mutex);
        impl.check_budget(bytes, 0);
    }
    Batch batch(*this);
    batch.sequences_.reserve(header.batch);
    while (batch.size() < header.batch) batch.sequences_.push_back(sequences_.front().fork());
    batch.state_ = std::move(order);
    batch.state_.queries.resize(header.batch);
    for (std::size_t i = 0; i < header.spans.size(); ++i)
        batch.load_span(header.spans[i], layout.parts[i], image.data());
    batch.truncate(header.tokens);  // may cut the last packed block
    const std::size_t channels = plan().shape().channels();
    for (std::size_t s = 0; header.queries && s < header.batch; ++s)
        batch.state_.queries[s].restore(
            read_queries(image.data() + layout.queries + s * record_bytes(channels), channels));
    return batch;
}

// What the image has in a span, behind the tokens that there are.
void Batch::load_span(const ImageSpan& span, const ImagePart& part, const std::byte* image) {
    const Shape& shape = plan().shape();
    if (span.packed) {
        const std::uint32_t tokens = plan().block_tokens(), count = span.tokens / tokens;
        const std::byte* at = image + part.begin;
        for (Blocks& sequence : sequences_) {
            std::vector<std::uint32_t> slots;
            std::vector<const std::byte*> bytes;
            for (std::uint32_t b = 0; b < count; ++b, at += plan().packed_bytes()) {
                slots.push_back(span.first / tokens + b);
                bytes.push_back(at);
            }
            sequence.put(slots, bytes, last_rung());
        }
        state_.tokens += span.tokens;
        return;
    }
    const BatchStrides strides{span.tokens * shape.channels(), shape.head_dim, shape.channels()};
    std::vector<std::int32_t> positions(plan().has_positions() ? size() * span.tokens : 0);
    if (!positions.empty())
        std::memcpy(positions.data(), image + part.positions,
                    positions.size() * sizeof positions[0]);
    append({image + part.begin, plan().rows(), strides},
           {image + part.values, plan().rows(), strides}, span.tokens, positions);
}

std::vector<std::byte> save_sequence(const Sequence& sequence) { return sequence.batch_.save(); }

Sequence load_sequence(std::span<const std::byte> image, const std::shared_ptr<Store>& store,
                       const std::shared_ptr<const Plan>& plan, const Retention& retention) {
    return Sequence(Sequence(store, plan, retention).batch_.load(image, false));
}

}  // namespace lowkv
