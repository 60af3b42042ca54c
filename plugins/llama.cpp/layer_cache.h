#pragma once
// One layer of llama.cpp's cache: the tensors cache_k_l<N> and cache_v_l<N>, nominally f16
// [channels, cells, streams]; of multi-head latent attention the first alone. Per stream it is two
// lowkv::Blocks instead, of exact rows and of packed ones, both where the stream's CellGroups
// put them.
//
// What a layer is gets known in two steps. Its tensors come when the buffer is filled; the split of
// the channels into heads is only seen in FLASH_ATTN_EXT, when the host asks whether we support it.
// The first operation or data access then decides for good:
//   packed  tables of blocks; the tensors' addresses are never read. Packed rows are on one of
//           several rungs, each a plan of its own, the finest first, where a budget asks for that
//           (settings.h); the last rung is the scheme's
//   plain   f16 memory of the nominal size, used by stock CPU kernels: what we can't serve packed

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cell_tracker.h"
#include "lowkv/attention.h"
#include "lowkv/cache.h"
#include "lowkv/codec.h"
#include "lowkv/device.h"
#include "mapping.h"
#include "settings.h"
#include "unit_codes.h"

struct ggml_tensor;

namespace lowkv::ggml {

class LayerCache {
  public:
    enum class Mode : std::uint8_t { undecided, packed, plain };

    // `trackers`: one per stream, for all layers of a buffer. They outlive the layer.
    LayerCache(std::shared_ptr<const Setting> setting, std::shared_ptr<Store> store,
               std::vector<CellTracker>& trackers, std::uint32_t index);

    void add_tensor(Part part, const ggml_tensor& tensor);
    std::uint32_t index() const noexcept { return index_; }
    std::uint32_t cells() const noexcept { return cells_; }
    std::uint32_t streams() const noexcept { return streams_; }
    std::size_t row_bytes(Part part) const noexcept { return half(part).row_bytes; }
    std::uint32_t tensor_number(Part part) const noexcept {
        return 2 * index_ + static_cast<std::uint32_t>(part);
    }
    std::size_t nominal_bytes() const noexcept { return halves_[0].bytes + halves_[1].bytes; }

    // What FLASH_ATTN_EXT says about the heads, or why it can't be served packed.
    void learn_shape(const Shape& shape);
    void learn_unsupported(const std::string& reason);
    void learn_no_flash_attention();
    // What speaks against packing whatever the heads are.
    void learn_refusal(const std::string& reason);
    // The RoPE of what SET_ROWS stores, for schemes that undo it.
    void learn_rope(const Rope& rope);
    bool wants_rope() const;
    bool shape_known() const noexcept { return shape_.head_dim != 0; }
    const Shape& shape() const noexcept { return shape_; }  // zeros while it is not known

    Mode mode() const noexcept { return mode_; }
    void decide();
    // Why the layer is plain.
    const std::string& reason() const noexcept { return reason_; }
    const Plan& plan() const noexcept { return *ladder_->back(); }
    std::span<const std::shared_ptr<const Plan>> plans() const noexcept { return *ladder_; }
    // Of blocks of exact rows: shorter than packed ones, and packed in place by a plan of their own
    // where only the newest rows stay exact (Retention::young).
    const Plan& row_plan() const noexcept { return *rows_ladder_->back(); }
    Device& device() const noexcept { return store_->device(); }

    // The f16 memory of a plain layer.
    std::byte* plain_memory(Part part) noexcept { return half(part).plain.data(); }

    // Rows of a tensor count over all streams.
    struct Cell {
        std::uint32_t stream = 0, cell = 0;
    };
    Cell cell_of(std::size_t row) const noexcept {
        return {static_cast<std::uint32_t>(row / cells_), static_cast<std::uint32_t>(row % cells_)};
    }

    // Nominal byte ranges of a tensor, whatever the mode. A row is read and written where it lies;
    // packed rows that are written are packed again by repack() or follow().
    void read(Part part, std::size_t offset, std::size_t size, std::byte* out) const;
    void write(Part part, std::size_t offset, std::size_t size, const std::byte* in);
    // How many blocks read() has decoded.
    std::uint64_t decoded_blocks() const noexcept { return decoded_blocks_; }

    // A unit in a saved state, whose cells are all saved (layer_codes.cpp): what its rows of that
    // part begin with, before zeros: its codes, of one part or of both. Empty: they are numbers.
    std::vector<std::byte> saved_codes(Part part, std::uint32_t stream, std::uint32_t unit,
                                       bool both) const;
    // All rows of the part have arrived: units take their codes, and other rows are written. Throws
    // Error(invalid_image) where codes or rows are damaged, incomplete or not of this layer; no row
    // may be seen then. `ties`: of the rows (row_mark.h).
    void take(Part part, const ArrivedRows& arrived, std::span<const std::uint32_t> ties);

