// lowkv._core: what lowkv/layer.py needs of the core library. Arguments are checked here once; the
// interpreter's lock is released while blocks are encoded or attended to.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>
#include <string>

#include "check.h"
#include "exact_rows.h"
#include "layer_blocks.h"
#include "lowkv/error.h"
#include "lowkv/implementation.h"
#include "lowkv/scheme.h"
#include "quantize.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lowkv::python {
namespace {

// f16 as its 16 bits: only the core's own codecs read it.
using Halves = nb::ndarray<std::uint16_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using PackedArray = nb::ndarray<const std::uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Tensor4 = nb::ndarray<float, nb::ndim<4>, nb::device::cpu>;
using ConstTensor4 = nb::ndarray<const float, nb::ndim<4>, nb::device::cpu>;
using Rows3 = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using ExactArray = nb::ndarray<nb::ro, nb::ndim<4>, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// One pool per number of threads that was ever asked for; torch.set_num_threads() is rarely called.
Executor& executor(unsigned threads) {
    static std::mutex mutex;
    static std::map<unsigned, std::unique_ptr<Executor>> pools;
    if (threads <= 1) return serial_executor();
    const std::scoped_lock lock(mutex);
    auto& pool = pools[threads];
    if (pool == nullptr) pool = make_thread_executor(threads);
    return *pool;
}

template <class T>
Strides strides_of(const T& tensor, const char* name) {
    check(tensor.shape(3) <= 1 || tensor.stride(3) == 1,
          std::string(name) + ": channels must lie side by side");
    return {static_cast<std::size_t>(tensor.stride(0)), static_cast<std::size_t>(tensor.stride(1)),
            static_cast<std::size_t>(tensor.stride(2))};
}

std::string shape_text(std::size_t rows, const std::string& blocks, std::size_t length) {
    return "[" + std::to_string(rows) + ", " + blocks + ", " + std::to_string(length) + "]";
}

// Checks an array of exact blocks and returns how many each row has.
std::size_t count_exact(const LayerBlocks& layer, const Halves& exact) {
    check(exact.shape(0) == layer.batch() && 2 * exact.shape(2) == layer.plan().exact_bytes(),
          "exact blocks must be " + shape_text(layer.batch(), "n", layer.plan().exact_bytes() / 2) +
              ", not " +
              shape_text(exact.shape(0), std::to_string(exact.shape(1)), exact.shape(2)));
    return exact.shape(1);
}

// Strides that repeat a dimension of length 1.
Strides mask_strides(const ConstTensor4& mask, const ConstTensor4& q, std::size_t cells) {
    const bool fits = (mask.shape(0) == q.shape(0) || mask.shape(0) == 1) &&
                      (mask.shape(1) == q.shape(1) || mask.shape(1) == 1) &&
                      mask.shape(2) == q.shape(2) && mask.shape(3) == cells;
    check(fits, "mask must be [1 or " + std::to_string(q.shape(0)) + ", 1 or " +
                    std::to_string(q.shape(1)) + ", " + std::to_string(q.shape(2)) + ", " +
                    std::to_string(cells) + "]");
    Strides strides = strides_of(mask, "mask");
    if (mask.shape(0) == 1) strides.batch = 0;
    if (mask.shape(1) == 1) strides.head = 0;
    return strides;
}

// Checks what both forms of attend() take.
Queries make_queries(const LayerBlocks& layer, std::size_t first, const ConstTensor4& q,
                     const Tensor4& out, const Rows3& log_sum, float scale, float softcap,
                     const std::optional<ConstTensor4>& mask) {
    const Plan& plan = layer.plan();
    Queries queries;
    queries.heads = static_cast<std::uint32_t>(q.shape(1));
    queries.tokens = static_cast<std::uint32_t>(q.shape(2));
    check(first <= layer.blocks(), "the first block is past the last");
    check(q.shape(0) == layer.batch() && q.shape(3) == plan.shape().head_dim,
          "q must be [" + std::to_string(layer.batch()) + ", heads, tokens, " +
              std::to_string(plan.shape().head_dim) + "]");
    check(queries.heads > 0 && queries.heads % plan.shape().kv_heads == 0,
          "the query heads, " + std::to_string(queries.heads) + ", must be a multiple of the " +
              std::to_string(plan.shape().kv_heads) + " kv heads");
    for (std::size_t i = 0; i < 4; ++i)
        check(out.shape(i) == q.shape(i), "out must have q's shape");
    check(log_sum.shape(0) == layer.batch() && log_sum.shape(1) == queries.tokens &&
              log_sum.shape(2) == queries.heads,
          "log_sum must be [batch, tokens, heads]");
    queries.q = q.data();
    queries.q_strides = strides_of(q, "q");
    queries.out = out.data();
    queries.out_strides = strides_of(out, "out");
    queries.log_sum = log_sum.data();
    if (mask) {
        queries.mask = mask->data();
        const std::size_t cells = (layer.blocks() - first) * plan.block_tokens();
        queries.mask_strides = mask_strides(*mask, q, cells);
    }
    queries.scale = scale;
    queries.softcap = softcap;
    return queries;
}

void attend(const LayerBlocks& layer, std::size_t first, const ConstTensor4& q, const Tensor4& out,
            const Rows3& log_sum, float scale, float softcap,
            const std::optional<ConstTensor4>& mask, unsigned threads) {
    const Queries queries = make_queries(layer, first, q, out, log_sum, scale, softcap, mask);
    const nb::gil_scoped_release unlocked;
    layer.attend(first, queries, executor(threads));
}

void attend_all(const LayerBlocks& layer, std::size_t first, const ConstTensor4& q,
                const Tensor4& out, const Rows3& log_sum, float scale, float softcap,
                const std::optional<ConstTensor4>& mask, ExactArray keys, ExactArray values,
                std::size_t first_row, std::size_t last_row, std::optional<ConstTensor4> row_mask,
                std::optional<Logits> sink_logits, unsigned threads) {
    const Queries queries = make_queries(layer, first, q, out, log_sum, scale, softcap, mask);
    const Shape& shape = layer.plan().shape();
    for (const ExactArray* rows : {&keys, &values}) {
        check(rows->shape(0) == layer.batch() && rows->shape(1) == shape.kv_heads &&
                  first_row <= last_row && last_row <= rows->shape(2) &&
                  rows->shape(3) == shape.head_dim,
              "keys and values must be [" + std::to_string(layer.batch()) + ", " +
                  std::to_string(shape.kv_heads) + ", at least " + std::to_string(last_row) + ", " +
                  std::to_string(shape.head_dim) + "]");
    }
    check(keys.dtype() == values.dtype(), "keys and values must have one dtype");
    check(!sink_logits || sink_logits->shape(0) == queries.heads, "sink_logits must be [heads]");
    with_floats(keys, "keys", [&]<class T>(const T* data) {
        ExactRows<T> rows;
        rows.count = last_row - first_row;
        rows.key_strides = strides_of(keys, "keys");
        rows.value_strides = strides_of(values, "values");
        rows.keys = data + first_row * rows.key_strides.token;
        rows.values = static_cast<const T*>(values.data()) + first_row * rows.value_strides.token;
        if (row_mask) {
            rows.mask = row_mask->data();
            rows.mask_strides = mask_strides(*row_mask, q, rows.count);
        }
        if (sink_logits) rows.sink_logits = sink_logits->data();
        const nb::gil_scoped_release unlocked;
        layer.attend(first, queries, executor(threads));
        join_exact(rows, queries, layer.batch(), shape.kv_heads, shape.head_dim, executor(threads));
    });
}

// What the llama.cpp plug-in and the core can do and this package can't is refused, not ignored.
Scheme served_scheme(const std::string& text) {
    Scheme scheme = parse_scheme(text);
    if (scheme.retention.filter != Filter::none) {
        throw Error(ErrorCode::unsupported,
                    "filter=, keep= and evict= are not served in transformers; leave them out");
    }
    if (scheme.any_layer(
            [](const LayerScheme& layer) { return layer.key.by_row() || layer.value.by_row(); })) {
        throw Error(ErrorCode::unsupported,
                    to_string(scheme) +
                        ": codecs of a token's row of all heads (row, static, reorder: skvq-*, "
                        "kvquant*) are not served in transformers; take lowkv2.8 or another");
    }
    return scheme;
}

std::shared_ptr<Plan> make_plan(const std::string& scheme, std::uint32_t layer,
                                std::uint32_t kv_heads, std::uint32_t head_dim) {
    return std::make_shared<Plan>(served_scheme(scheme).layer(layer), Shape{kv_heads, head_dim},
                                  std::string_view{}, layer);
}

void bind_scheme(nb::module_& m) {
    nb::class_<Scheme>(m, "Scheme", "What is stored; see parse_scheme().")
        .def_prop_ro(
            "window", [](const Scheme& s) { return s.retention.window; },
            "Newest tokens kept exact.")
        .def_prop_ro(
            "sinks", [](const Scheme& s) { return s.retention.sinks; }, "First tokens kept exact.")
        .def_prop_ro(
            "flush", [](const Scheme& s) { return s.retention.flush; },
            "Tokens that leave the window at a time; 0: block by block.")
        .def(
            "is_exact", [](const Scheme& s, std::uint32_t layer) { return s.layer(layer).exact(); },
            "layer"_a, "Whether this layer is never packed.")
        .def(
            "require_layers",
            [](const Scheme& s, std::uint32_t layers) { require_layers(s, layers); }, "layers"_a,
            "Raises Error when an override names a layer that a model of so many layers lacks.")
        .def("__str__", [](const Scheme& s) { return to_string(s); });
    m.def(
        "parse_scheme", &served_scheme, "text"_a,
        "A scheme from its text form. Raises Error with the legal words, or with what this package "
        "can't serve.");
    m.def(
        "presets",
        [] {
            nb::dict found;
            for (const Preset& p : presets()) {
                found[nb::cast(std::string(p.name))] = nb::cast(std::string(p.summary));
            }
            return found;
        },
        "Every preset's name and what it is for.");
    m.attr("default_scheme") = std::string(default_scheme);
    m.def(
        "implementation", [] { return std::string(active_implementation().name); },
        "The instruction set whose kernels run; LOWKV_IMPLEMENTATION forces one.");
}

void bind_plan(nb::module_& m) {
    nb::class_<Plan>(m, "Plan", "A layer's codecs compiled for one shape.")
        .def(nb::new_(&make_plan), "scheme"_a, "layer"_a, "kv_heads"_a, "head_dim"_a)
        .def_prop_ro("block_tokens", &Plan::block_tokens)
        .def_prop_ro("exact_bytes", &Plan::exact_bytes)
        .def_prop_ro("packed_bytes", &Plan::packed_bytes)
        .def_prop_ro("bits_per_element", &Plan::bits_per_element)
        .def_prop_ro("implementation",
                     [](const Plan& p) { return std::string(p.implementation()); });
}

void bind_blocks(nb::module_& m) {
    nb::class_<BlockMemory>(m, "BlockMemory", "What the packed blocks of one cache hold.")
        .def(nb::init<>())
        .def_prop_ro("bytes", [](const BlockMemory& s) { return s.bytes.load(); })
        .def_prop_ro("blocks", [](const BlockMemory& s) { return s.blocks.load(); })
        .def_prop_ro("encoded_blocks", [](const BlockMemory& s) { return s.encoded_blocks.load(); })
        .def_prop_ro("reopened_blocks",
                     [](const BlockMemory& s) { return s.reopened_blocks.load(); });

    nb::class_<LayerBlocks>(m, "LayerBlocks",
                            "The packed blocks of one layer, for every row of a batch.")
        .def(
            "__init__",
            [](LayerBlocks* self, std::shared_ptr<Plan> plan, std::size_t batch,
               std::shared_ptr<BlockMemory> memory) {
                new (self) LayerBlocks(std::move(plan), batch, std::move(memory));
            },
            "plan"_a, "batch"_a, "memory"_a)
        .def(
            "copy", [](const LayerBlocks& self) { return self; }, "Shares every block.")
        .def_prop_ro("batch", &LayerBlocks::batch)
        .def("__len__", &LayerBlocks::blocks, "Blocks per row.")
        .def(
            "append",
            [](LayerBlocks& self, const Halves& exact, unsigned threads) {
                const std::size_t count = count_exact(self, exact);
                const nb::gil_scoped_release unlocked;
                self.append(reinterpret_cast<const std::byte*>(exact.data()), count,
                            executor(threads));
            },
            "exact"_a.noconvert(), "threads"_a,
            "Packs exact blocks, f16 bits [batch, n, exact_bytes / 2], and appends them.")
        .def(
            "decode",
            [](const LayerBlocks& self, std::size_t first, const Halves& exact, unsigned threads) {
                const std::size_t count = count_exact(self, exact);
                const nb::gil_scoped_release unlocked;
                self.decode(first, count, reinterpret_cast<std::byte*>(exact.data()),
                            executor(threads));
            },
            "first"_a, "exact"_a.noconvert(), "threads"_a,
            "Writes blocks from `first` on as f16 bits into [batch, n, exact_bytes / 2].")
        .def("attend", &attend, "first"_a, "q"_a.noconvert(), "out"_a.noconvert(),
             "log_sum"_a.noconvert(), "scale"_a, "softcap"_a, "mask"_a.noconvert().none(),
             "threads"_a,
             "Attention of q [batch, heads, tokens, head_dim] over blocks from `first` on. Writes "
             "out, shaped like q, and log_sum [batch, tokens, heads]. mask: added to the scores, "
             "[batch or 1, heads or 1, tokens, cells], or None.")
        .def("attend_all", &attend_all, "first"_a, "q"_a.noconvert(), "out"_a.noconvert(),
             "log_sum"_a.noconvert(), "scale"_a, "softcap"_a, "mask"_a.noconvert().none(),
             "keys"_a.noconvert(), "values"_a.noconvert(), "first_row"_a, "last_row"_a,
             "row_mask"_a.noconvert().none(), "sink_logits"_a.noconvert().none(), "threads"_a,
             "The same over exact rows [first_row, last_row) of keys and values, [batch, kv_heads, "
             "room, head_dim], as well, for a few tokens. log_sum is of the packed blocks alone. "
             "sink_logits: [heads], in the softmax without values, or None.")
        .def(
            "select",
            [](LayerBlocks& self, const std::vector<std::size_t>& rows) { self.select(rows); },
            "rows"_a, "Row i becomes what rows[i] was.")
        .def("drop_front", &LayerBlocks::drop_front, "count"_a)
        .def("truncate", &LayerBlocks::truncate, "count"_a, "reopened"_a)
        .def(
            "packed",
            [](const LayerBlocks& self, std::size_t row, std::size_t block) {
                const auto bytes = self.packed(row, block);
                return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
            },
            "row"_a, "block"_a, "One packed block as it lies in memory.")
        .def(
            "append_packed",
            [](LayerBlocks& self, const PackedArray& packed) {
                check(packed.shape(0) == self.batch() &&
                          packed.shape(2) == self.plan().packed_bytes(),
                      "packed blocks must be " +
                          shape_text(self.batch(), "n", self.plan().packed_bytes()) + ", not " +
                          shape_text(packed.shape(0), std::to_string(packed.shape(1)),
                                     packed.shape(2)));
                self.append_packed(reinterpret_cast<const std::byte*>(packed.data()),
                                   packed.shape(1));
            },
            "packed"_a.noconvert(),
            "Appends blocks that packed() gave, uint8 [batch, n, packed_bytes].");
}

}  // namespace
}  // namespace lowkv::python

NB_MODULE(_core, m) {
    m.doc() = "The core library of lowkv: packed blocks and attention to them.";
    // Caches in a script's globals outlive the module at exit: nothing that a user could act on.
    nb::set_leak_warnings(false);
    nb::exception<lowkv::Error>(m, "Error", PyExc_ValueError).attr("__doc__") =
        "What lowkv can't do or was not given: the message says what was wrong and what would be "
        "right.";
    lowkv::python::bind_scheme(m);
    lowkv::python::bind_plan(m);
    lowkv::python::bind_blocks(m);
    lowkv::python::bind_quantize(m);
}
