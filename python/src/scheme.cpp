// Schemes, presets and plans for Python.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "bind.h"
#include "lowkv/codec.h"
#include "lowkv/error.h"
#include "lowkv/implementation.h"
#include "lowkv/scheme.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lowkv::python {
namespace {

// What the llama.cpp plug-in and the core can do and this package can't is refused, not ignored. A
// chunk of LMCache's does not say where in its sequence it is: tokens stay exact only by name.
Scheme served_scheme(const std::string& text, Host host) {
    const Retention packed{.window = 0, .sinks = 0};
    Scheme scheme = parse_scheme(text, host == Host::lmcache ? &packed : nullptr);
    require_served(scheme, host);
    return scheme;
}

// Sinks make no sense where nothing is packed, and in a window that slides past them.
Retention retention_of(const Scheme& scheme, std::uint32_t layer, bool sliding) {
    Retention retention = scheme.retention;
    if (sliding || scheme.layer(layer).exact()) retention.sinks = 0;
    return retention;
}

// Of RowType.float32, or of torch.float32.
RowType row_type_named(const nb::object& given) {
    const std::string text = nb::str(given).c_str(), word = text.substr(text.rfind('.') + 1);
    const nb::handle types = nb::type<RowType>();
    if (!nb::hasattr(types, word.c_str()))
        throw Error(ErrorCode::invalid_argument, "rows of ", text,
                    "; lowkv takes float32, float16 and bfloat16");
    return nb::cast<RowType>(types.attr(word.c_str()));
}

void bind_plan(nb::module_& m) {
    nb::enum_<RowType>(m, "RowType", "Of the elements of exact rows, named as torch does.")
        .value("float32", RowType::f32)
        .value("float16", RowType::f16)
        .value("bfloat16", RowType::bf16);
    nb::class_<Plan>(m, "Plan", "A layer's codecs compiled for one shape and one type of rows.")
        .def(nb::new_([](const Scheme& scheme, std::uint32_t layer, std::uint32_t kv_heads,
                         std::uint32_t head_dim, const nb::object& rows) {
                 return std::make_shared<Plan>(scheme.layer(layer), Shape{kv_heads, head_dim},
                                               std::string_view{}, layer,
                                               LayerInputs{.rows = row_type_named(rows)});
             }),
             "scheme"_a, "layer"_a, "kv_heads"_a, "head_dim"_a, "rows"_a,
             "rows: the type of those that stay exact, a RowType or torch's of that name. Raises "
             "Error for others.")
        .def_prop_ro("block_tokens", &Plan::block_tokens)
        .def_prop_ro("packed_bytes", &Plan::packed_bytes)
        .def_prop_ro("exact_bytes", &Plan::exact_bytes)
        .def_prop_ro("implementation",
                     [](const Plan& p) { return std::string(p.implementation()); });
}

}  // namespace

void bind_scheme(nb::module_& m) {
    nb::class_<Retention>(m, "Retention", "Which of a layer's tokens stay exact.")
        .def(
            "__init__",
            [](Retention* self, std::uint32_t window, std::uint32_t sinks, std::uint32_t flush) {
                new (self) Retention{.window = window, .sinks = sinks, .flush = flush};
            },
            "window"_a, "sinks"_a, "flush"_a,
            "The newest and the first tokens that stay exact; how many leave the window at a time, "
            "0 for block by block.")
        .def_ro("window", &Retention::window)
        .def_ro("sinks", &Retention::sinks)
        .def(
            "most_unquantized_blocks",
            [](const Retention& r, std::uint32_t block_tokens) {
                return most_blocks(r, block_tokens, 1, std::uint64_t{1} << 40).unquantized;
            },
            "block_tokens"_a, "Of one sequence, at any length.");
    nb::class_<Scheme>(m, "Scheme", "What is stored; see parse_scheme().")
        .def("retention", &retention_of, "layer"_a, "sliding"_a,
             "Of one layer; sliding: it has a sliding window.")
        .def(
            "exact", [](const Scheme& s, std::uint32_t layer) { return s.layer(layer).exact(); },
            "layer"_a, "Whether nothing of a layer is quantized.")
        .def_prop_ro(
            "by_layer", [](const Scheme& s) { return !s.overrides.empty(); },
            "Whether it names layers, so that they may be stored by several codecs.")
        .def(
            "require_layers",
            [](const Scheme& s, std::uint32_t layers) { require_layers(s, layers); }, "layers"_a,
            "Raises Error when an override names a layer that a model of so many layers lacks.")
        .def(
            "rungs",
            [](const Scheme& s) {
                std::vector<Scheme> schemes;
                for (const LayerScheme& rung : rungs_before(s, "budget"))
                    schemes.push_back({rung, s.retention, {}});
                return schemes;
            },
            "What tokens are packed by before it, within a budget: the most bits first. Raises "
            "Error where no budget ends with this scheme.")
        .def("__str__", [](const Scheme& s) { return to_string(s); });
    m.def(
        "parse_size", [](const std::string& text) { return parse_size(text, "budget"); }, "text"_a,
        "Bytes: '24MiB', '1.5GiB', '16G', '2000000000'. Raises Error for anything else.");
    nb::enum_<Host>(m, "Host", "Who is to serve a scheme.")
        .value("python", Host::python)
        .value("vllm", Host::vllm)
        .value("lmcache", Host::lmcache);
    m.def("parse_scheme", &served_scheme, "text"_a, "host"_a = Host::python,
          "A scheme from its text form. Raises Error with the legal words, or with what the host "
          "can't serve.");
    m.def(
        "unserved",
        [](const std::string& text, Host host) { return unserved(parse_scheme(text), host); },
        "text"_a, "host"_a, "Why a host can't serve a scheme; empty if it can.");
    m.def(
        "presets",
        [] {
            nb::dict found;
            for (const Preset& p : presets())
                found[nb::cast(std::string(p.name))] = nb::cast(std::string(p.summary));
            return found;
        },
        "Every preset's name and what it is for.");
    m.attr("default_scheme") = std::string(default_scheme);
    m.def(
        "implementation", [] { return std::string(active_implementation().name); },
        "The instruction set whose kernels run; LOWKV_IMPLEMENTATION forces one.");
    bind_plan(m);
}

}  // namespace lowkv::python
