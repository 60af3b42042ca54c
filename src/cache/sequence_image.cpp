// Sequences to an image and back.

#include "cache/sequence_image.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cache/block.h"
#include "cache/leader.h"
#include "cache/store.h"
#include "codec/round.h"
#include "lowkv/error.h"

namespace lowkv {
namespace {

[[noreturn]] void refuse_saving(const std::string& what) {
    throw Error(ErrorCode::invalid_argument, "save: " + what);
}

[[noreturn]] void refuse_image(const std::string& what) {
    throw Error(ErrorCode::invalid_image, "image: " + what);
}

// Consecutive exact cells of one block, and where in an image their rows are.
struct ExactRun {
    std::uint32_t cell, count;
    std::size_t keys, values, positions;
};

// Calls packed(block, where in the image) and exact(run) for what sequence number `number` has.
template <class Packed, class Exact>
void each_place(const ImageHeader& header, const ImageLayout& layout, std::uint32_t block_tokens,
                std::uint32_t offset, std::size_t number, Packed packed, Exact exact) {
    const ImageIdentity& identity = header.identity;
    const std::size_t row = element_bytes(identity.rows) * identity.shape.channels();
    for (std::size_t i = 0; i < header.spans.size(); ++i) {
        const ImageSpan& span = header.spans[i];
        const ImagePart& part = layout.parts[i];
        if (span.packed) {
            const std::uint32_t first = (span.first + offset) / block_tokens;
            const std::uint32_t blocks = span.tokens / block_tokens;
            for (std::uint32_t b = 0; b < blocks; ++b)
                packed(first + b, part.begin + (number * blocks + b) * identity.packed_bytes);
            continue;
        }
        for (std::uint32_t t = 0; t < span.tokens;) {
            const std::uint32_t cell = span.first + offset + t;
            const std::uint32_t count =
                std::min(span.tokens - t, block_tokens - cell % block_tokens);
            const std::size_t at = number * span.tokens + t;
            exact(ExactRun{cell, count, part.begin + at * row, part.values + at * row,
                           part.positions + at * sizeof(std::int32_t)});
            t += count;
        }
    }
}

}  // namespace

// Inside of a sequence.
struct SequenceImage::Access {
    // Cells [first, end) that are packed, or exact, as an image numbers them.
    static std::vector<ImageSpan> spans(const Sequence& sequence, std::uint32_t offset,
                                        std::uint32_t first, std::uint32_t end) {
        const std::uint32_t tokens = sequence.plan_->block_tokens();
        std::vector<ImageSpan> spans;
        const auto add = [&](std::uint32_t cell, std::uint32_t count, bool packed) {
            if (spans.empty() || spans.back().packed != packed ||
                spans.back().first + spans.back().tokens != cell - offset)
                spans.push_back({cell - offset, 0, packed});
            spans.back().tokens += count;
        };
        for (std::uint32_t b = first / tokens; b < sequence.blocks() && b * tokens < end; ++b) {
            const cache::Block* block = sequence.blocks_[b];
            if (block == nullptr) continue;
            if (block->packed) {
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
                     std::uint32_t offset, std::size_t number, std::byte* image) {
        const Plan& plan = *sequence.plan_;
        const Shape& shape = plan.shape();
        const Device& device = sequence.device();
        each_place(
            header, layout, plan.block_tokens(), offset, number,
            [&](std::uint32_t b, std::size_t at) {
                device.copy_out(image + at, sequence.blocks_[b]->data, plan.packed_bytes());
            },
            [&](const ExactRun& run) {
                std::byte* exact = sequence.blocks_[run.cell / plan.block_tokens()]->data;
                const std::uint32_t first = run.cell % plan.block_tokens();
                const auto rows = [&](std::size_t at) {
                    return RowsOut{image + at, shape.head_dim, shape.channels()};
                };
                device.read_rows(plan, Part::keys, exact, first, run.count, rows(run.keys));
                device.read_rows(plan, Part::values, exact, first, run.count, rows(run.values));
                if (plan.has_positions())
                    device.copy_out(image + run.positions,
                                    exact + cache::exact_position_offset(plan, first),
                                    run.count * sizeof(std::int32_t));
            });
    }

    // Takes all memory first; what then fails is the destructors' to give back.
    static void load(std::span<Sequence> sequences, const ImageHeader& header,
                     const std::byte* image, std::uint32_t offset) {
        const Plan& plan = *sequences.front().plan_;
        const Shape& shape = plan.shape();
        Device& device = sequences.front().device();
        const std::uint32_t tokens = plan.block_tokens();
        const ImageLayout layout = lay_out(header);
        std::vector<Sequence::Place> exact, packed;
        for (Sequence& sequence : sequences) {
            const std::size_t before = exact.size();
            each_place(
                header, layout, tokens, offset, 0,
                [&](std::uint32_t b, std::size_t) { packed.push_back({&sequence, b}); },
                [&](const ExactRun& run) {
                    const std::uint32_t b = run.cell / tokens;
                    if (exact.size() == before || exact.back().block != b)
                        exact.push_back({&sequence, b});
                });
        }
        Sequence::make_writable(exact, 0);
        take_packed(packed, plan, sequences.front().store_->impl(),
                    ceil_div<std::size_t>(std::size_t{header.tokens} + offset, tokens), sequences);

        for (std::size_t s = 0; s < sequences.size(); ++s) {
            Sequence& sequence = sequences[s];
            each_place(
                header, layout, tokens, offset, s,
                [&](std::uint32_t b, std::size_t at) {
                    device.copy_in(sequence.blocks_[b]->data, image + at, plan.packed_bytes());
                    sequence.blocks_[b]->leads = cache::leads(plan, image + at);
                },
                [&](const ExactRun& run) {
                    cache::Block& block = *sequence.blocks_[run.cell / tokens];
                    const std::uint32_t first = run.cell % tokens;
                    const auto rows = [&](std::size_t at) {
                        return Rows{image + at, plan.rows(), shape.head_dim, shape.channels()};
                    };
                    device.write_rows(plan, Part::keys, block.data, first, run.count,
                                      rows(run.keys));
                    device.write_rows(plan, Part::values, block.data, first, run.count,
                                      rows(run.values));
                    if (plan.has_positions())
                        device.copy_in(block.data + cache::exact_position_offset(plan, first),
                                       image + run.positions, run.count * sizeof(std::int32_t));
                    block.keys |= cache::cell_range(first, run.count);
                    block.values |= cache::cell_range(first, run.count);
                });
            sequence.size_ = header.tokens + offset;
            sequence.cut_ =
                sequence.size_ % tokens != 0 && sequence.packed(sequence.size_ / tokens);
        }
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
                                           std::uint32_t offset, std::uint32_t first,
                                           std::uint32_t last) {
    if (sequences.empty()) refuse_saving("no sequences");
    const Sequence& one = *sequences.front();
    ImageHeader header{image_identity(one.plan(), one.retention()),
                       static_cast<std::uint32_t>(sequences.size()), last,
                       Access::spans(one, offset, first + offset, last + offset)};
    for (const Sequence* sequence : sequences) {
        if (&sequence->plan() != &one.plan() || !(sequence->retention() == one.retention()) ||
            sequence->size() != one.size() ||
            Access::spans(*sequence, offset, first + offset, last + offset) != header.spans)
            refuse_saving("its sequences have other plans, sizes, or packed and exact cells");
    }
    const ImageLayout layout = lay_out(header);
    std::vector<std::byte> image(layout.bytes);
    for (std::size_t s = 0; s < sequences.size(); ++s)
        Access::save(*sequences[s], header, layout, offset, s, image.data());
    one.device().finish();
    seal_image(header, image);
    return image;
}

std::vector<Sequence> SequenceImage::load(const ImageHeader& header, const std::byte* image,
                                          const std::shared_ptr<Store>& store,
                                          const std::shared_ptr<const Plan>& plan,
                                          const Retention& retention, std::uint32_t offset) {
    // Spans bound the batch by the image's bytes.
    constexpr std::uint32_t most_without_rows = 1 << 16;
    if (header.spans.empty() && header.batch > most_without_rows)
        refuse_image("a batch of " + std::to_string(header.batch) + " without rows");
    std::vector<Sequence> sequences;
    sequences.reserve(header.batch);
    while (sequences.size() < header.batch) sequences.emplace_back(store, plan, retention, offset);
    Access::load(sequences, header, image, offset);
    return sequences;
}

std::vector<std::byte> save_sequences(std::span<const Sequence* const> sequences) {
    return SequenceImage::save(sequences, 0, 0, sequences.empty() ? 0 : sequences[0]->size());
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
    return SequenceImage::load(header, image.data(), store, plan, retention, 0);
}

Sequence load_sequence(std::span<const std::byte> image, const std::shared_ptr<Store>& store,
                       const std::shared_ptr<const Plan>& plan, const Retention& retention) {
    const ImageHeader header = checked_header(image, store, plan, retention);
    if (header.batch != 1)
        refuse_image("a batch of " + std::to_string(header.batch) + "; a Sequence is one");
    return std::move(SequenceImage::load(header, image.data(), store, plan, retention, 0).front());
}

}  // namespace lowkv
