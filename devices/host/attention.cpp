// Attention on the host's side: what is to be done is cut into tasks, written in the kernels' words
// (call.h) and launched; the results are brought to where the host wants them.

#include "attention.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "lowkv/rotation.h"
#include "numbers.h"

namespace lowkv::devices {
namespace {

constexpr std::uint32_t tile = LOWKV_TASK_CELLS;

// Of queries, masks and partial results of one launch, in floats.
constexpr std::size_t launch_floats = std::size_t{1} << 24;
// Query tokens that have their tasks together: their rows fill whole tasks.
constexpr std::uint32_t slice_tokens = LOWKV_TILE_ROWS;

constexpr std::size_t words_in(std::size_t bytes) { return bytes / sizeof(std::uint32_t); }

// Some of a sequence's query tokens.
struct Slice {
    const SequenceAttention* sequence;
    std::uint32_t first, tokens;
};

class Launch {
  public:
    // `rows`: of a task; `reached`: queries and all else are a caller's in the device's memory;
    // `tensor`: tensor cores do it, of a plan that they serve.
    Launch(State& state, const Plan& plan, const State::Known& known, const AttentionParams& params,
           std::uint32_t rows, bool reached, const lowkv_tensor* tensor)
        : state_(state),
          plan_(plan),
          params_(params),
          d_(plan.shape().head_dim),
          task_rows_(rows),
          reached_(reached),
          tensor_(tensor),
          numbers_(reached),
          words_(state.call_words),
          plan_buffer_(known.buffer.get()) {
        words_.assign(words_in(sizeof(lowkv_call)), 0);
    }

    // Queries, and what they have of a mask.
    void add(const Slice& slice) {
        const AttentionIO& io = slice.sequence->io;
        slices_.push_back(slice);
        lowkv_queries to{};
        to.heads = io.heads;
        to.tokens = slice.tokens;
        to.first_token = slice.first;
        to.all_tokens = io.tokens;
        to.first_cell = io.first_cell;
        to.n_cells = io.n_cells;
        to.blocks = number(words_.size());
        to.first_query = queries_;
        queries_ += slice.tokens * io.heads;
        add_mask(slice, to);
        if (reached_) {
            to.out = wide(io.out + slice.first * io.out_token_stride);
            to.out_token_stride = wide(std::uint64_t{io.out_token_stride});
            to.out_head_stride = wide(std::uint64_t{io.out_head_stride});
            if (io.lse != nullptr) to.lse = wide(io.lse + std::size_t{slice.first} * io.heads);
        }
        sequences_.push_back(to);
        add_blocks(slice);
    }

    // Tasks for the slice added last.
    void add_tasks() {
        const Slice& slice = slices_.back();
        const std::uint32_t rows = rows_of(slice), repeat = rows / slice.tokens;
        const auto sequence = number(sequences_.size() - 1);
        const std::uint32_t most = range_of(slice);
        for (std::uint32_t row = 0; row < rows; row += task_rows_) {
            const std::uint32_t its_rows = std::min(task_rows_, rows - row);
            const std::uint32_t token = row / repeat;
            const Span seen = span_of(
                {slice.sequence, slice.first + token, (row + its_rows - 1) / repeat - token + 1});
            const auto first = number(tasks_.size()), chunk = number(chunks_.size());
            for (std::uint32_t cell = seen.begin; cell < seen.end;) {
                const Run run = run_at(cell);
                const std::uint32_t end = std::min(run.end, cell + std::min(most, seen.end - cell));
                tasks_.push_back({sequence, row, its_rows, cell, end, run.packed, chunk});
                cell = end;
            }
            if (first == tasks_.size())  // no cell at all: zeros
                tasks_.push_back({sequence, row, its_rows, 0, 0, 0, chunk});
            chunks_.push_back({first, number(tasks_.size()) - first});
        }
    }

    // A task for every tile of [first, last), of all rows of the one slice.
    void add_tiles(std::uint32_t first, std::uint32_t last) {
        for (std::uint32_t cell = first; cell < last; cell += tile)
            tasks_.push_back({0, 0, rows_of(slices_.front()), cell, std::min(cell + tile, last),
                              run_at(cell).packed, 0});
    }

    std::size_t floats() const noexcept {
        return numbers_.size() + std::size_t{queries_} * d_ + partial_floats();
    }

