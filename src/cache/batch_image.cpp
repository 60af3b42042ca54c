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

[[noreturn]] void refuse(ErrorCode code, const std::string& what) {
    throw Error(code, (code == loading ? "image: " : "save: ") + what);
}

std::string range_text(std::uint32_t first, std::uint64_t end) {
    return "tokens [" + std::to_string(first) + ", " + std::to_string(end) + ")";
}

// Sequences and their lists of blocks, which dropped tokens make longer, may take so much memory as
// the image has bytes, and 1 MiB.
void check_lists(const ImageHeader& header, const ImageLayout& layout, const Plan& plan,
                 ErrorCode code) {
    const std::uint64_t bytes =
        header.batch *
        (sizeof(Sequence) +
         ceil_div<std::uint64_t>(header.tokens, plan.block_tokens()) * sizeof(cache::Block*));
    if (bytes > layout.bytes + (1 << 20))
        refuse(code, "its sequences take " + std::to_string(bytes) +
                         " bytes without a row, and its rows only " + std::to_string(layout.bytes));
}

// The tokens of an image: unquantized sinks, packed ones, unquantized ones.
struct Order {
    std::uint32_t tokens, first, packed_first, packed_end;
};

// Checks that the spans are what a sequence has that was appended to and packed in order.
Order order_of(const ImageHeader& header, const Sequence& sequence, ErrorCode code) {
    const std::uint32_t tokens = sequence.plan().block_tokens();
    const std::uint32_t sinks = whole_sinks(sequence.retention(), tokens).sinks;
    if (header.tokens >= Sequence::max_cells)
        refuse(code, std::to_string(header.tokens) + " tokens are too many");
    const std::uint32_t first = header.spans.empty() ? header.tokens : header.spans.front().first;
    // What was cut off before the first token is no whole block.
    const std::uint32_t unpacked = first < sinks ? sinks : round_up(first, tokens);
    Order order{header.tokens, first, unpacked, unpacked};
    for (const ImageSpan& span : header.spans) {
        if (!span.packed) continue;
        if (order.packed_first < order.packed_end)
            refuse(code, "more than one range of packed tokens");
        order.packed_first = span.first;
        order.packed_end = span.first + span.tokens;
        // Exact tokens before packed ones are sinks, all of them up to the last.
        if (span.first != std::max(first, sinks) || (span.first - sinks) % tokens != 0)
            refuse(code, "packed " + range_text(span.first, order.packed_end) +
                             ", but its scheme has " + std::to_string(sequence.retention().sinks) +
                             " sinks and blocks of " + std::to_string(tokens));
    }
    return order;
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
        refuse(loading, "query energies of kind " + std::to_string(record.kind) + ", " +
                            std::to_string(record.zero) + "; legal: 0 to 2, 0");
    QueryState state{record.tokens, record.heads, record.kind == 2, {}};
    if (record.kind == 0) return state;
    state.values.resize(channels);
    std::memcpy(state.values.data(), at + sizeof record, channels * sizeof(float));
    return state;
}

}  // namespace

// Inside of a sequence.
struct SequenceImage {
    // Tokens [first, end); no packed block begins before and ends behind `first`.
    static std::vector<ImageSpan> spans(const Sequence& sequence, std::uint32_t first,
                                        std::uint32_t end) {
        const std::uint32_t tokens = sequence.plan_->block_tokens();
        std::vector<ImageSpan> spans;
        for (std::uint32_t cell = first, count = 0; cell < end; cell += count) {
            const cache::Block* block = sequence.blocks_[cell / tokens];
            const bool packed = block != nullptr && block->packed;
            count = packed ? tokens : std::min(tokens - cell % tokens, end - cell);
            const auto wanted = cache::cell_range(cell % tokens, count);
            if (block == nullptr || (block->keys & block->values & wanted) != wanted)
                refuse(saving,
                       range_text(cell, cell + count) +
                           " have not all keys and values: save a sequence between steps, whose "
                           "tokens were appended in order");
            if (packed && block->finer != nullptr)
                refuse(saving, range_text(cell, cell + count) + " are packed by a finer plan");
            if (spans.empty() || spans.back().packed != packed) spans.push_back({cell, 0, packed});
            spans.back().tokens += count;
        }
        return spans;
    }

