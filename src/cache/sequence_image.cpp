// Sequences to an image and back.

#include "cache/sequence_image.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cache/block.h"
#include "cache/encode.h"
#include "cache/store.h"
#include "lowkv/error.h"
#include "round.h"

namespace lowkv {
namespace {

[[noreturn]] void refuse_saving(const std::string& what) {
    throw Error(ErrorCode::invalid_argument, "save: " + what);
}

[[noreturn]] void refuse_image(const std::string& what) {
    throw Error(ErrorCode::invalid_image, "image: " + what);
}

// Consecutive exact cells of one block, and where in an image their rows are, in elements, and
// their positions, in bytes.
struct ExactRun {
    std::uint32_t cell, count;
    std::size_t keys, values, positions;
};

// Calls packed(block, where in the image) and exact(run) for what sequence number `number` has.
template <class Packed, class Exact>
void each_place(const ImageHeader& header, const ImageLayout& layout, std::uint32_t block_tokens,
                std::size_t number, Packed packed, Exact exact) {
    const ImageIdentity& identity = header.identity;
    const std::size_t element = element_bytes(identity.rows), row = identity.shape.channels();
    for (std::size_t i = 0; i < header.spans.size(); ++i) {
        const ImageSpan& span = header.spans[i];
        const ImagePart& part = layout.parts[i];
        if (span.packed) {
            const std::uint32_t first = span.first / block_tokens;
            const std::uint32_t blocks = span.tokens / block_tokens;
            for (std::uint32_t b = 0; b < blocks; ++b)
                packed(first + b, part.begin + (number * blocks + b) * identity.packed_bytes);
            continue;
        }
        for (std::uint32_t t = 0; t < span.tokens;) {
            const std::uint32_t cell = span.first + t;
            const std::uint32_t count =
                std::min(span.tokens - t, block_tokens - cell % block_tokens);
            const std::size_t at = number * span.tokens + t;
            exact(ExactRun{cell, count, part.begin / element + at * row,
                           part.values / element + at * row,
                           part.positions + at * sizeof(std::int32_t)});
            t += count;
        }
    }
}

// What sequences and their lists of blocks may take beside the image's own size.
constexpr std::size_t free_list_bytes = std::size_t{1} << 20;

// Empty if the rows stand behind the sequences and their lists of blocks, else what is wrong.
std::string list_error(const ImageHeader& header, const ImageLayout& layout, const Plan& plan) {
    const std::uint64_t blocks =
        ceil_div<std::uint64_t>(std::uint64_t{header.tokens}, plan.block_tokens());
    const std::uint64_t bytes = header.batch * (sizeof(Sequence) + blocks * sizeof(cache::Block*));
    if (bytes <= layout.bytes + free_list_bytes) return {};
    return std::to_string(header.batch) + " sequences of " + std::to_string(header.tokens) +
           " cells take " + std::to_string(bytes) + " bytes without a row, and its rows only " +
           std::to_string(layout.bytes) + "; legal: at most " + std::to_string(free_list_bytes) +
           " more than it has itself";
}

}  // namespace

// Inside of a sequence.
struct SequenceImage::Access {
    // Cells [first, end) that are packed, or exact, as an image numbers them.
    static std::vector<ImageSpan> spans(const Sequence& sequence, std::uint32_t first,
                                        std::uint32_t end) {
        const std::uint32_t tokens = sequence.plan_->block_tokens();
        std::vector<ImageSpan> spans;
        const auto add = [&](std::uint32_t cell, std::uint32_t count, bool packed) {
            if (spans.empty() || spans.back().packed != packed ||
                spans.back().first + spans.back().tokens != cell)
                spans.push_back({cell, 0, packed});
            spans.back().tokens += count;
        };
        for (std::uint32_t b = first / tokens; b < sequence.blocks() && b * tokens < end; ++b) {
            const cache::Block* block = sequence.blocks_[b];
            if (block == nullptr) continue;
            if (block->packed) {
                if (block->finer != nullptr)
                    refuse_saving("tokens " + std::to_string(b * tokens) +
                                  " and on are packed by a finer plan, for a budget, and an image "
                                  "has the codes of one plan");
                if (block->keys != block->values)
                    refuse_saving("tokens " + std::to_string(b * tokens) +
                                  " and on have keys and wait for their values");
                add(b * tokens, tokens, true);
                continue;
            }
            // Behind the size lies what a truncation has left.
            const std::uint32_t last = std::min({(b + 1) * tokens, end, sequence.size_});
            for (std::uint32_t cell = std::max(first, b * tokens); cell < last; ++cell) {
                const std::uint32_t t = cell % tokens;
                if (block->keys[t] != block->values[t])
                    refuse_saving("cell " + std::to_string(cell) +
                                  " has a key or a value, not both: save a sequence between steps");
                if (block->keys[t]) add(cell, 1, false);
            }
        }
        return spans;
    }

