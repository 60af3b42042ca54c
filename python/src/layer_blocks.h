#pragma once
// The packed blocks of one layer, for every row of a batch. Python keeps the rows that are still
// exact; what arrives here is packed once and never changes, so rows of a batch, beams and copies
// of a cache share blocks by reference.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "lowkv/attention.h"
#include "lowkv/codec.h"

namespace lowkv::python {

// What the packed blocks of one cache, and of the copies made of it, hold. A shared block counts
// once.
struct BlockMemory {
    std::atomic<std::size_t> bytes = 0;
    std::atomic<std::size_t> blocks = 0;
    std::atomic<std::size_t> encoded_blocks = 0;   // since it was made
    std::atomic<std::size_t> reopened_blocks = 0;  // decoded again because a crop cut them in two
};

// One block's bytes, immutable once encoded.
class PackedBlock {
  public:
    PackedBlock(std::size_t bytes, std::shared_ptr<BlockMemory> memory);
    ~PackedBlock();
    PackedBlock(const PackedBlock&) = delete;
    PackedBlock& operator=(const PackedBlock&) = delete;

    std::byte* data() const noexcept { return data_; }
    std::size_t bytes() const noexcept { return bytes_; }

  private:
    std::shared_ptr<BlockMemory> memory_;
    std::size_t bytes_;
    std::byte* data_;
};

// Strides of a [batch][head][token][channel] tensor, in elements; channels are side by side.
struct Strides {
    std::size_t batch = 0, head = 0, token = 0;
};

// What one call of attend() reads and writes beside the blocks.
struct Queries {
    const float* q = nullptr;
    Strides q_strides;
    float* out = nullptr;
    Strides out_strides;
    float* log_sum = nullptr;     // [batch][token][head]
    const float* mask = nullptr;  // [batch][head][token][cells], added to the scores, or null
    Strides mask_strides;         // 0 where rows of the batch or heads share theirs
    std::uint32_t tokens = 0;
    std::uint32_t heads = 0;
    float scale = 1.0f;
    float softcap = 0.0f;
};

class LayerBlocks {
  public:
    LayerBlocks(std::shared_ptr<const Plan> plan, std::size_t batch,
                std::shared_ptr<BlockMemory> memory);

    const Plan& plan() const noexcept { return *plan_; }
    std::size_t batch() const noexcept { return rows_.size(); }
    std::size_t blocks() const noexcept { return rows_.empty() ? 0 : rows_.front().size(); }

    // Packs `count` exact blocks (layout: Plan::exact_bytes()) per row of the batch and appends
    // them. exact: [batch][count][exact_bytes]. Throws for what is infinite or NaN in f16.
    void append(const std::byte* exact, std::size_t count, Executor& executor);
    // Exact blocks [first, first + count) of every row, rounded to f16:
    // [batch][count][exact_bytes].
    void decode(std::size_t first, std::size_t count, std::byte* exact, Executor& executor) const;

    // Attention over blocks [first, blocks()).
    void attend(std::size_t first, const Queries& queries, Executor& executor) const;

    // Row i becomes what rows[i] was: beams, repeats and selections.
    void select(std::span<const std::size_t> rows);
    void drop_front(std::size_t count);
    // Keeps the first `count` blocks. `reopened` of those dropped have been decoded by the caller.
    void truncate(std::size_t count, std::size_t reopened);

    // One packed block as it lies in memory, for saving and sending.
    std::span<const std::byte> packed(std::size_t row, std::size_t block) const;
    // Appends `count` such blocks to every row: [batch][count][packed_bytes].
    void append_packed(const std::byte* packed, std::size_t count);

  private:
    using Row = std::deque<std::shared_ptr<const PackedBlock>>;

    using Fresh = std::vector<std::shared_ptr<PackedBlock>>;

    // `count` blocks for each row, to be filled, and their appending, [batch][count].
    Fresh make_blocks(std::size_t count) const;
    void append(Fresh fresh, std::size_t count);
    void attend_nothing(const Queries& queries) const;
    const PackedBlock& at(std::size_t row, std::size_t block) const;

    std::shared_ptr<const Plan> plan_;
    std::shared_ptr<BlockMemory> memory_;
    std::vector<Row> rows_;
};

}  // namespace lowkv::python