    static std::vector<std::byte> save(std::span<const Sequence> sequences, std::uint32_t first,
                                       std::uint32_t last) {
        const Sequence& one = sequences.front();
        const Plan& plan = one.plan();
        ImageHeader header{image_identity(plan, one.retention()),
                           static_cast<std::uint32_t>(sequences.size()), last,
                           spans(one, first, last), false};
        for (const Sequence& sequence : sequences)
            if (spans(sequence, first, last) != header.spans)
                refuse(saving, "its sequences have packed different tokens");
        // A range that ends at 0 has no history, as after a truncation to 0.
        if (plan.wants_queries() && (last > 0 || one.size() == 0))
            header.queries = std::ranges::any_of(sequences, [](const Sequence& sequence) {
                return !sequence.queries_.state().values.empty();
            });
        const ImageLayout layout = lay_out(header);
        // A range that begins inside of a block is the reader's to refuse.
        if (first == 0) order_of(header, one, saving);
        check_lists(header, layout, plan, saving);
        std::vector<std::byte> image(layout.bytes);
        for (std::size_t i = 0; i < header.spans.size(); ++i)
            save(sequences, header.spans[i], layout.parts[i], image.data());
        const std::size_t channels = plan.shape().channels();
        for (std::size_t s = 0; header.queries && s < sequences.size(); ++s)
            write_queries(sequences[s].queries_.state(),
                          image.data() + layout.queries + s * record_bytes(channels));
        one.device().finish();
        seal_image(header, image);
        return image;
    }

    static void save(std::span<const Sequence> sequences, const ImageSpan& span,
                     const ImagePart& part, std::byte* image) {
        const Plan& plan = sequences.front().plan();
        const Shape& shape = plan.shape();
        if (span.packed) {
            const std::uint32_t tokens = plan.block_tokens(), end = span.first + span.tokens;
            std::byte* at = image + part.begin;
            for (const Sequence& sequence : sequences)
                for (std::uint32_t b = span.first / tokens; b < end / tokens; ++b) {
                    sequence.device().copy_out(at, sequence.blocks_[b]->data, plan.packed_bytes());
                    at += plan.packed_bytes();
                }
            return;
        }
        const std::size_t channels = shape.channels();
        const BatchStrides strides{span.tokens * channels, shape.head_dim, channels};
        const BatchRowsOut values{image + part.values, strides};
        Sequence::read(sequences, span.first, span.tokens, {image + part.begin, strides},
                       shape.latent() ? BatchRowsOut{} : values, serial_executor());
        if (!plan.has_positions()) return;
        std::byte* at = image + part.positions;
        for (const Sequence& sequence : sequences)
            for (std::uint32_t t = 0; t < span.tokens; ++t) {
                const std::int32_t position = sequence.position(span.first + t);
                std::memcpy(at, &position, sizeof position);
                at += sizeof position;
            }
    }

    // `empty`: what the sequences are to be like.
    static std::pair<std::vector<Sequence>, Order> load(std::span<const std::byte> image,
                                                        const Sequence& empty) {
        const Plan& plan = empty.plan();
        const ImageHeader header = read_image(image);
        check_image(header, image_identity(plan, empty.retention()));
        const ImageLayout layout = lay_out(header);
        const Order order = order_of(header, empty, loading);
        check_lists(header, layout, plan, loading);
        if (header.queries && !plan.wants_queries())
            refuse(loading, "it has query energies, and its scheme weighs no keys by them");
        const std::uint32_t tokens = plan.block_tokens();
        std::size_t bytes = 0;  // of all blocks, so that what is over budget is refused at once
        for (const auto& [first, count, packed] : header.spans)
            bytes += (ceil_div(first + count, tokens) - first / tokens) * header.batch *
                     (packed ? plan.packed_bytes() : plan.exact_bytes());
        {
            Store::Impl& store = empty.store_->impl();
            const std::scoped_lock lock(store.mutex);
            store.check_budget(bytes, 0);
        }
        const std::size_t channels = plan.shape().channels();
        std::vector<Sequence> sequences;
        sequences.reserve(header.batch);
        for (std::size_t s = 0; s < header.batch; ++s) {
            Sequence& sequence = sequences.emplace_back(empty.fork());
            sequence.blocks_.reserve(ceil_div(header.tokens, tokens));
            sequence.blocks_.resize(ceil_div(order.first, tokens));
            sequence.size_ = order.first;
            for (std::size_t i = 0; i < header.spans.size(); ++i)
                load(sequence, header.spans[i], layout.parts[i], image.data(), s);
            sequence.truncate(header.tokens);  // may cut the last packed block
            if (header.queries)
                sequence.queries_.restore(read_queries(
                    image.data() + layout.queries + s * record_bytes(channels), channels));
        }
        return {std::move(sequences), order};
    }

