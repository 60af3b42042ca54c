// Stores, batches of sequences and their images for Python.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "lowkv/batch.h"
#include "lowkv/error.h"

namespace nb = nanobind;
using namespace nb::literals;

// Copying is fork(); a vector of sequences doesn't say that it can't be copied.
template <>
struct nb::detail::is_copy_constructible<lowkv::Batch> : std::false_type {};

namespace lowkv::python {
namespace {

// Tensors [sequence][head][token][channel]; without nb::device::cpu, they may be on a CUDA device.
using Rows = nb::ndarray<nb::ro, nb::ndim<4>>;
using RowsOut = nb::ndarray<nb::ndim<4>>;
using Floats = nb::ndarray<const float, nb::ndim<4>>;
using FloatsOut = nb::ndarray<float, nb::ndim<4>>;
using QueriesSeen = nb::ndarray<const float, nb::ndim<4>, nb::device::cpu>;
using Seen = nb::ndarray<const bool, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig>;
using Image = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NewImage = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

// What is not in the host's memory must be in that of the batch's device.
template <class Array>
void check_place(const Batch& batch, const Array& array, const char* name) {
    if (array.device_type() == nb::device::cpu::value) return;
    const std::string place = concat("cuda:", array.device_id());
    const std::string_view device = batch.device().name();
    check(array.device_type() == nb::device::cuda::value && place == device, name,
          " must be on the CPU or on the batch's device, '", device, "'",
          device.starts_with("cuda") ? "" : "; that takes none but the CPU's");
}

template <class Array>
BatchStrides strides_of(const Array& array, const char* name) {
    check(array.shape(3) <= 1 || array.stride(3) == 1, name, ": channels must lie side by side");
    return {.sequence = static_cast<std::size_t>(array.stride(0)),
            .head = static_cast<std::size_t>(array.stride(1)),
            .token = static_cast<std::size_t>(array.stride(2))};
}

template <class Array>
void check_queries(const Batch& batch, const Array& q) {
    const std::uint32_t head_dim = batch.plan().shape().head_dim;
    check(q.shape(0) == batch.size() && q.shape(3) == head_dim, "q must be [", batch.size(),
          ", heads, queries, ", head_dim, "]");
}

// Checks an array of rows: `tokens` of them, of so many sequences.
template <class Array>
BatchStrides check_rows(const Batch& batch, const Array& rows, std::size_t sequences,
                        std::size_t tokens, const char* name) {
    const Shape& shape = batch.plan().shape();
    check(rows.shape(0) == sequences && rows.shape(1) == shape.kv_heads &&
              rows.shape(2) == tokens && rows.shape(3) == shape.head_dim,
          name, " must be [", sequences, ", ", shape.kv_heads, ", ", tokens, ", ", shape.head_dim,
          "]");
    return strides_of(rows, name);
}

void append(Batch& batch, const Rows& keys, const Rows& values) {
    const std::size_t tokens = keys.shape(2);
    check_place(batch, keys, "keys");
    check_place(batch, values, "values");
    check(tokens < Blocks::max_cells, tokens, " tokens are too many");
    const BatchRows k{keys.data(), row_type(keys, "keys"),
                      check_rows(batch, keys, batch.size(), tokens, "keys")};
    const BatchRows v{values.data(), row_type(values, "values"),
                      check_rows(batch, values, batch.size(), tokens, "values")};
    const nb::gil_scoped_release unlocked;
    batch.append(k, v, static_cast<std::uint32_t>(tokens));
}

void read(const Batch& batch, std::uint32_t first, const RowsOut& keys, const RowsOut& values,
          unsigned threads, std::uint32_t sequence) {
    const std::size_t sequences = keys.shape(0), tokens = keys.shape(2);
    const bool on_host = keys.device_type() == nb::device::cpu::value &&
                         values.device_type() == nb::device::cpu::value;
    const auto out = [&](const RowsOut& rows, const char* name) {
        check_place(batch, rows, name);
        check(row_type(rows, name) == batch.plan().rows(), name,
              " must have the type of the rows that were appended");
        return BatchRowsOut{rows.data(), check_rows(batch, rows, sequences, tokens, name)};
    };
    const BatchRowsOut k = out(keys, "keys"), v = out(values, "values");
    const nb::gil_scoped_release unlocked;
    batch.read(first, static_cast<std::uint32_t>(tokens), k, v,
               *thread_executor(on_host ? threads : 1), sequence,
               static_cast<std::uint32_t>(sequences));
}

// Strides that repeat a dimension of length 1.
BatchStrides mask_strides(const Floats& mask, const Floats& q, std::size_t cells) {
    const bool fits = (mask.shape(0) == q.shape(0) || mask.shape(0) == 1) &&
                      (mask.shape(1) == q.shape(1) || mask.shape(1) == 1) &&
                      mask.shape(2) == q.shape(2) && mask.shape(3) == cells;
    check(fits, "mask must be [1 or ", q.shape(0), ", 1 or ", q.shape(1), ", ", q.shape(2), ", ",
          cells, "]");
    BatchStrides strides = strides_of(mask, "mask");
    if (mask.shape(0) == 1) strides.sequence = 0;
    if (mask.shape(1) == 1) strides.head = 0;
    return strides;
}

void attend(const Batch& batch, const Floats& q, const FloatsOut& out, std::uint32_t first,
            const std::optional<Floats>& mask, bool causal, std::uint32_t window, float scale,
            float softcap, const std::optional<Logits>& sink_logits, unsigned threads) {
    static thread_local AttentionWorkspace workspace;
    check_queries(batch, q);
    for (std::size_t i = 0; i < 4; ++i)
        check(out.shape(i) == q.shape(i), "out must have q's shape");
    check(first <= batch.tokens(), "first, ", first, ", is past the ", batch.tokens(),
          " tokens there are");
    check(!sink_logits || sink_logits->shape(0) == q.shape(1), "sink_logits must be [heads]");
    check_place(batch, q, "q");
    check_place(batch, out, "out");
    if (mask) check_place(batch, *mask, "mask");
    if (sink_logits) check_place(batch, *sink_logits, "sink_logits");
    const BatchStrides q_strides = strides_of(q, "q"), out_strides = strides_of(out, "out");
    BatchAttention attention;
    attention.q_sequence_stride = q_strides.sequence;
    attention.out_sequence_stride = out_strides.sequence;
    AttentionIO& io = attention.io;
    io.q = q.data();
    io.q_token_stride = q_strides.token;
    io.q_head_stride = q_strides.head;
    io.out = out.data();
    io.out_token_stride = out_strides.token;
    io.out_head_stride = out_strides.head;
    io.tokens = static_cast<std::uint32_t>(q.shape(2));
    io.heads = static_cast<std::uint32_t>(q.shape(1));
    io.first_cell = first;
    AttentionParams& params = attention.params;
    params.scale = scale;
    params.softcap = softcap;
    params.mask.window = window;
    if (mask) {
        const BatchStrides strides = mask_strides(*mask, q, batch.tokens() - first);
        params.mask.kind = Mask::Kind::additive_f32;
        params.mask.data = mask->data();
        params.mask.row_stride = strides.token;
        params.mask.head_stride = strides.head;
        attention.mask_sequence_stride = strides.sequence;
    } else if (causal) {
        params.mask.kind = Mask::Kind::causal;
    }
    if (sink_logits) params.sink_logits = sink_logits->data();
    const nb::gil_scoped_release unlocked;
    batch.attend(attention, workspace, *thread_executor(threads));
}

void update_query_stats(Batch& batch, const QueriesSeen& q, std::optional<std::uint32_t> sequence,
                        std::uint32_t tokens) {
    const std::uint32_t head_dim = batch.plan().shape().head_dim;
    const auto queries = static_cast<std::uint32_t>(q.shape(2));
    const auto heads = static_cast<std::uint32_t>(q.shape(1));
    const BatchStrides strides = strides_of(q, "q");
    if (sequence) {
        check(q.shape(0) == 1 && q.shape(3) == head_dim,
              "q of one sequence must be [1, heads, queries, ", head_dim, "]");
        batch.update_query_stats(*sequence,
                                 {q.data(), strides.token, strides.head, queries, heads, tokens});
        return;
    }
    check_queries(batch, q);
    batch.update_query_stats(q.data(), strides, queries, heads, tokens);
}

void mark_padding(Batch& batch, const Seen& seen) {
    batch.mark_padding({reinterpret_cast<const std::uint8_t*>(seen.data()), seen.size()},
                       static_cast<std::uint32_t>(seen.shape(1)));
}

std::span<const std::byte> bytes_of(const Image& image) {
    return {reinterpret_cast<const std::byte*>(image.data()), image.shape(0)};
}

NewImage save(const Batch& batch) {
    auto image = std::make_unique<std::vector<std::byte>>();
    {
        const nb::gil_scoped_release unlocked;
        *image = batch.save();
    }
    const nb::capsule owner(image.get(), [](void* bytes) noexcept {
        delete static_cast<std::vector<std::byte>*>(bytes);
    });
    std::vector<std::byte>& bytes = *image.release();
    return NewImage(reinterpret_cast<std::uint8_t*>(bytes.data()), {bytes.size()}, owner);
}

// Of a batch that was packed, and was given all its tokens at once.
std::size_t image_bytes(const Plan& plan, const Retention& asked, std::uint32_t tokens) {
    const Retention retention = batch_retention(plan, asked);
    ImageHeader header{image_identity(plan, retention), 1, tokens, {}, false};
    const PackedTokens range = packed_tokens(retention, plan.block_tokens(), tokens);
    auto first = static_cast<std::uint32_t>(range.first);
    auto end = static_cast<std::uint32_t>(range.end);
    if (plan.scheme().exact() || first == end) first = end = 0;
    if (first > 0) header.spans.push_back({0, first, false});
    if (first < end) header.spans.push_back({first, end - first, true});
    if (end < tokens) header.spans.push_back({end, tokens - end, false});
    return lay_out(header).bytes;
}

void bind_images(nb::module_& m) {
    nb::class_<ImageHeader>(m, "ImageHeader", "What an image says of itself.")
        .def_prop_ro("layer", [](const ImageHeader& h) { return h.identity.layer; })
        .def_prop_ro("kv_heads", [](const ImageHeader& h) { return h.identity.shape.kv_heads; })
        .def_prop_ro("head_dim", [](const ImageHeader& h) { return h.identity.shape.head_dim; })
        .def_prop_ro("rows", [](const ImageHeader& h) { return h.identity.rows; })
        .def_ro("sequences", &ImageHeader::batch)
        .def_ro("tokens", &ImageHeader::tokens)
        .def_prop_ro(
            "bytes", [](const ImageHeader& h) { return lay_out(h).bytes; },
            "Of the image; more may follow.");
    m.def(
        "read_image", [](const Image& image) { return read_image(bytes_of(image)); },
        "image"_a.noconvert(),
        "The header of what the uint8 array begins with. Raises Error where that is no image, cut "
        "off, damaged, or does not hold together.");
    m.def("image_bytes", &image_bytes, "plan"_a, "retention"_a, "tokens"_a,
          "Bytes of the image of one sequence that was given so many tokens at once, and packed.");
}

void bind_rows(nb::class_<Batch>& batch) {
    batch
        .def("mark_padding", &mark_padding, "seen"_a.noconvert(),
             "Which of the newest tokens are padding, False in [sequences, tokens]: they are in "
             "nobody's window, and no sinks.")
        .def("append", &append, "keys"_a.noconvert(), "values"_a.noconvert(),
             "Adds rows [sequences, kv_heads, tokens, head_dim] of float32, float16 or bfloat16, "
             "on the CPU or on the batch's CUDA device. Nothing is packed by it.")
        .def(
            "pack",
            [](Batch& b, std::uint32_t spared, unsigned threads, std::size_t budget) {
                const nb::gil_scoped_release unlocked;
                b.pack(spared, *thread_executor(threads), budget);
            },
            "spared"_a, "threads"_a, "budget"_a = 0,
            "Packs what has left the window, sparing the newest `spared` tokens beside; above 0, "
            "only while more than `budget` bytes are held, the oldest with the fewest bits.")
        .def("attend", &attend, "q"_a.noconvert(), "out"_a.noconvert(), "first"_a,
             "mask"_a.noconvert().none(), "causal"_a, "window"_a, "scale"_a, "softcap"_a,
             "sink_logits"_a.noconvert().none(), "threads"_a,
             "Attention of the newest tokens' queries, [sequences, heads, queries, head_dim], to "
             "tokens from `first` on. Writes out, shaped like q. mask: added to the scores, "
             "[sequences or 1, heads or 1, queries, tokens - first], or None; then causal and "
             "window (0: none) say what is seen. sink_logits: [heads], in the softmax without "
             "values, or None. All are on the CPU, or all on the batch's CUDA device.")
        .def("update_query_stats", &update_query_stats, "q"_a.noconvert(),
             "sequence"_a = nb::none(), "tokens"_a = 1,
             "Queries [sequences, heads, queries, head_dim] that attend to what pack() will pack, "
             "which weighs channels by them while `wants_queries`; the newest ones of a call are "
             "enough, `queries_enough` of them. sequence: q is of this one alone, [1, heads, "
             "queries, head_dim]. tokens: so many that each of the queries stands for, as their "
             "root mean squares.")
        .def_prop_ro("wants_queries", &Batch::wants_queries,
                     "Whether update_query_stats() would change anything in any sequence.")
        .def_prop_ro_static("queries_enough", [](nb::handle) { return QueryEnergy::enough; })
        .def("read", &read, "first"_a, "keys"_a.noconvert(), "values"_a.noconvert(), "threads"_a,
             "sequence"_a = 0,
             "Writes the rows of tokens from `first` on, of sequences from `sequence` on, decoded "
             "where they are packed: on the CPU, or on the batch's CUDA device.");
}

void bind_steps(nb::class_<Batch>& batch) {
    batch
        .def(
            "select", [](Batch& b, const std::vector<std::uint32_t>& rows) { b.select(rows); },
            "rows"_a, "Sequence i becomes what rows[i] was.")
        .def("fork", &Batch::fork, "Shares all blocks; whoever writes to one copies it.")
        .def("truncate", &Batch::truncate, "tokens"_a, "Keeps the first `tokens` tokens.")
        .def("drop_before", &Batch::drop_before, "token"_a,
             "Drops blocks whose tokens are all before `token`.")
        .def(
            "begin",
            [](Batch& b) {
                if (b.in_step()) b.commit();
                b.begin();
            },
            "Begins a step; an open one is committed.")
        .def("commit", &Batch::commit, "Ends a step, if one is open.")
        .def("rollback", &Batch::rollback, "Makes the batch what it was when the step began.")
        .def("save", &save, "Its image, uint8.")
        .def_static(
            "load",
            [](const Image& image, const std::shared_ptr<Store>& store,
               const std::shared_ptr<Plan>& plan, const Retention& retention) {
                const nb::gil_scoped_release unlocked;
                return Batch::load(bytes_of(image), store, plan, retention);
            },
            "image"_a.noconvert(), "store"_a, "plan"_a, "retention"_a,
            "The batch that save() wrote. Raises Error for an image that is damaged, of another "
            "plan or retention, or has its tokens elsewhere.");
}

}  // namespace

void bind_batch(nb::module_& m) {
    nb::class_<Batch> batch(m, "Batch", "The rows of one layer, for every sequence of a batch.");
    batch
        .def(
            "__init__",
            [](Batch* self, const std::shared_ptr<Store>& store, const std::shared_ptr<Plan>& plan,
               const Retention& retention, std::uint32_t sequences,
               const std::vector<std::shared_ptr<Plan>>& rungs) {
                new (self) Batch(store, plan, retention, sequences, {rungs.begin(), rungs.end()});
            },
            "store"_a, "plan"_a, "retention"_a, "sequences"_a,
            "rungs"_a = std::vector<std::shared_ptr<Plan>>(),
            "rungs: plans for pack() within a budget, the most bits first.")
        .def_prop_ro(
            "shape",
            [](const Batch& b) {
                const Shape& shape = b.plan().shape();
                return std::tuple(b.size(), shape.kv_heads, shape.head_dim);
            },
            "Sequences, kv_heads, head_dim.")
        .def_prop_ro(
            "dtype", [](const Batch& b) { return b.plan().rows(); }, "Of exact rows.")
        .def_prop_ro("tokens", &Batch::tokens)
        .def_prop_ro("first", &Batch::first, "Tokens before it have been dropped.")
        .def_prop_ro(
            "packed", [](const Batch& b) { return std::pair(b.packed_first(), b.packed_end()); },
            "The first packed token, and the first behind them.")
        .def_prop_ro(
            "bytes",
            [](const Batch& b) {
                const BatchBytes bytes = b.bytes();
                return std::pair(bytes.exact, bytes.packed);
            },
            "Held exact and packed, blocks that are shared with forks included.")
        .def_prop_ro("exact_tokens", &Batch::exact_tokens,
                     "Held exact, in the sequence that holds most so.");
    bind_rows(batch);
    bind_steps(batch);
    bind_images(m);
}

}  // namespace lowkv::python