    static void save(const Sequence& sequence, const ImageHeader& header, const ImageLayout& layout,
                     std::size_t number, std::byte* image) {
        const Plan& plan = *sequence.plan_;
        const Shape& shape = plan.shape();
        const Device& device = sequence.device();
        std::vector<BlockRows<const std::byte>> keys, values;
        each_place(
            header, layout, plan.block_tokens(), number,
            [&](std::uint32_t b, std::size_t at) {
                device.copy_out(image + at, sequence.blocks_[b]->data, plan.packed_bytes());
            },
            [&](const ExactRun& run) {
                std::byte* exact = sequence.blocks_[run.cell / plan.block_tokens()]->data;
                const std::uint32_t first = run.cell % plan.block_tokens();
                keys.push_back({exact, first, run.count, run.keys});
                if (!shape.latent()) values.push_back({exact, first, run.count, run.values});
                if (plan.has_positions())
                    device.copy_out(image + run.positions,
                                    exact + cache::exact_position_offset(plan, first),
                                    run.count * sizeof(std::int32_t));
            });
        const RowsOut rows{image, shape.head_dim, shape.channels()};
        device.read_rows(plan, Part::keys, keys, rows, serial_executor());
        device.read_rows(plan, Part::values, values, rows, serial_executor());
        if (header.queries)
            write_queries(sequence.queries_.state(), layout.queries, number, shape.channels(),
                          image);
    }

    static bool has_queries(const Sequence& sequence) {
        return sequence.plan_->wants_queries() && !sequence.queries_.state().values.empty();
    }

    static std::size_t queries_at(std::size_t begin, std::size_t number, std::size_t channels) {
        return begin + number * (sizeof(QueryRecord) + channels * sizeof(float));
    }

    static void write_queries(const QueryState& state, std::size_t begin, std::size_t number,
                              std::size_t channels, std::byte* image) {
        if (state.values.empty()) return;  // zeros
        const QueryRecord record{state.tokens, state.heads, state.kept ? 2u : 1u, 0};
        std::byte* at = image + queries_at(begin, number, channels);
        std::memcpy(at, &record, sizeof record);
        std::memcpy(at + sizeof record, state.values.data(), channels * sizeof(float));
    }

    static QueryState read_queries(std::size_t begin, std::size_t number, std::size_t channels,
                                   const std::byte* image) {
        const std::byte* at = image + queries_at(begin, number, channels);
        QueryRecord record;
        std::memcpy(&record, at, sizeof record);
        if (record.kind > 2 || record.zero != 0)
            refuse_image("query energies of kind " + std::to_string(record.kind) + ", " +
                         std::to_string(record.zero) + "; legal: 0 to 2, 0");
        QueryState state{record.tokens, record.heads, record.kind == 2, {}};
        if (record.kind == 0) return state;
        state.values.resize(channels);
        std::memcpy(state.values.data(), at + sizeof record, channels * sizeof(float));
        return state;
    }