    // What sequence number `number` of the image has in a span.
    static void load(Sequence& sequence, const ImageSpan& span, const ImagePart& part,
                     const std::byte* image, std::size_t number) {
        const Plan& plan = sequence.plan();
        const Shape& shape = plan.shape();
        if (span.packed) {
            const std::uint32_t tokens = plan.block_tokens(), count = span.tokens / tokens;
            std::vector<std::uint32_t> blocks;
            std::vector<const std::byte*> bytes;
            for (std::uint32_t b = 0; b < count; ++b) {
                blocks.push_back(span.first / tokens + b);
                bytes.push_back(image + part.begin + (number * count + b) * plan.packed_bytes());
            }
            return sequence.put_packed(blocks, bytes);
        }
        const std::size_t before = number * span.tokens;
        const std::size_t at = before * shape.channels() * element_bytes(plan.rows());
        const auto rows = [&](std::size_t begin) {
            return Rows{image + begin + at, plan.rows(), shape.head_dim, shape.channels()};
        };
        std::vector<std::int32_t> positions(plan.has_positions() ? span.tokens : 0);
        if (!positions.empty())
            std::memcpy(positions.data(), image + part.positions + before * sizeof positions[0],
                        positions.size() * sizeof positions[0]);
        sequence.append(rows(part.begin), rows(part.values), span.tokens, positions);
    }
};

std::vector<std::byte> save_sequence(const Sequence& sequence) {
    return SequenceImage::save(std::span(&sequence, 1), 0, sequence.size());
}

Sequence load_sequence(std::span<const std::byte> image, const std::shared_ptr<Store>& store,
                       const std::shared_ptr<const Plan>& plan, const Retention& retention) {
    auto [sequences, order] = SequenceImage::load(image, Sequence(store, plan, retention));
    if (sequences.size() != 1 || order.first != 0)
        refuse(loading, "a batch of " + std::to_string(sequences.size()) + " from token " +
                            std::to_string(order.first) + " on; a Sequence is one from token 0 on");
    return std::move(sequences.front());
}

std::vector<std::byte> Batch::save(std::uint32_t first, std::uint32_t last) const {
    if (std::ranges::any_of(state_.padding, [](const auto& ranges) { return !ranges.empty(); }))
        refuse(saving, "its padding can't be saved; compute the prompts without padding");
    if (first < state_.first || first > last || last > state_.tokens)
        refuse(saving, range_text(first, last) + " of a batch that holds " +
                           range_text(state_.first, state_.tokens));
    for (const std::uint32_t end : {first, last})
        if (end > state_.packed_first && end < state_.packed_end &&
            (end - state_.packed_first) % plan().block_tokens() != 0)
            refuse(saving, "token " + std::to_string(end) + " is inside of a packed block of " +
                               std::to_string(plan().block_tokens()));
    return SequenceImage::save(sequences_, first, last);
}

Batch Batch::load(std::span<const std::byte> image, const std::shared_ptr<Store>& store,
                  const std::shared_ptr<const Plan>& plan, const Retention& retention) {
    Batch batch(store, plan, retention, 1);
    auto [sequences, order] = SequenceImage::load(image, batch.sequences_.front());
    if (order.packed_first < order.packed_end && order.packed_end > order.tokens)
        refuse(loading, "its rows end at " + std::to_string(order.packed_end) + ", its tokens at " +
                            std::to_string(order.tokens));
    batch.state_ = {order.tokens, order.first, order.packed_first, order.packed_end, {}};
    batch.sequences_ = std::move(sequences);
    return batch;
}

}  // namespace lowkv
