#pragma once
// One layer of llama.cpp's cache: the tensors cache_k_l<N> and cache_v_l<N>, nominally f16
// [channels, cells, streams], held as one lowkv::Sequence per stream (block arrays addressed by
// cell) instead of at the tensors' addresses.
//
// What a layer is gets known in two steps. Its tensors come when the buffer is filled; the split of
// the channels into heads is only seen in FLASH_ATTN_EXT, when the host asks whether we support it.
// The first operation or data access then decides for good:
//   packed  sequences; the tensors' addresses are never read
//   plain   f16 memory of the nominal size, used by stock CPU kernels: what we can't serve packed

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cell_tracker.h"
#include "lowkv/cache.h"
#include "lowkv/rope.h"
#include "mapping.h"
#include "settings.h"

struct ggml_tensor;

namespace lowkv::ggml {

enum class Part : std::uint8_t { keys = 0, values = 1 };

class LayerCache {
  public:
    enum class Mode : std::uint8_t { undecided, packed, plain };

    LayerCache(std::shared_ptr<const Setting> setting, std::shared_ptr<Store> store,
               std::uint32_t index);

    void add_tensor(Part part, const ggml_tensor& tensor);
    std::uint32_t index() const noexcept { return index_; }
    std::uint32_t cells() const noexcept { return cells_; }
    std::uint32_t streams() const noexcept { return streams_; }
    std::size_t row_bytes(Part part) const noexcept { return half(part).row_bytes; }
    std::size_t nominal_bytes(Part part) const noexcept { return half(part).bytes; }

    // What FLASH_ATTN_EXT says about the heads, or why it can't be served packed.
    void learn_shape(std::uint32_t kv_heads, std::uint32_t head_dim);
    void learn_unsupported(const std::string& reason);
    // The RoPE of what SET_ROWS stores, for schemes that undo it, or why it can't be undone.
    void learn_rope(const Rope& rope);
    void learn_unsupported_rope(const std::string& reason) { rope_reason_ = reason; }
    bool wants_rope() const;
    bool shape_known() const noexcept { return shape_.head_dim != 0; }

    Mode mode() const noexcept { return mode_; }
    void decide();
    // Why the layer is plain.
    const std::string& reason() const noexcept { return reason_; }
    const Plan& plan() const noexcept { return *plan_; }
    Sequence& sequence(std::uint32_t stream) noexcept { return streams_state_[stream].sequence; }

    // The f16 memory of a plain layer.
    std::byte* plain_memory(Part part) noexcept { return half(part).plain.data(); }

    // Nominal byte ranges of a tensor, whatever the mode.
    void read(Part part, std::size_t offset, std::size_t size, std::byte* out) const;
    void write(Part part, std::size_t offset, std::size_t size, const std::byte* in);
    // One cell's key with its position.
    void write_key(std::uint32_t stream, std::uint32_t cell, const std::byte* row,
                   std::int32_t position);

    // Stream `to` becomes a copy of stream `from`, blocks shared until one side writes.
    void copy_stream(std::uint32_t from, std::uint32_t to);
    void clear();

    // The tracker's steps that this layer has written and packed, per stream.
    struct StreamState {
        explicit StreamState(Sequence s) : sequence(std::move(s)) {}
        Sequence sequence;
        std::uint64_t written_step = 0;
        std::uint64_t packed_step = 0;
    };
    StreamState& stream(std::uint32_t stream) noexcept { return streams_state_[stream]; }
    const StreamState& stream(std::uint32_t stream) const noexcept {
        return streams_state_[stream];
    }

    // Packs the blocks that the tracker calls ready and this layer has not packed yet.
    void pack(std::uint32_t stream, const CellTracker& tracker, Executor& executor);
    // The same for a stream's cells [first, last), which a state has just been restored into.
    void pack_restored(std::uint32_t stream, std::uint32_t first, std::uint32_t last,
                       const CellTracker& tracker);

  private:
    struct Half {
        bool present = false;
        bool f16 = false;
        std::size_t row_bytes = 0;
        std::size_t bytes = 0;
        Mapping plain;
    };

    std::shared_ptr<const Setting> setting_;
    std::shared_ptr<Store> store_;
    std::uint32_t index_;
    std::uint32_t cells_ = 0, streams_ = 0;
    Half halves_[2];
    Shape shape_;
    std::optional<Rope> rope_;
    std::string rope_reason_;
    Mode mode_ = Mode::undecided;
    std::string reason_;
    std::shared_ptr<const Plan> plan_;
    std::vector<StreamState> streams_state_;
    mutable std::vector<std::byte> decoded_;  // scratch: one exact block

    Half& half(Part part) noexcept { return halves_[static_cast<int>(part)]; }
    const Half& half(Part part) const noexcept { return halves_[static_cast<int>(part)]; }
    std::string why_not_packed();
    void pack_units(std::uint32_t stream, std::span<const std::uint32_t> units,
                    const CellTracker& tracker, Executor& executor);
    void read_rows(Part part, std::size_t row, std::size_t rows, std::byte* out) const;
    void write_rows(Part part, std::size_t row, std::size_t rows, const std::byte* in);
};

}  // namespace lowkv::ggml
