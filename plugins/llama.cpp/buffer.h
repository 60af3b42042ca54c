#pragma once
// The buffer type that llama.cpp puts its cache in. One buffer holds all cache tensors of one
// llama_kv_cache (they share their cells), or the scheduler's temporaries, or recurrent state; only
// the first kind is special. Its size is the packed size; the addresses that ggml computes in it
// are never read (most of them fault), so tensors are always resolved to their root and its state.

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "ggml-backend-impl.h"
#include "layer_cache.h"
#include "live_buffers.h"
#include "lowkv_ggml.h"
#include "mapping.h"
#include "settings.h"

namespace lowkv::ggml {

ggml_backend_buffer_type_t buffer_type();

class CacheBuffer;

// What a cache tensor's `extra` points to.
struct CacheTensor {
    CacheBuffer* buffer = nullptr;
    LayerCache* layer = nullptr;
    Part part = Part::keys;
};

// A tensor or the one that it is a view of; view_src always names the end of a chain of views.
inline const ggml_tensor* root(const ggml_tensor* tensor) noexcept {
    return tensor->view_src != nullptr ? tensor->view_src : tensor;
}

// Null for anything but (a view of) a tensor that a LayerCache holds.
CacheTensor* cache_tensor(const ggml_tensor* tensor) noexcept;

// Whether the tensor lives in one of our buffers, or is named like a cache and would (contexts made
// only to measure their size have empty buffers).
bool is_ours(const ggml_tensor* tensor) noexcept;

class CacheBuffer final : public LiveBuffer {
  public:
    CacheBuffer(std::size_t bytes, std::shared_ptr<const Setting> setting);
    ~CacheBuffer();
    CacheBuffer(const CacheBuffer&) = delete;
    CacheBuffer& operator=(const CacheBuffer&) = delete;

    std::byte* base() const noexcept { return memory_.data(); }
    void init_tensor(ggml_tensor& tensor);
    void clear();

    const Setting& setting() const noexcept { return *setting_; }
    CellTracker& tracker(std::uint32_t stream) noexcept { return trackers_[stream]; }
    // Positions of the tokens of this cache's step; empty: not known. A model may have several
    // caches, and those of layers without RoPE never learn them.
    std::vector<std::int32_t>& step_positions() noexcept { return step_positions_; }

    // A graph is planned on the cache: all caches of its context are made by now. Refuses a scheme
    // that was meant for another model.
    void plan();

    // Before each operation: the first one decides how all layers are held, and says so. Throws
    // Error when the contents can't be trusted.
    void prepare();

    // Every layer catches up with a stream's groups: before its cells change, and before it is read
    // outside of a graph.
    void follow(std::uint32_t stream, Executor& executor);
    void follow_all();

    // Bytes of a tensor as a saved state wants them, with marks (row_mark.h), and as a restored
    // state brings them.
    void save(const CacheTensor& tensor, std::size_t offset, std::size_t size, std::byte* out);
    void restore(const CacheTensor& tensor, std::size_t offset, std::size_t size,
                 const std::byte* in);

    // As numbers, for who reads a graph's views and saves no state.
    void read(const CacheTensor& tensor, std::size_t offset, std::size_t size, std::byte* out);

    // The scheduler has copied these keys for an operation elsewhere.
    void copied_by_graph(const CacheTensor& keys, std::size_t offset, std::size_t size);

    // Either part of a layer copies both, and its first layer the trackers.
    void copy_stream(const CacheTensor& tensor, std::uint32_t from, std::uint32_t to);
    void add_stats(CacheStats& stats) const override;

    // An operation that ggml takes for infallible has failed: the next one that may fail does.
    void fail(const char* what, const char* why) noexcept;
    // A context shift has failed, after some layers perhaps: the cells whose shift is not 0, of all
    // streams, must not be seen. Null: all cells.
    void poison_shifted(const std::int32_t* shifts, const char* why) noexcept;
    // Throws Error if a query of the step would see a cell whose restored row was not taken over.
    void require_sane(std::uint32_t stream, const MaskRows& mask, std::size_t tokens) const;

    using Layers = std::map<std::pair<std::string, int>, std::unique_ptr<LayerCache>>;
    const Layers& layers() const noexcept { return layers_; }

  private:
    std::shared_ptr<const Setting> setting_;
    Mapping memory_;
    bool planned_ = false, started_ = false;
    std::shared_ptr<Store> store_;  // null: it holds no cache
    std::size_t told_bytes_ = 0;    // what llama.cpp was told that the tensors take
    Layers layers_;                 // by tag, number
    std::vector<std::unique_ptr<CacheTensor>> tensors_;
    std::vector<CellTracker> trackers_;  // per stream
    std::vector<std::int32_t> step_positions_;

    // The state that is being restored: the layer whose keys came first, which tells the cells and
    // their order, and the tensor that came last.
    struct Restoring {
        const LayerCache* layer = nullptr;
        const CacheTensor* last = nullptr;
        bool marks = false;               // rows of other tensors may be codes, or have seals
        std::vector<std::uint32_t> ties;  // of all streams' rows (row_mark.h); 0: did not come
        ArrivedRows arrived;              // those of the tensor that came last
        bool too_early = false;           // some rows came before the keys with the marks
    } restoring_;
    // The state that is being saved: its cells, as the keys with the marks have told them, and the
    // codes of units in the tensor that was read last (LayerCache::saved_codes()).
    struct Saving {
        const CacheTensor* last = nullptr;
        std::vector<std::uint32_t> ties;  // of all streams' rows (row_mark.h); empty: not known
        std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<std::byte>> codes;
    } saving_;
    // The copy that goes on, layer by layer, if the call before was one: what it copied last.
    struct Copied {
        std::uint32_t from = 0, to = 0;
        const LayerCache* layer = nullptr;  // null: none
    } copied_;
    bool failed_ = false;
    std::string failure_;  // why
    std::string refusal_;  // why nothing is computed here at all
    std::string poison_;   // why some cells must not be seen

    void require_whole();
    // Nothing is computed here at all.
    void refuse(const std::string& why);
    // Gives each stream its part of LOWKV_BUDGET, once the layers are decided. Refuses one that is
    // too little for all cells.
    void share_budget();
    bool carries_marks(const CacheTensor& tensor) const noexcept;
    void save_rows(const CacheTensor& tensor, std::size_t row, std::size_t rows, std::byte* out);
    const std::vector<std::byte>& codes_of(const CacheTensor& tensor, std::uint32_t stream,
                                           std::uint32_t unit);
    void begin_restore(LayerCache& layer);
    void end_marks();
    void take_arrived();
    void take_over(const CacheTensor& tensor, std::size_t offset, std::size_t size,
                   const std::byte* in);
    void follow_restored();
    void poison(const char* what, const char* why) noexcept;
    void restore_cells(const LayerCache& layer, std::size_t offset, std::size_t size,
                       const std::byte* in);
    const LayerCache* marked_layer() const noexcept;
    void refuse_other_layers();
    void start();
    // A graph runs: what was restored is complete.
    void end_restore();
    void make_trackers(std::uint32_t streams, std::uint32_t cells);
    void report_active() const;
    void report_end() const;
};

// for_each_live(), whose buffers are all CacheBuffers.
void for_each_live_cache(const std::function<void(const CacheBuffer&)>& f);

}  // namespace lowkv::ggml
