// A sequence to an image and back.

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache/block.h"
#include "cache/exact_block.h"
#include "cache/store.h"
#include "lowkv/error.h"
#include "lowkv/serial.h"

namespace lowkv {
namespace {

// Calls packed(block, where in the image) and exact(cell, where its key, value and position are).
template <class Packed, class Exact>
void each_place(const ImageHeader& header, Packed packed, Exact exact) {
    const ImageIdentity& identity = header.identity;
    const std::size_t row = element_bytes(identity.rows) * identity.shape.channels();
    const ImageLayout layout = lay_out(header);
    for (std::size_t i = 0; i < header.spans.size(); ++i) {
        const ImageSpan& span = header.spans[i];
        const ImagePart& part = layout.parts[i];
        if (span.packed) {
            const std::uint32_t first = span.first / identity.block_tokens;
            for (std::uint32_t b = 0; b < span.tokens / identity.block_tokens; ++b)
                packed(first + b, part.begin + b * identity.packed_bytes);
        } else {
            for (std::size_t t = 0; t < span.tokens; ++t)
                exact(static_cast<std::uint32_t>(span.first + t), part.begin + t * row,
                      part.values + t * row, part.positions + t * sizeof(std::int32_t));
        }
    }
}

// Calls copy(a piece of token `token` in an exact block, where it is in the image, its bytes).
template <class Copy>
void each_piece(const Plan& plan, std::byte* block, std::uint32_t token, std::size_t key,
                std::size_t value, std::size_t position, Copy copy) {
    const cache::ExactShape shape = cache::exact_shape(plan);
    constexpr std::size_t half = sizeof(std::uint16_t);
    for (std::size_t c = 0; c < shape.channels; ++c)
        copy(cache::exact_keys(block) + c * shape.block_tokens + token, key + c * half, half);
    copy(cache::exact_values(plan, block) + std::size_t{token} * shape.channels, value,
         half * shape.channels);
    if (plan.has_positions())
        copy(cache::exact_positions(plan, block) + token, position, sizeof(std::int32_t));
}

}  // namespace

// Both directions, inside of a sequence.
struct SequenceImage {
    // Consecutive cells that are packed, or exact.
    static std::vector<ImageSpan> spans(const Sequence& sequence) {
        const std::uint32_t tokens = sequence.plan_->block_tokens();
        std::vector<ImageSpan> spans;
        const auto add = [&](std::uint32_t first, std::uint32_t count, bool packed) {
            if (spans.empty() || spans.back().packed != packed ||
                spans.back().first + spans.back().tokens != first)
                spans.push_back({first, 0, packed});
            spans.back().tokens += count;
        };
        for (std::uint32_t b = 0; b < sequence.blocks(); ++b) {
            const cache::Block* block = sequence.blocks_[b];
            const std::uint32_t first = b * tokens;
            if (block == nullptr) continue;
            if (block->packed) {
                add(first, tokens, true);
                continue;
            }
            // Behind the size lies what a truncation has left.
            for (std::uint32_t t = 0; t < tokens && first + t < sequence.size_; ++t) {
                if (block->keys[t] != block->values[t])
                    throw Error(ErrorCode::invalid_argument,
                                "cell " + std::to_string(first + t) +
                                    " has a key or a value, not both: save a sequence between "
                                    "steps");
                if (block->keys[t]) add(first + t, 1, false);
            }
        }
        return spans;
    }

    static std::vector<std::byte> save(const Sequence& sequence) {
        const Plan& plan = *sequence.plan_;
        const ImageHeader header{image_identity(plan, sequence.retention_, RowType::f16), 1,
                                 sequence.size_, spans(sequence)};
        std::vector<std::byte> image(lay_out(header).bytes);
        each_place(
            header,
            [&](std::uint32_t b, std::size_t at) {
                std::memcpy(image.data() + at, sequence.blocks_[b]->data, plan.packed_bytes());
            },
            [&](std::uint32_t cell, std::size_t key, std::size_t value, std::size_t position) {
                each_piece(plan, sequence.blocks_[cell / plan.block_tokens()]->data,
                           cell % plan.block_tokens(), key, value, position,
                           [&](const void* own, std::size_t at, std::size_t bytes) {
                               std::memcpy(image.data() + at, own, bytes);
                           });
            });
        seal_image(header, image);
        return image;
    }

    // Takes all memory first; what then fails is the destructor's to give back.
    static void load(Sequence& sequence, const ImageHeader& header, const std::byte* image) {
        const Plan& plan = *sequence.plan_;
        Store::Impl& store = sequence.store_->impl();
        const std::uint32_t tokens = plan.block_tokens();
        std::vector<std::uint32_t> packed, exact;
        each_place(
            header, [&](std::uint32_t b, std::size_t) { packed.push_back(b); },
            [&](std::uint32_t cell, auto...) {
                if (exact.empty() || exact.back() != cell / tokens) exact.push_back(cell / tokens);
            });
        sequence.make_writable(exact);
        store.check_budget(packed.size() * plan.packed_bytes(), 0);
        sequence.blocks_.resize((std::size_t{header.tokens} + tokens - 1) / tokens);
        for (const std::uint32_t b : packed) {
            auto block = std::make_unique<cache::Block>();
            block->data = store.pool(plan.packed_bytes()).allocate();
            block->packed = true;
            block->keys = block->values = cache::cell_range(0, tokens);
            store.hold(true, plan.packed_bytes());
            sequence.blocks_[b] = block.release();
        }
        each_place(
            header,
            [&](std::uint32_t b, std::size_t at) {
                std::memcpy(sequence.blocks_[b]->data, image + at, plan.packed_bytes());
            },
            [&](std::uint32_t cell, std::size_t key, std::size_t value, std::size_t position) {
                cache::Block& block = *sequence.blocks_[cell / tokens];
                each_piece(plan, block.data, cell % tokens, key, value, position,
                           [&](void* own, std::size_t at, std::size_t bytes) {
                               std::memcpy(own, image + at, bytes);
                           });
                block.keys.set(cell % tokens);
                block.values.set(cell % tokens);
            });
        sequence.size_ = header.tokens;
        sequence.cut_ = sequence.size_ % tokens != 0 && sequence.packed(sequence.size_ / tokens);
    }
};

std::vector<std::byte> save_sequence(const Sequence& sequence) {
    return SequenceImage::save(sequence);
}

Sequence load_sequence(std::span<const std::byte> image, std::shared_ptr<Store> store,
                       std::shared_ptr<const Plan> plan, const Retention& retention) {
    Sequence sequence(std::move(store), std::move(plan), retention);
    const ImageHeader header = read_image(image);
    check_image(header, image_identity(sequence.plan(), retention, RowType::f16));
    const auto refuse = [](const std::string& what) {
        throw Error(ErrorCode::invalid_image, "image: " + what);
    };
    if (header.batch != 1)
        refuse("a batch of " + std::to_string(header.batch) + "; a Sequence is one");
    for (const ImageSpan& span : header.spans) {
        if (span.packed && span.first % header.identity.block_tokens != 0)
            refuse("a packed block at cell " + std::to_string(span.first) +
                   "; a Sequence's begin at multiples of " +
                   std::to_string(header.identity.block_tokens));
    }
    SequenceImage::load(sequence, header, image.data());
    return sequence;
}

}  // namespace lowkv