    // Takes all memory first; what then fails is the destructors' to give back.
    static void load(std::span<Sequence> sequences, const ImageHeader& header,
                     const std::byte* image) {
        const Plan& plan = *sequences.front().plan_;
        const Shape& shape = plan.shape();
        Device& device = sequences.front().device();
        const std::uint32_t tokens = plan.block_tokens();
        const ImageLayout layout = lay_out(header);
        const auto blocks = ceil_div<std::size_t>(std::size_t{header.tokens}, tokens);
        std::vector<Sequence::Place> exact, packed;
        for (Sequence& sequence : sequences) {
            sequence.blocks_.reserve(blocks);
            const std::size_t before = exact.size();
            each_place(
                header, layout, tokens, 0,
                [&](std::uint32_t b, std::size_t) { packed.push_back({&sequence, b}); },
                [&](const ExactRun& run) {
                    const std::uint32_t b = run.cell / tokens;
                    if (exact.size() == before || exact.back().block != b)
                        exact.push_back({&sequence, b});
                });
        }
        Sequence::make_writable(exact, 0);
        take_packed(packed, plan, sequences.front().store_->impl(), blocks, sequences);

        std::vector<BlockRows<std::byte>> keys, values;
        for (std::size_t s = 0; s < sequences.size(); ++s) {
            Sequence& sequence = sequences[s];
            each_place(
                header, layout, tokens, s,
                [&](std::uint32_t b, std::size_t at) {
                    if (!cache::names_all_channels(plan, image + at))
                        refuse_image("the packed block at cell " + std::to_string(b * tokens) +
                                     " does not have every channel of its keys");
                    device.copy_in(sequence.blocks_[b]->data, image + at, plan.packed_bytes());
                    sequence.blocks_[b]->leads = cache::leads(plan, image + at);
                },
                [&](const ExactRun& run) {
                    cache::Block& block = *sequence.blocks_[run.cell / tokens];
                    const std::uint32_t first = run.cell % tokens;
                    keys.push_back({block.data, first, run.count, run.keys});
                    if (!shape.latent())
                        values.push_back({block.data, first, run.count, run.values});
                    if (plan.has_positions())
                        device.copy_in(block.data + cache::exact_position_offset(plan, first),
                                       image + run.positions, run.count * sizeof(std::int32_t));
                    block.keys |= cache::cell_range(first, run.count);
                    block.values |= cache::cell_range(first, run.count);
                });
            if (header.queries)
                sequence.queries_.restore(read_queries(layout.queries, s, shape.channels(), image));
            sequence.size_ = header.tokens;
            sequence.cut_ =
                sequence.size_ % tokens != 0 && sequence.packed(sequence.size_ / tokens);
        }
        const Rows rows{image, plan.rows(), shape.head_dim, shape.channels()};
        device.write_rows(plan, Part::keys, keys, rows, serial_executor());
        device.write_rows(plan, Part::values, values, rows, serial_executor());
        device.finish();
    }