    void attend() {
        upload();
        Queue& queue = state_.queue;
        const std::uint32_t kv_heads = plan_.shape().kv_heads;
        const Handle partial = state_.partial.of(queue, partial_floats() * sizeof(float));
        const std::size_t results = reached_ ? 1 : std::size_t{queries_} * (d_ + 1);
        const Handle device_results = state_.results.of(queue, results * sizeof(float));
        if (tensor_ != nullptr)
            launch_tensor(state_,
                          {*tensor_, d_, kv_heads, number(chunks_.size()), shares_, first_share_,
                           plan_buffer_, words_buffer_, numbers_buffer_, partial});
        else
            attend_by_tiles(partial);
        queue.launch(Kernel::join, {64, chunks_.size(), kv_heads, task_rows_}, plan_buffer_,
                     words_buffer_, numbers_buffer_, partial, device_results);
        queue.check();
        if (reached_) return;
        std::vector<float> found(results);
        queue.read(found.data(), {device_results}, results * sizeof(float));
        queue.check();
        const float* from = found.data();
        for (const auto& [sequence, first, tokens] : slices_)
            from = give_results(sequence->io, first, tokens, d_, from);
    }

    // Each cell's attention mass, by tile and cell.
    std::vector<float> weigh() {
        const AttentionIO& io = slices_.front().sequence->io;
        const std::uint32_t lse_at = add_numbers(io.lse, queries_);
        upload();
        Queue& queue = state_.queue;
        std::vector<float> mass(tasks_.size() * tile);
        const Handle device_mass = state_.results.of(queue, mass.size() * sizeof(float));
        queue.launch(Kernel::attention_mass, {task_items, tasks_.size()}, state_.memory.all(),
                     plan_buffer_, words_buffer_, numbers_buffer_, lse_at, device_mass);
        queue.read(mass.data(), {device_mass}, mass.size() * sizeof(float));
        queue.check();
        return mass;
    }

  private:
    static constexpr std::size_t task_items = 128;
    void attend_by_tiles(Handle partial) {
        Queue& queue = state_.queue;
        const std::size_t kv_heads = plan_.shape().kv_heads;
        const std::size_t forms = plan_.keys().rotation() == nullptr ? 1 : 2;
        const Handle laid = state_.laid.of(
            queue, chunks_.size() * kv_heads * forms * d_ * task_rows_ * sizeof(float));
        queue.launch(Kernel::lay_queries, {task_items, chunks_.size(), kv_heads, forms},
                     plan_buffer_, words_buffer_, numbers_buffer_, laid);
        queue.launch(Kernel::attend, {task_items, tasks_.size(), kv_heads}, state_.memory.all(),
                     plan_buffer_, words_buffer_, numbers_buffer_, laid, partial);
    }
    struct Span {
        std::uint32_t begin, end;  // begin: of a tile
    };
    // Blocks of one state, up to a cell.
    struct Run {
        std::uint32_t end, packed;
    };

    State& state_;
    const Plan& plan_;
    const AttentionParams& params_;
    std::uint32_t d_, task_rows_, queries_ = 0, shares_ = 0, first_share_ = 0;
    bool reached_;
    const lowkv_tensor* tensor_;
    std::vector<Slice> slices_;
    Numbers numbers_;
    std::vector<lowkv_queries> sequences_;
    std::vector<lowkv_task> tasks_;
    std::vector<lowkv_chunk> chunks_;
    std::vector<Run> runs_;              // of the slice added last
    std::vector<std::uint32_t>& words_;  // the call, addresses of blocks, all lists
    Handle plan_buffer_, words_buffer_ = nullptr, numbers_buffer_ = nullptr;

    static std::uint32_t number(std::size_t value) { return static_cast<std::uint32_t>(value); }

    // What views of blocks out of sight say is of no meaning.
    void add_blocks(const Slice& slice) {
        const Span seen = span_of(slice);
        const std::uint32_t tokens = plan_.block_tokens();
        const std::size_t at = words_.size(), first = seen.begin / tokens;
        const std::size_t end = std::max(first, (std::size_t{seen.end} + tokens - 1) / tokens);
        words_.resize(at + 2 * end, LOWKV_NOWHERE);
        runs_.clear();
        const auto blocks = slice.sequence->blocks.subspan(first, end - first);
        state_.memory.addresses(blocks, words_.data() + at + 2 * first);
        std::uint32_t cell = seen.begin;
        for (const BlockView& block : blocks) {
            const std::uint32_t packed = block.packed && block.keys != nullptr ? 1 : 0;
            if (runs_.empty() || runs_.back().packed != packed) runs_.push_back({cell, packed});
            runs_.back().end = cell += tokens;
        }
    }
    std::uint32_t rows_of(const Slice& slice) const {
        return slice.tokens * (slice.sequence->io.heads / plan_.shape().kv_heads);
    }
    Run run_at(std::uint32_t cell) const noexcept {
        const auto found = std::ranges::upper_bound(runs_, cell, {}, &Run::end);
        return found == runs_.end() ? Run{cell + tile, 0} : *found;
    }
    std::size_t partial_floats() const noexcept {
        return tasks_.size() * plan_.shape().kv_heads * task_rows_ * (d_ + 2);
    }

