// Attention to sequences in pieces: queries are turned once per distance, the device is called once
// per plan, and the softmaxes of a sequence's pieces are joined once.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attention/query.h"
#include "attention/workspace.h"

namespace lowkv {

KeyShift::KeyShift(const Rope& rope, const Shape& shape, std::int32_t distance)
    : first_(shape.value_dim),
      to_second_(rope.pairs == Rope::Pairs::halves ? rope.frequencies.size() : 1),
      to_next_(rope.pairs == Rope::Pairs::halves ? 1 : 2) {
    cosine_.reserve(rope.frequencies.size());
    sine_.reserve(rope.frequencies.size());
    for (const float frequency : rope.frequencies) {
        const double angle = distance * static_cast<double>(frequency);
        cosine_.push_back(static_cast<float>(std::cos(angle)));
        sine_.push_back(static_cast<float>(std::sin(angle)));
    }
}

void KeyShift::turn(float* head) const noexcept {
    head += first_;
    for (std::size_t i = 0; i < cosine_.size(); ++i) {
        float& a = head[i * to_next_];
        float& b = head[i * to_next_ + to_second_];
        const float first = a * cosine_[i] - b * sine_[i];
        b = a * sine_[i] + b * cosine_[i];
        a = first;
    }
}

Mask attention::cut(Mask mask, std::size_t count) {
    if (kernels::is_additive(mask.kind) && mask.data != nullptr)
        mask.data =
            static_cast<const std::byte*>(mask.data) +
            count * (mask.kind == Mask::Kind::additive_f32 ? sizeof(float) : sizeof(std::uint16_t));
    return mask;
}

namespace {

// One call of attend().
class PieceCall {
  public:
    PieceCall(std::span<const PiecewiseAttention> sequences, const AttentionParams& params,
              PieceWorkspace& work, Executor& executor)
        : sequences_(sequences), params_(params), work_(work), executor_(executor) {
        several_ = std::ranges::any_of(
            sequences, [](const PiecewiseAttention& its) { return its.pieces.size() > 1; });
        work_.parts.clear();
        work_.turned.clear();
        for (const PiecewiseAttention& sequence : sequences) {
            if (sequence.pieces.empty()) attention::refuse("a sequence has no pieces");
            const Shape& shape = sequence.pieces.front().plan->shape();
            attention::check_arguments(shape, sequence.io, sequence.mask, params);
            const std::size_t first = work_.parts.size();
            std::uint32_t next = sequence.io.first_cell;
            for (const AttentionPiece& piece : sequence.pieces) add(sequence, piece, first, next);
        }
        place();
    }

    void run(const Device& device, AttentionWorkspace& workspace) {
        executor_.parallel_for(work_.turned.size(), [this](std::size_t i, unsigned) {
            turn(work_.parts[work_.turned[i].part], work_.turned[i].token);
        });
        AttentionParams params = params_;
        if (several_) params.sink_logits = nullptr;  // join() adds them
        for (const AttentionPart& first : work_.parts) {
            const auto alike = [&](const AttentionPart& part) { return part.plan == first.plan; };
            if (&*std::ranges::find_if(work_.parts, alike) != &first) continue;
            work_.attended.clear();
            for (const AttentionPart& part : work_.parts)
                if (alike(part)) work_.attended.push_back(part.attention);
            attend(device, *first.plan, work_.attended, params, workspace, executor_);
        }
        std::span<const AttentionPart> rest(work_.parts);
        for (const PiecewiseAttention& sequence : sequences_) {
            std::size_t parts = 0;
            while (parts < rest.size() && rest[parts].sequence == &sequence) ++parts;
            if (parts == 0 || is_joined(sequence)) join(sequence, rest.first(parts));
            rest = rest.subspan(parts);
        }
        // A prompt's are large.
        constexpr std::size_t most_floats = std::size_t{1} << 22;
        for (std::vector<float>* floats : {&work_.queries, &work_.masks, &work_.out})
            if (floats->capacity() > most_floats) *floats = {};
    }

  private:
    std::span<const PiecewiseAttention> sequences_;
    const AttentionParams& params_;
    PieceWorkspace& work_;
    Executor& executor_;
    bool several_ = false;                            // any sequence has several pieces
    std::size_t queries_ = 0, masks_ = 0, rows_ = 0;  // floats, and rows of `out`

    // The only piece of a sequence writes where the caller wants it.
    bool is_joined(const PiecewiseAttention& sequence) const {
        return sequence.pieces.size() > 1 || (several_ && params_.sink_logits != nullptr);
    }

    // The oldest cell that a query sees by a causal mask, from its own cell.
    static std::uint32_t oldest(const Mask& mask, std::uint32_t own) {
        return mask.window != 0 && own >= mask.window ? own + 1 - mask.window : 0;
    }

    // The part of a piece that queries see. first: of the sequence's parts; next: the cell behind
    // the piece before.
    void add(const PiecewiseAttention& sequence, const AttentionPiece& piece, std::size_t first,
             std::uint32_t& next) {
        const AttentionIO& io = sequence.io;
        AttentionPart part{.sequence = &sequence,
                           .plan = piece.plan,
                           .attention = {piece.blocks, io, sequence.mask}};
        const std::uint32_t end =
            std::max(next, std::min(piece.first_cell + piece.cells, io.n_cells));
        part.begin = std::max(next, piece.first_cell);
        if (part.begin > end || (part.begin == end && is_joined(sequence))) return;
        next = end;
        part.attention.mask = attention::cut(sequence.mask, part.begin - io.first_cell);
        const bool newest = end == io.n_cells && end - piece.first_cell >= io.tokens;
        if (sequence.mask.kind == Mask::Kind::causal && !newest) {
            const std::uint32_t first_query = io.n_cells - io.tokens;
            part.begin = std::max(part.begin, oldest(sequence.mask, first_query));
            if (part.begin >= end) return;
            part.attention.mask = {};
            part.masked = params_.alibi_slopes != nullptr || end > first_query + 1 ||
                          oldest(sequence.mask, io.n_cells - 1) > part.begin;
        }
        part.attention.io.first_cell = part.begin - piece.first_cell;
        part.attention.io.n_cells = end - piece.first_cell;
        if (part.masked) {
            part.mask = masks_;
            masks_ += std::size_t{io.tokens} * (end - part.begin);
        }
        if (is_joined(sequence)) {
            part.row = rows_;
            rows_ += std::size_t{io.tokens} * io.heads;
        }
        if (piece.back != nullptr) add_queries(part, *piece.back, first);
        work_.parts.push_back(part);
    }