    // Where a cell's row lies. In order: exact rows, then packed ones block by block.
    struct Place {
        bool packed = false;
        std::uint32_t row = 0;  // in the table that holds it
        std::uint32_t cell = 0;

        friend auto operator<=>(const Place&, const Place&) = default;
        // Where the n-th cell after this one lies if their rows lie one after the other.
        Place behind(std::uint32_t n) const noexcept { return {packed, row + n, cell + n}; }
    };
    // Of the cells, in order.
    std::vector<Place> by_place(Part part, std::uint32_t stream,
                                std::span<const std::uint32_t> cells) const;

    // Whether a graph's keys were written to the cell and are still exact here. (Another layer may
    // have packed them already.)
    bool writable(std::uint32_t stream, std::uint32_t cell) const;
    // A step's rows, f32: keys for cells that the tracker knows to be written, then values.
    void write_step(Part part, std::uint32_t stream, std::span<const std::uint32_t> cells,
                    const float* rows, std::size_t stride, std::span<const std::int32_t> positions);

    // One cell's key with its position, for keys that are turned after they were written.
    void write_key(std::uint32_t stream, std::uint32_t cell, const std::byte* row,
                   std::int32_t position);
    std::int32_t position(std::uint32_t stream, std::uint32_t cell) const;

    // A context shift by `distances`, one per cell, with keys turned by `rope` (shift_of()): units
    // whose rows move alike keep their codes. The cells left, which move one by one, go to `rest`.
    void move_units(std::uint32_t stream, const std::optional<Rope>& rope,
                    const std::int32_t* distances, std::vector<std::uint32_t>& rest);
    // Packed blocks that were moved so, each time.
    std::uint64_t moved_blocks() const noexcept { return moved_blocks_; }
    // Packed once more by a lower rung, each time.
    std::uint64_t coarsened_blocks() const noexcept { return coarsened_blocks_; }

    // Does what the stream's groups ask for and this layer has not done yet: packs rows that got a
    // unit, drops units without rows and blocks without exact ones, packs again what was rewritten.
    // What it has done when it throws stays done; the next call goes on.
    void follow(std::uint32_t stream, Executor& executor);
    // Packs the keys alone of rows that got a unit: their values are yet to come. The next follow()
    // packs those.
    void follow_keys(std::uint32_t stream, Executor& executor);
    // Only the last of follow()'s, and packs on lower rungs; nothing on a plain layer.
    void repack(std::uint32_t stream, Executor& executor);
    // Follows once all readers of the step have attended: a step sees its own tokens exactly.
    void attended(std::uint32_t stream, Executor& executor);
    // A reader of the step that another backend runs, on a copy.
    void copied_by_graph(std::uint32_t stream);

    // A step's queries, before attended() and after the tracker's see_mask(). Each history weighs
    // its channels by its own.
    void update_query_stats(std::uint32_t stream, const QueryRows& queries);

    // The blocks of `layout`'s units and exact rows, in its order, and the pieces that they are.
    struct Seen {
        std::vector<BlockView> blocks;
        std::vector<AttentionPiece> pieces;
    };
    void see(std::uint32_t stream, std::span<const std::uint32_t> units,
             std::span<const std::uint32_t> exact_blocks, Seen& seen);

    // Written rows, those that nobody sees any more included.
    struct Rows {
        std::size_t packed = 0, exact = 0;
    };
    Rows rows(std::uint32_t stream) const;

    // Stream `to` becomes a copy of stream `from`, blocks shared until one side writes.
    void copy_stream(std::uint32_t from, std::uint32_t to);
    void clear();

    // What a layer knows of a stream's blocks.
    struct StreamNotes {
        std::uint64_t written_step = 0;        // the tracker's step that it wrote last
        std::uint64_t version = 0;             // of the groups that it has followed
        std::vector<std::uint32_t> done = {};  // per unit: the generation that it has followed
        bool keys_wait = false;                // packed keys do, for their values
        bool rewritten = false;              // a packed row was: its block is exact; or a rung fell
        std::uint32_t readers = 0;           // attention operations since the last write
        std::uint32_t expected_readers = 0;  // of a step, as far as seen; 0: no step was seen
        std::map<std::uint32_t, QueryEnergy> queries = {};  // by history
        std::vector<std::int32_t> moved = {};               // per unit, as far as any was
        std::vector<std::uint32_t> open =
            {};  // units that stay unquantized, the last shifted one last
    };
    struct StreamState : StreamNotes {
        CellTracker* tracker;
        Blocks exact, packed;

