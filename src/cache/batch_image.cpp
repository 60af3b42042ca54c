// A batch to an image and back.

#include <algorithm>
#include <string>
#include <utility>

#include "cache/sequence_image.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"
#include "round.h"

namespace lowkv {
namespace {

[[noreturn]] void refuse(const std::string& what) {
    throw Error(ErrorCode::invalid_image, "image: " + what);
}

std::string range_text(std::uint32_t first, std::uint64_t end) {
    return "tokens [" + std::to_string(first) + ", " + std::to_string(end) + ")";
}

}  // namespace

std::vector<std::byte> Batch::save(std::uint32_t first, std::uint32_t last) const {
    const auto refuse_range = [&](const std::string& why) {
        throw Error(ErrorCode::invalid_argument,
                    "Batch: can't save " + range_text(first, last) + ": " + why);
    };
    if (std::ranges::any_of(state_.padding, [](const auto& ranges) { return !ranges.empty(); }))
        refuse_range("its padding can't be saved; compute the prompts without padding");
    if (first < state_.first || first > last || last > state_.tokens)
        refuse_range("it holds " + range_text(state_.first, state_.tokens));
    for (const std::uint32_t end : {first, last}) {
        if (end > state_.packed_first && end < state_.packed_end &&
            (end - state_.packed_first) % plan().block_tokens() != 0)
            refuse_range("token " + std::to_string(end) + " is inside of a packed block of " +
                         std::to_string(plan().block_tokens()));
    }
    std::vector<const Sequence*> sequences;
    for (const Sequence& sequence : sequences_) sequences.push_back(&sequence);
    return SequenceImage::save(sequences, first, last);
}

Batch::State Batch::state_of(const ImageHeader& header) const {
    const std::uint32_t tokens = plan().block_tokens(), sinks = retention().sinks;
    if (header.tokens >= Sequence::max_cells)
        refuse(std::to_string(header.tokens) + " tokens are too many");
    const auto& spans = header.spans;
    State state;
    state.tokens = header.tokens;
    state.first = spans.empty() ? header.tokens : spans.front().first;
    std::uint64_t end = state.first;
    const ImageSpan* packed = nullptr;
    for (const ImageSpan& span : spans) {
        const std::string text = range_text(span.first, std::uint64_t{span.first} + span.tokens);
        if (span.first != end) refuse(text + " after those before " + std::to_string(end));
        end += span.tokens;
        if (!span.packed) continue;
        if (packed != nullptr) refuse("more than one range of packed tokens");
        packed = &span;
        // Exact tokens before packed ones are sinks, all of them up to the last.
        const bool fits = span.first >= sinks && (span.first - sinks) % tokens == 0;
        if (!fits || (span.first != state.first && span.first != sinks))
            refuse("packed " + text + ", but its scheme has " + std::to_string(sinks) +
                   " sinks and blocks of " + std::to_string(tokens));
    }
    if (end != header.tokens)
        refuse("its rows end at " + std::to_string(end) + ", its tokens at " +
               std::to_string(header.tokens));
    if (packed != nullptr) {
        state.packed_first = packed->first;
        state.packed_end = packed->first + packed->tokens;
        return state;
    }
    // What was cut off before the first token is no whole block.
    const std::uint32_t block_end = round_up(state.first, tokens);
    state.packed_first = state.packed_end = state.first < sinks ? sinks : block_end;
    return state;
}

Batch Batch::load(std::span<const std::byte> image, const std::shared_ptr<Store>& store,
                  const std::shared_ptr<const Plan>& plan, const Retention& retention) {
    Batch batch(store, plan, retention, 1);
    const ImageHeader header = read_image(image);
    check_image(header, image_identity(*plan, batch.retention()));
    batch.state_ = batch.state_of(header);
    batch.sequences_ = SequenceImage::load(header, image.data(), store, plan, batch.retention());
    return batch;
}

}  // namespace lowkv
