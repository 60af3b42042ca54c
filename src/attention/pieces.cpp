// Attention to sequences in pieces: queries are turned once per distance, the device is called once
// per plan, and the softmaxes of a sequence's pieces are joined once.

#include <algorithm>
#include <cmath>
#include <utility>
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
        std::size_t rows = 0, turned = 0;
        for (const PiecewiseAttention& sequence : sequences) {
            if (sequence.pieces.empty()) attention::refuse("a sequence has no pieces");
            several_ = several_ || sequence.pieces.size() > 1;
            shape_ = sequence.pieces.front().plan->shape();
            attention::check_arguments(shape_, sequence.io, sequence.mask, params);
        }
        for (const PiecewiseAttention& sequence : sequences) {
            const std::size_t queries = std::size_t{sequence.io.tokens} * sequence.io.heads;
            if (is_joined(sequence)) rows += sequence.pieces.size() * queries;
            for (const AttentionPiece& piece : sequence.pieces)
                if (piece.back != nullptr) turned += queries;
        }
        work_.parts.clear();
        work_.out.resize(rows * shape_.out_dim());
        work_.lse.resize(rows);
        work_.queries.resize(turned * shape_.head_dim);
        for (const PiecewiseAttention& sequence : sequences) {
            const std::size_t first = work_.parts.size();
            std::uint32_t next = sequence.io.first_cell;
            for (const AttentionPiece& piece : sequence.pieces) add(sequence, piece, first, next);
        }
    }

    void run(const Device& device, AttentionWorkspace& workspace) {
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
        for (std::vector<float>* floats : {&work_.queries, &work_.out})
            if (floats->capacity() > most_floats) *floats = {};
    }

  private:
    std::span<const PiecewiseAttention> sequences_;
    const AttentionParams& params_;
    PieceWorkspace& work_;
    Executor& executor_;
    Shape shape_;
    bool several_ = false;               // any sequence has several pieces
    std::size_t rows_ = 0, turned_ = 0;  // of out, and queries, that parts have been given

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
        const Mask& mask = sequence.mask;
        const AttentionIO& whole = sequence.io;
        const std::uint32_t end =
            std::max(next, std::min(piece.first_cell + piece.cells, whole.n_cells));
        std::uint32_t begin = std::max(next, piece.first_cell);
        if (begin > end || (begin == end && is_joined(sequence))) return;
        next = end;
        AttentionPart part{&sequence, piece.plan, piece.back, {piece.blocks, whole, {}}, {}};
        part.attention.mask = attention::cut(mask, begin - whole.first_cell);
        const bool newest = end == whole.n_cells && end - piece.first_cell >= whole.tokens;
        if (mask.kind == Mask::Kind::causal && !newest) {
            const std::uint32_t first_query = whole.n_cells - whole.tokens;
            begin = std::max(begin, oldest(mask, first_query));
            if (begin >= end) return;
            part.attention.mask = {};
            if (params_.alibi_slopes != nullptr || end > first_query + 1 ||
                oldest(mask, whole.n_cells - 1) > begin)
                write_mask(part, begin, end);
        }
        AttentionIO& io = part.attention.io;
        io.first_cell = begin - piece.first_cell;
        io.n_cells = end - piece.first_cell;
        if (piece.back != nullptr) turn(part, first);
        if (is_joined(sequence)) {
            io.out = work_.out.data() + rows_ * shape_.out_dim();
            io.out_token_stride = std::size_t{io.heads} * shape_.out_dim();
            io.out_head_stride = shape_.out_dim();
            io.lse = work_.lse.data() + rows_;
            rows_ += std::size_t{io.tokens} * io.heads;
        }
        work_.parts.push_back(std::move(part));
    }

    // The causal mask, with the distances of ALiBi, of cells that are not the newest.
    void write_mask(AttentionPart& part, std::uint32_t begin, std::uint32_t end) const {
        const AttentionIO& io = part.sequence->io;
        for (std::uint32_t own = io.n_cells - io.tokens; own < io.n_cells; ++own) {
            const std::uint32_t first = oldest(part.sequence->mask, own);
            for (std::uint32_t cell = begin; cell < end; ++cell)
                part.mask.push_back(cell < first || cell > own ? -INFINITY
                                    : params_.alibi_slopes == nullptr
                                        ? 0.0f
                                        : static_cast<float>(cell) - static_cast<float>(own));
        }
        part.attention.mask = {
            .kind = Mask::Kind::additive_f32, .data = part.mask.data(), .row_stride = end - begin};
    }

    // Queries that are turned by the distance, once for all of a sequence's pieces.
    void turn(AttentionPart& part, std::size_t first) {
        AttentionIO& io = part.attention.io;
        const auto known = std::find_if(
            work_.parts.begin() + static_cast<std::ptrdiff_t>(first), work_.parts.end(),
            [&](const AttentionPart& other) { return other.back == part.back; });
        float* turned = work_.queries.data() + turned_ * shape_.head_dim;
        const AttentionIO from = io;
        io.q = known != work_.parts.end() ? known->attention.io.q : turned;
        io.q_token_stride = std::size_t{io.heads} * shape_.head_dim;
        io.q_head_stride = shape_.head_dim;
        if (known != work_.parts.end()) return;
        turned_ += std::size_t{io.tokens} * io.heads;
        executor_.parallel_for(io.tokens, [&](std::size_t token, unsigned) {
            float* q = turned + token * io.q_token_stride;
            for (std::uint32_t head = 0; head < io.heads; ++head, q += shape_.head_dim) {
                std::copy_n(from.q + token * from.q_token_stride + head * from.q_head_stride,
                            shape_.head_dim, q);
                part.back->turn(q);
            }
        });
    }

    // The softmax over all of a sequence's parts, and over the logits of sinks. Of no parts: zeros.
    void join(const PiecewiseAttention& sequence, std::span<const AttentionPart> parts) {
        const AttentionIO& io = sequence.io;
        const std::size_t channels = shape_.out_dim();
        const std::size_t rows = std::size_t{io.tokens} * io.heads;
        const auto join_row = [&](std::size_t i, unsigned) {
            const std::size_t token = i / io.heads, head = i % io.heads;
            const float* sink =
                params_.sink_logits != nullptr ? params_.sink_logits + head : nullptr;
            const AttentionIO* first = parts.empty() ? nullptr : &parts.front().attention.io;
            const float lse = attention::join(
                first != nullptr ? first->lse + i : nullptr, nullptr, rows,
                first != nullptr ? first->out + i * channels : nullptr, rows * channels,
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