        const CellGroups& groups() const noexcept { return tracker->groups(); }
    };
    const StreamState& stream(std::uint32_t stream) const noexcept {
        return streams_state_[stream];
    }

  private:
    struct Half {
        bool f16 = false;
        std::size_t row_bytes = 0;
        std::size_t bytes = 0;  // 0: the layer has no such tensor
        Mapping plain;
    };

    std::shared_ptr<const Setting> setting_;
    std::shared_ptr<Store> store_;
    std::vector<CellTracker>& trackers_;
    std::uint32_t index_;
    std::uint32_t cells_ = 0, streams_ = 0;
    Half halves_[2];
    Shape shape_;
    std::optional<Rope> rope_, shift_rope_;
    std::map<std::int32_t, KeyShift> back_;  // by the distances of units that were moved
    std::uint64_t moved_blocks_ = 0;
    std::string refusal_;
    Mode mode_ = Mode::undecided;
    std::string reason_;
    std::shared_ptr<const Blocks::Ladder> ladder_, rows_ladder_;
    std::uint64_t coarsened_blocks_ = 0;
    std::vector<StreamState> streams_state_;
    // One decoded block, and the packed one that it was; null once anything may have moved.
    DeviceMemory decoded_;  // an exact block
    mutable const std::byte* decoded_from_ = nullptr;
    mutable std::uint64_t decoded_blocks_ = 0;
    mutable std::vector<std::uint16_t> rows_;  // scratch: rows on their way in or out
    std::vector<std::uint32_t> places_;        // scratch: where they lie

    Half& half(Part part) noexcept { return halves_[static_cast<int>(part)]; }
    const Half& half(Part part) const noexcept { return halves_[static_cast<int>(part)]; }
    std::string why_not_packed();
    Place place(Part part, std::uint32_t stream, std::uint32_t cell) const;
    // The table that holds the rows, which are going to change.
    Blocks& to_write(Part part, std::uint32_t stream, const Place& at);
    StreamState& state(std::uint32_t stream) noexcept { return streams_state_[stream]; }
    static void count_readers(StreamState& s);
    // Whether the layer has packed that part of a unit in use.
    bool has_packed(Part part, const StreamState& s, std::uint32_t unit) const noexcept;
    std::vector<std::byte> codes_in(Part part, std::span<const std::size_t> rows,
                                    const ArrivedRows& arrived,
                                    std::span<const std::uint32_t> ties) const;
    void put_codes(Part part, StreamState& s, std::uint32_t unit, std::span<const std::byte> bytes);
    void keep_open(StreamState& s, std::uint32_t unit) const;
    void begin_unit(StreamState& s, std::uint32_t unit);
    template <class Kind, class F>
    static void each_alike(const CellGroups& groups, std::vector<std::uint32_t> units, Kind kind,
                           F f);
    void take_units(StreamState& s, bool keys_alone, Executor& executor);
    void pack_rows(StreamState& s, std::span<const std::uint32_t> units, std::optional<Part> only,
                   Executor& executor);
    void lower(StreamState& s, Executor& executor);
    std::uint8_t wanted_rung(const CellGroups& groups, std::uint32_t unit) const noexcept;
    std::vector<Blocks::Packing> packings(StreamState& s, std::span<const std::uint32_t> units,
                                          bool weighed);
    std::vector<std::uint32_t> blocks_of(const CellGroups& groups, std::uint32_t unit) const;
    void drop_unused(StreamState& s);
    void pack_waiting(StreamState& s, Executor& executor);
    bool holds_exact(const StreamState& s, std::uint32_t row) const;
    std::uint32_t ratio(const CellGroups& groups) const noexcept;
    std::uint32_t row_ratio(const CellGroups& groups) const noexcept;
    std::uint32_t stats_from(const StreamState& s, std::uint32_t unit, std::uint8_t rung,
                             std::span<const std::uint32_t> others) const;
    void read_rows(Part part, std::size_t row, std::size_t rows, std::byte* out) const;
    void read_run(Part part, const StreamState& s, const Place& at, std::uint32_t run,
                  std::byte* out) const;
    // How far a unit's keys were moved since they were packed.
    static std::int32_t moved_by(const StreamState& s, std::uint32_t unit) noexcept {
        return unit < s.moved.size() ? s.moved[unit] : 0;
    }
    void turn_rows(const StreamState& s, std::uint32_t first, std::uint32_t count, int direction,
                   float* rows) const;
    void write_rows(Part part, std::size_t row, std::size_t rows, const std::byte* in);
};

}  // namespace lowkv::ggml
