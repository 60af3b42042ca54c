// Pages of a host that has its own table of them, for Python: vLLM's blocks.

#include "lowkv/paged.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "arguments.h"
#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

// It holds what lies beside a host's memory: there is no copy of that.
template <>
struct nb::detail::is_copy_constructible<lowkv::PagedLayer> : std::false_type {};

namespace lowkv::python {
namespace {

using Pages = nb::ndarray<std::uint8_t, nb::ndim<4>, nb::device::cpu>;
// [token][head][channel]
using TokenRows = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<3>, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<3>, nb::device::cpu>;
using PerHead = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu>;

// The sequences of a step, for all layers that share a table.
struct PagedStep {
    std::vector<std::int32_t> pages;
    std::vector<PagedSequence> sequences;
    std::size_t tokens = 0;

    PagedStep(const Ints& query_start, const Ints& lengths, const Table& table,
              std::uint32_t page_tokens) {
        const std::size_t count = lengths.shape(0);
        check(page_tokens > 0, "page_tokens must be above 0");
        check(query_start.shape(0) == count + 1 && table.shape(0) >= count,
              "query_start must have one number more than lengths, the table as many rows");
        check(table.shape(1) <= 1 || table.stride(1) == 1, "the table's rows must be contiguous");
        std::size_t total = 0;
        const auto pages_of = [&](std::size_t i) {
            check(lengths(i) >= 0, "a length below 0");
            return (static_cast<std::size_t>(lengths(i)) + page_tokens - 1) / page_tokens;
        };
        for (std::size_t i = 0; i < count; ++i) {
            check(pages_of(i) <= table.shape(1), "a sequence has more pages than the table");
            total += pages_of(i);
        }
        pages.resize(total);
        std::int32_t* out = pages.data();
        for (std::size_t i = 0; i < count; ++i) {
            const std::int32_t first = query_start(i), end = query_start(i + 1);
            check(first >= 0 && first <= end && end - first <= lengths(i),
                  "query_start does not fit the lengths");
            const std::int32_t* row =
                table.data() + static_cast<std::ptrdiff_t>(i) * table.stride(0);
            PagedSequence& sequence = sequences.emplace_back();
            sequence.pages = {out, pages_of(i)};
            sequence.cells = static_cast<std::uint32_t>(lengths(i));
            sequence.queries = static_cast<std::uint32_t>(end - first);
            sequence.first_query = static_cast<std::uint32_t>(first);
            out = std::copy_n(row, pages_of(i), out);
            tokens = static_cast<std::size_t>(end);
        }
    }
};

PageMemory memory_of(const Pages& pages, bool whole) {
    for (std::size_t i = 1; i < 4; ++i) {
        std::int64_t inner = 1;
        for (std::size_t j = i + 1; j < 4; ++j) inner *= static_cast<std::int64_t>(pages.shape(j));
        check(pages.shape(i) <= 1 || pages.stride(i) == inner, "a page must be contiguous");
    }
    check(pages.shape(0) < UINT32_MAX, "too many pages");
    return {reinterpret_cast<std::byte*>(pages.data()), static_cast<std::size_t>(pages.stride(0)),
            static_cast<std::uint32_t>(pages.shape(0)), whole};
}

template <class Array>
void check_shape(const PagedLayer& layer, const Array& array, std::size_t tokens,
                 const char* name) {
    check(array.shape(0) >= tokens && array.shape(2) == layer.plan().shape().head_dim, name,
          " must be [", tokens, " or more, heads, ", layer.plan().shape().head_dim, "]");
    check(array.shape(2) <= 1 || array.stride(2) == 1, name, ": channels must lie side by side");
}

Rows rows_of(const PagedLayer& layer, const TokenRows& rows, std::size_t tokens, const char* name) {
    check_shape(layer, rows, tokens, name);
    check(rows.shape(1) == layer.plan().shape().kv_heads, name, " must have ",
          layer.plan().shape().kv_heads, " heads");
    check(row_type(rows, name) == layer.plan().rows(), name,
          " must have the type of the plan's rows");
    return {rows.data(), layer.plan().rows(), static_cast<std::size_t>(rows.stride(1)),
            static_cast<std::size_t>(rows.stride(0))};
}

void write(PagedLayer& layer, const TokenRows& keys, const TokenRows& values, const Slots& slots) {
    const std::size_t tokens = slots.shape(0);
    const Rows k = rows_of(layer, keys, tokens, "keys");
    const Rows v = rows_of(layer, values, tokens, "values");
    const nb::gil_scoped_release unlocked;
    layer.write(k, v, {slots.data(), tokens});
}

const float* per_head(const std::optional<PerHead>& given, const Floats& q, const char* name) {
    if (!given) return nullptr;
    check(given->shape(0) == q.shape(1), name, " must be [heads]");
    return given->data();
}

void attend(PagedLayer& layer, const PagedStep& step, const Floats& q, const FloatsOut& out,
            float scale, float softcap, unsigned threads,
            const std::optional<PerHead>& alibi_slopes, const std::optional<PerHead>& sink_logits) {
    static thread_local AttentionWorkspace workspace;
    check_shape(layer, q, step.tokens, "q");
    check_shape(layer, out, step.tokens, "out");
    check(out.shape(1) == q.shape(1), "out must have q's heads");
    AttentionIO io;
    io.q = q.data();
    io.q_token_stride = static_cast<std::size_t>(q.stride(0));
    io.q_head_stride = static_cast<std::size_t>(q.stride(1));
    io.out = out.data();
    io.out_token_stride = static_cast<std::size_t>(out.stride(0));
    io.out_head_stride = static_cast<std::size_t>(out.stride(1));
    io.heads = static_cast<std::uint32_t>(q.shape(1));
    AttentionParams params;
    params.scale = scale;
    params.softcap = softcap;
    params.alibi_slopes = per_head(alibi_slopes, q, "alibi_slopes");
    params.sink_logits = per_head(sink_logits, q, "sink_logits");
    const std::unique_ptr<Executor> executor = openmp_executor(threads);
    const nb::gil_scoped_release unlocked;
    layer.attend(step.sequences, io, params, workspace, *executor);
}

}  // namespace

void bind_paged(nb::module_& m) {
    m.def("page_bytes", &PagedLayer::page_bytes, "plan"_a, "page_tokens"_a,
          "What a page takes of the host's memory. Raises Error for pages that are no whole number "
          "of the plan's blocks.");
    m.def("whole_page_bytes", &PagedLayer::whole_page_bytes, "plan"_a, "page_tokens"_a, "sinks"_a,
          "What a page takes that has its sequence's first rows and says what it was packed with.");
    nb::class_<PagedStats>(m, "PagedStats", "What lies beside a layer's pages, and what was done.")
        .def_ro("exact_pages", &PagedStats::exact_pages, "With exact rows beside them, now.")
        .def_ro("most_exact_pages", &PagedStats::most_exact_pages)
        .def_ro("exact_bytes", &PagedStats::exact_bytes)
        .def_ro("sink_bytes", &PagedStats::sink_bytes)
        .def_ro("packed", &PagedStats::packed, "Pages, since the layer was made.")
        .def_ro("reopened", &PagedStats::reopened, "Decoded again, to be written again.")
        .def_ro("evicted", &PagedStats::evicted, "Packed before they were full.")
        .def_ro("replaced", &PagedStats::replaced, "Overwritten by someone else.");
    nb::class_<PagedStep>(m, "PagedStep", "The sequences of a step, for all layers of one table.")
        .def(nb::init<const Ints&, const Ints&, const Table&, std::uint32_t>(),
             "query_start"_a.noconvert(), "lengths"_a.noconvert(), "table"_a.noconvert(),
             "page_tokens"_a,
             "query_start: where each sequence's queries begin, and their end; lengths: its "
             "tokens, those of the step included; table: its pages, in order. All int32.");
    nb::class_<PagedLayer>(m, "PagedLayer", "One layer's cache in pages.")
        .def(
            "__init__",
            [](PagedLayer* self, const std::shared_ptr<Store>& store,
               const std::shared_ptr<Plan>& plan, const Retention& retention, std::uint32_t sliding,
               std::uint32_t page_tokens, const Pages& pages, std::uint32_t spare, bool whole) {
                check(&store->device() == cpu_device().get(),
                      "pages of the host's memory need a store on the CPU, not on '",
                      store->device().name(), "'");
                new (self) PagedLayer(store, plan, retention, sliding, page_tokens,
                                      memory_of(pages, whole), spare);
            },
            "store"_a, "plan"_a, "retention"_a, "sliding"_a, "page_tokens"_a, "pages"_a.noconvert(),
            "spare"_a, "whole"_a = false, nb::keep_alive<1, 7>(),
            "pages: uint8 [pages, ...], each contiguous; held. sliding: how many tokens a query "
            "sees, 0 for all. spare: pages that may keep exact rows though no sequence of the last "
            "step needs them. whole: pages may come from elsewhere as bytes; they take "
            "whole_page_bytes().")
        .def(
            "__init__",
            [](PagedLayer* self, const std::shared_ptr<Store>& store,
               const std::shared_ptr<Plan>& plan, const Retention& retention, std::uint32_t sliding,
               std::uint32_t page_tokens, std::uint32_t pages, std::uint32_t spare) {
                new (self) PagedLayer(store, plan, retention, sliding, page_tokens,
                                      {.pages = pages}, spare);
            },
            "store"_a, "plan"_a, "retention"_a, "sliding"_a, "page_tokens"_a, "pages"_a, "spare"_a,
            "The same in memory that the layer takes of the store's device, for so many pages.")
        .def_prop_ro("stats", &PagedLayer::stats)
        .def("write", &write, "keys"_a.noconvert(), "values"_a.noconvert(), "slots"_a.noconvert(),
             "Rows [tokens, kv_heads, head_dim] to cells slots[i], int64: page times page_tokens "
             "and the row; below 0 to none.")
        .def("attend", &attend, "step"_a, "q"_a.noconvert(), "out"_a.noconvert(), "scale"_a,
             "softcap"_a, "threads"_a, "alibi_slopes"_a.noconvert() = nb::none(),
             "sink_logits"_a.noconvert() = nb::none(),
             "Causal attention of [tokens, heads, head_dim] float32, written to out; then full "
             "pages are packed. alibi_slopes, sink_logits: float32 [heads], or None. Runs on the "
             "process's OpenMP threads.");
}

}  // namespace lowkv::python
