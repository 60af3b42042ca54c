#pragma once
// The memory behind an AttentionWorkspace.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "isa/table.h"
#include "lowkv/attention.h"

namespace lowkv {

// Memory aligned to a cache line, so that two threads' parts never share one.
class Scratch {
  public:
    void reserve(std::size_t bytes) {
        if (bytes <= bytes_) return;
        memory_.reset(static_cast<std::byte*>(::operator new(bytes, alignment)));
        bytes_ = bytes;
    }
    std::byte* data() const noexcept { return memory_.get(); }

  private:
    static constexpr std::align_val_t alignment{64};
    struct Free {
        void operator()(std::byte* p) const noexcept { ::operator delete(p, alignment); }
    };
    std::unique_ptr<std::byte, Free> memory_;
    std::size_t bytes_ = 0;
};

// How the rows of one kv head (token-major, then the query heads that share it) and the cells of a
// sequence are cut into tasks.
struct AttentionSplit {
    bool decode = false;
    std::uint32_t rows = 0;        // per kv head
    std::uint32_t chunk_rows = 0;  // rows per task
    std::uint32_t chunks = 0;
    std::uint32_t first_cell = 0;   // of the first range: no query sees one before it
    std::uint32_t range_cells = 0;  // cells per task
    std::uint32_t ranges = 0;
};

// A sequence's part of a call, and where what it needs begins among the others'.
struct AttentionJob {
    const SequenceAttention* sequence = nullptr;
    AttentionSplit split;
    std::size_t first_task = 0, first_chunk = 0;  // chunk: of rows, in all of its ranges
    std::size_t first_row = 0;                    // of partial results
    std::size_t first_query = 0, first_turn = 0;  // of rotated queries; turns of some tokens each
    std::size_t first_blank = 0;                  // of notes on masks
};

// What the queries of a sequence see of one piece.
struct AttentionPart {
    const PiecewiseAttention* sequence;
    const Plan* plan;
    const KeyShift* back;
    SequenceAttention attention;
    std::vector<float> mask;  // its part of a causal mask, where it has to be written out
};

struct PieceWorkspace {
    std::vector<AttentionPiece> pieces;  // a Batch's
    std::vector<PiecewiseAttention> sequences;
    std::vector<AttentionPart> parts;  // of attend(), sequence by sequence
    std::vector<SequenceAttention> attended;
    std::vector<float> queries, out, lse;
};

struct AttentionWorkspace::Impl {
    std::vector<BlockView> views;
    std::vector<SequenceAttention> sequences;
    PieceWorkspace in_pieces;
    std::vector<AttentionJob> jobs;
    std::vector<float> rotated_q;     // by job, [token][head][head_dim]
    std::vector<float> max, sum;      // per task and row
    std::vector<std::uint8_t> blank;  // by job, [token][span]: what tasks note of additive masks
    Scratch out;                      // per task and row, unnormalised outputs
    std::vector<Scratch> scratch;     // per thread
};

}  // namespace lowkv