    // Queries that are turned by the distance, once for all of a sequence's pieces.
    void add_queries(AttentionPart& part, const KeyShift& back, std::size_t first) {
        part.back = &back;
        for (std::size_t i = first; i < work_.parts.size(); ++i) {
            if (work_.parts[i].back != &back) continue;
            part.queries = work_.parts[i].queries;
            return;
        }
        const AttentionIO& io = part.attention.io;
        part.queries = queries_;
        queries_ += std::size_t{io.tokens} * io.heads * part.plan->shape().head_dim;
        for (std::uint32_t token = 0; token < io.tokens; ++token)
            work_.turned.push_back({work_.parts.size(), token});
    }

    // What parts need of the workspace, once it is known how much that is.
    void place() {
        if (work_.parts.empty()) return;
        const Shape& shape = work_.parts.front().plan->shape();
        work_.queries.resize(queries_);
        work_.masks.resize(masks_);
        work_.out.resize(rows_ * shape.out_dim());
        work_.lse.resize(rows_);
        for (AttentionPart& part : work_.parts) {
            AttentionIO& io = part.attention.io;
            if (part.masked) write_mask(part);
            if (is_joined(*part.sequence)) {
                io.out = work_.out.data() + part.row * shape.out_dim();
                io.out_token_stride = std::size_t{io.heads} * shape.out_dim();
                io.out_head_stride = shape.out_dim();
                io.lse = work_.lse.data() + part.row;
            }
            if (part.back == nullptr) continue;
            io.q = work_.queries.data() + part.queries;
            io.q_token_stride = std::size_t{io.heads} * shape.head_dim;
            io.q_head_stride = shape.head_dim;
        }
    }

    // The causal mask, with the distances of ALiBi, of cells that are not the newest.
    void write_mask(AttentionPart& part) {
        const AttentionIO& io = part.sequence->io;
        const std::uint32_t cells = part.attention.io.n_cells - part.attention.io.first_cell;
        float* mask = work_.masks.data() + part.mask;
        part.attention.mask = {.kind = Mask::Kind::additive_f32, .data = mask, .row_stride = cells};
        for (std::uint32_t own = io.n_cells - io.tokens; own < io.n_cells; ++own) {
            const std::uint32_t first = oldest(part.sequence->mask, own);
            for (std::uint32_t cell = part.begin; cell < part.begin + cells; ++cell)
                *mask++ = cell < first || cell > own ? -std::numeric_limits<float>::infinity()
                          : params_.alibi_slopes == nullptr
                              ? 0.0f
                              : static_cast<float>(cell) - static_cast<float>(own);
        }
    }

    void turn(const AttentionPart& part, std::uint32_t token) const {
        const AttentionIO& io = part.sequence->io;
        const std::size_t head_dim = part.plan->shape().head_dim;
        float* q = work_.queries.data() + part.queries + std::size_t{token} * io.heads * head_dim;
        for (std::uint32_t head = 0; head < io.heads; ++head, q += head_dim) {
            std::copy_n(io.q + token * io.q_token_stride + head * io.q_head_stride, head_dim, q);
            part.back->turn(q);
        }
    }

    // The softmax over all of a sequence's parts, and over the logits of sinks. Of no parts: zeros.
    void join(const PiecewiseAttention& sequence, std::span<const AttentionPart> parts) {
        const AttentionIO& io = sequence.io;
        const std::size_t channels = sequence.pieces.front().plan->shape().out_dim();
        const std::size_t rows = std::size_t{io.tokens} * io.heads;
        const std::size_t first = parts.empty() ? 0 : parts.front().row;
        const auto join_row = [&](std::size_t i, unsigned) {
            const std::size_t token = i / io.heads, head = i % io.heads;
            const float* sink =
                params_.sink_logits != nullptr ? params_.sink_logits + head : nullptr;
            const float lse = attention::join(
                work_.lse.data() + first + i, nullptr, rows,
                work_.out.data() + (first + i) * channels, rows * channels,
                static_cast<std::uint32_t>(parts.size()), static_cast<std::uint32_t>(channels),
                sink, io.out + token * io.out_token_stride + head * io.out_head_stride);
            if (io.lse != nullptr) io.lse[i] = lse;
        };
        // Those of a decoded token are too few to be worth waking threads for.
        constexpr std::size_t few = std::size_t{1} << 15;
        if (rows * channels * parts.size() <= few)
            for (std::size_t i = 0; i < rows; ++i) join_row(i, 0);
        else
            executor_.parallel_for(rows, join_row);
    }
};

}  // namespace

void attend(const Device& device, std::span<const PiecewiseAttention> sequences,
            const AttentionParams& params, AttentionWorkspace& workspace, Executor& executor) {
    PieceCall(sequences, params, workspace.impl().in_pieces, executor).run(device, workspace);
}

}  // namespace lowkv