    static void take_packed(std::span<const Sequence::Place> packed, const Plan& plan,
                            Store::Impl& store, std::size_t blocks, std::span<Sequence> sequences) {
        const std::scoped_lock lock(store.mutex);
        store.check_budget(packed.size() * plan.packed_bytes(), 0);
        for (Sequence& sequence : sequences) sequence.blocks_.resize(blocks);
        for (const auto& [sequence, b] : packed) {
            auto block = std::make_unique<cache::Block>();
            block->data = store.pool(plan.packed_bytes()).allocate();
            block->packed = true;
            block->keys = block->values = cache::cell_range(0, plan.block_tokens());
            store.hold(true, plan.packed_bytes());
            sequence->blocks_[b] = block.release();
        }
    }
};

std::vector<std::byte> SequenceImage::save(std::span<const Sequence* const> sequences,
                                           std::uint32_t first, std::uint32_t last) {
    if (sequences.empty()) refuse_saving("no sequences");
    const Sequence& one = *sequences.front();
    ImageHeader header{image_identity(one.plan(), one.retention()),
                       static_cast<std::uint32_t>(sequences.size()), last,
                       Access::spans(one, first, last), false};
    for (const Sequence* sequence : sequences) {
        if (&sequence->plan() != &one.plan() || !(sequence->retention() == one.retention()) ||
            sequence->size() != one.size() || Access::spans(*sequence, first, last) != header.spans)
            refuse_saving("its sequences have other plans, sizes, or packed and exact cells");
    }
    // A range that ends at 0 has no history, as after a truncation to 0.
    if (last > 0 || one.size() == 0)
        header.queries = std::ranges::any_of(
            sequences, [](const Sequence* sequence) { return Access::has_queries(*sequence); });
    const ImageLayout layout = lay_out(header);
    const std::string wrong = list_error(header, layout, one.plan());
    if (!wrong.empty()) refuse_saving(wrong);
    std::vector<std::byte> image(layout.bytes);
    for (std::size_t s = 0; s < sequences.size(); ++s)
        Access::save(*sequences[s], header, layout, s, image.data());
    one.device().finish();
    seal_image(header, image);
    return image;
}

std::vector<Sequence> SequenceImage::load(const ImageHeader& header, const std::byte* image,
                                          const std::shared_ptr<Store>& store,
                                          const std::shared_ptr<const Plan>& plan,
                                          const Retention& retention) {
    const std::string wrong = list_error(header, lay_out(header), *plan);
    if (!wrong.empty()) refuse_image(wrong);
    if (header.queries && !plan->wants_queries())
        refuse_image("it has query energies, and its scheme weighs no keys by them");
    std::vector<Sequence> sequences;
    sequences.reserve(header.batch);
    while (sequences.size() < header.batch) sequences.emplace_back(store, plan, retention);
    Access::load(sequences, header, image);
    return sequences;
}

std::vector<std::byte> save_sequences(std::span<const Sequence* const> sequences) {
    return SequenceImage::save(sequences, 0, sequences.empty() ? 0 : sequences[0]->size());
}

std::vector<std::byte> save_sequence(const Sequence& sequence) {
    const Sequence* one = &sequence;
    return save_sequences(std::span(&one, 1));
}

namespace {

ImageHeader checked_header(std::span<const std::byte> image, const std::shared_ptr<Store>& store,
                           const std::shared_ptr<const Plan>& plan, const Retention& retention) {
    // Says what is wrong with a store, a plan or a retention.
    const Sequence checked(store, plan, retention);
    ImageHeader header = read_image(image);
    check_image(header, image_identity(*plan, retention));
    for (const ImageSpan& span : header.spans) {
        if (span.packed && span.first % header.identity.block_tokens != 0)
            refuse_image("a packed block at cell " + std::to_string(span.first) +
                         "; a Sequence's begin at multiples of " +
                         std::to_string(header.identity.block_tokens));
    }
    return header;
}

}  // namespace

std::vector<Sequence> load_sequences(std::span<const std::byte> image,
                                     const std::shared_ptr<Store>& store,
                                     const std::shared_ptr<const Plan>& plan,
                                     const Retention& retention) {
    const ImageHeader header = checked_header(image, store, plan, retention);
    return SequenceImage::load(header, image.data(), store, plan, retention);
}

Sequence load_sequence(std::span<const std::byte> image, const std::shared_ptr<Store>& store,
                       const std::shared_ptr<const Plan>& plan, const Retention& retention) {
    const ImageHeader header = checked_header(image, store, plan, retention);
    if (header.batch != 1)
        refuse_image("a batch of " + std::to_string(header.batch) + "; a Sequence is one");
    return std::move(SequenceImage::load(header, image.data(), store, plan, retention).front());
}

}  // namespace lowkv