    // Cells of a task: all that its rows see where a sequence's tasks are enough for a device, else
    // so many that there are.
    std::uint32_t range_of(const Slice& slice) const {
        const AttentionIO& io = slice.sequence->io;
        const Span seen = span_of({slice.sequence, 0, io.tokens});
        const std::size_t rows = std::size_t{io.tokens} * (io.heads / plan_.shape().kv_heads);
        const std::size_t groups = (rows + task_rows_ - 1) / task_rows_ * plan_.shape().kv_heads;
        if (tensor_ != nullptr) {
            const std::size_t processors = state_.queue.tensor().processors;
            // Each warp has cells, and each processor a task.
            constexpr std::size_t cells = LOWKV_TENSOR_WARPS * LOWKV_TENSOR_CELLS;
            if (groups >= processors) return number(seen.end + cells);
            const std::size_t share = (seen.end - seen.begin) * groups / processors;
            return number(share / cells * cells + cells);
        }
        const Tuning& tuning = state_.queue.tuning();
        if (groups >= tuning.groups) return seen.end + LOWKV_TILE_SCORES;
        const std::size_t share = (seen.end - seen.begin) * groups / tuning.groups;
        return number(std::max<std::size_t>(share, tuning.cells) / tuning.cells * tuning.cells);
    }

    // The cells that a slice's queries see, from the beginning of their tile.
    Span span_of(const Slice& slice) const {
        const AttentionIO& io = slice.sequence->io;
        const Mask& mask = slice.sequence->mask;
        Span span{io.first_cell, io.n_cells};
        if (mask.kind == Mask::Kind::causal) {
            const std::uint32_t first_end = io.n_cells - io.tokens + slice.first + 1;
            span.end = first_end + slice.tokens - 1;
            if (mask.window != 0 && first_end > mask.window)
                span.begin = std::max(span.begin, first_end - mask.window);
        }
        // A tile may be as large as a block: it begins where one does.
        span.begin = span.begin / plan_.block_tokens() * plan_.block_tokens();
        return span;
    }

    // As f32, [token][head][cell]; what repeats in the host's memory stays one here.
    void add_mask(const Slice& slice, lowkv_queries& to) {
        const AttentionIO& io = slice.sequence->io;
        const Mask& mask = slice.sequence->mask;
        to.mask_kind = static_cast<std::uint32_t>(mask.kind);
        to.window = mask.window;
        if (mask.kind != Mask::Kind::additive_f16 && mask.kind != Mask::Kind::additive_f32) return;
        const std::uint32_t tokens = mask.row_stride == 0 ? 1 : slice.tokens;
        const std::uint32_t heads = mask.head_stride == 0 ? 1 : io.heads;
        const RowType type = mask.kind == Mask::Kind::additive_f32 ? RowType::f32 : RowType::f16;
        const std::size_t bytes = element_bytes(type);
        Numbers3 numbers{
            static_cast<const std::byte*>(mask.data) + slice.first * mask.row_stride * bytes,
            type,
            {tokens, heads, io.n_cells - io.first_cell},
            mask.row_stride,
            mask.head_stride};
        to.first_masked = io.first_cell + (reached_ ? 0 : number(skip_zeros(numbers)));
        to.mask_row = mask.row_stride == 0 ? 0 : number(heads * numbers.count[2]);
        to.mask_head = mask.head_stride == 0 ? 0 : number(numbers.count[2]);
        to.mask = numbers_.add(numbers);
    }

    std::uint32_t add_numbers(const float* from, std::size_t count) {
        return from == nullptr ? LOWKV_NOWHERE
                               : numbers_.add({from, RowType::f32, {1, 1, count}, 0, 0});
    }

    // All slices' queries, one after the other.
    std::uint32_t add_queries() {
        const auto at = number(numbers_.size());
        for (const Slice& slice : slices_) {
            const AttentionIO& io = slice.sequence->io;
            numbers_.add({io.q + slice.first * io.q_token_stride,
                          RowType::f32,
                          {slice.tokens, io.heads, d_},
                          io.q_token_stride,
                          io.q_head_stride});
        }
        return at;
    }
    // As packed keys meet them: those at `queries`, unless keys are rotated. Those that a caller
    // has in the device's memory are rotated there.
    std::uint32_t add_rotated(std::uint32_t queries) {
        const codec::Rotation* rotation = plan_.keys().rotation();
        if (rotation == nullptr || tensor_ != nullptr) return queries;  // tensor_lay rotates
        const std::uint32_t at = numbers_.reserve(std::size_t{queries_} * d_);
        if (reached_) return at;
        float* rotated = numbers_.data() + at;
        std::copy_n(numbers_.data() + queries, std::size_t{queries_} * d_, rotated);
        for (std::uint32_t i = 0; i < queries_; ++i) rotation->apply(rotated + std::size_t{i} * d_);
        return at;
    }

    template <class T>
    std::uint32_t add_words(const std::vector<T>& from) {
        const std::size_t at = words_.size();
        words_.resize(at + words_in(from.size() * sizeof(T)));
        if (!from.empty()) std::memcpy(words_.data() + at, from.data(), from.size() * sizeof(T));
        return number(at);
    }

    void upload() {
        const std::uint32_t heads = slices_.front().sequence->io.heads;
        lowkv_call call{};
        call.scale = params_.scale;
        call.softcap = params_.softcap;
        call.rows = task_rows_;
        call.slopes = add_numbers(params_.alibi_slopes, heads);
        call.sinks = add_numbers(params_.sink_logits, heads);
        call.queries = add_queries();
        call.rotated = add_rotated(call.queries);
        static_assert(sizeof(lowkv_call) % 8 == 0);  // kernels read two addresses at once
        call.sequences = add_words(sequences_);
        call.tasks = add_words(tasks_);
        call.chunks = add_words(chunks_);
        if (tensor_ != nullptr) {
            const std::vector<lowkv_share> shares = share_out(
                tasks_, chunks_, plan_.shape().kv_heads, state_.queue.tensor().processors);
            shares_ = number(shares.size());
            first_share_ = add_words(shares);
        }
        const std::uint32_t fetches = add_words(numbers_.fetches());
        std::memcpy(words_.data(), &call, sizeof call);
        words_buffer_ = state_.words.holding(state_.queue, words_);
        numbers_buffer_ = numbers_.upload(state_, words_buffer_, fetches);
        if (reached_ && call.rotated != call.queries)
            state_.queue.launch(Kernel::rotate_queries, {64, queries_}, plan_buffer_,
                                numbers_buffer_, call.queries, call.rotated);
    }
};

}  // namespace

void run_attention(State& state, const Plan& plan, std::span<const SequenceAttention> sequences,
                   const AttentionParams& params) {
    const State::Known& known = state.known(plan);
    const lowkv_tensor& served = known.description.tensor;
    const bool tensor =
        served.keys.form != LOWKV_TENSOR_NONE && state.queue.tensor().processors != 0;
    std::unique_ptr<Launch> launch;
    const auto flush = [&] {
        if (launch) launch->attend();
        launch.reset();
    };
    // Query heads of all sequences are numbered alike; where they differ in number, apart. So are
    // those in another memory, and tasks of different sizes: a batch that decodes while it is
    // prefilled is two launches.
    std::uint32_t heads = 0;
    bool there = false;
    for (std::uint32_t rows = LOWKV_TASK_ROWS; rows <= LOWKV_TILE_ROWS; rows *= 2) {
        for (const SequenceAttention& sequence : sequences) {
            const std::uint32_t tokens = sequence.io.tokens;
            const std::uint32_t repeat = sequence.io.heads / plan.shape().kv_heads;
            const std::uint32_t its_rows =
                task_rows(std::size_t{tokens} * repeat, plan.shape().head_dim);
            if (rows != (tensor ? LOWKV_TENSOR_ROWS : its_rows)) continue;
            const bool reach = reached(state.queue, sequence, params);
            if (sequence.io.heads != heads || reach != there) flush();
            heads = sequence.io.heads;
            there = reach;
            for (std::uint32_t first = 0; first < tokens; first += slice_tokens) {
                if (!launch)
                    launch = std::make_unique<Launch>(state, plan, known, params, rows, there,
                                                      tensor ? &served : nullptr);
                launch->add({&sequence, first, std::min(slice_tokens, tokens - first)});
                launch->add_tasks();
                if (launch->floats() >= launch_floats) flush();
            }
        }
        flush();
    }
}

void run_mass(State& state, const Plan& plan, const SequenceAttention& sequence,
              const AttentionParams& params, std::uint32_t first_cell, std::span<float> mass) {
    const std::uint32_t begin = first_cell / tile * tile;
    Launch launch(state, plan, state.known(plan), params, LOWKV_TASK_ROWS,
                  reached(state.queue, sequence, params), nullptr);
    launch.add({&sequence, 0, sequence.io.tokens});
    launch.add_tiles(begin, first_cell + static_cast<std::uint32_t>(mass.size()));
    const std::vector<float> found = launch.weigh();
    for (std::size_t i = 0; i < mass.size(); ++i) mass[i] += found[first_cell - begin + i];
}

}  // namespace lowkv::devices
