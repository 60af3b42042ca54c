// lowkv._core: what the package lowkv needs of the core library. Arguments are checked here once;
// the interpreter's lock is released while blocks are packed or attended to.

#include <nanobind/nanobind.h>

#include "bind.h"
#include "lowkv/error.h"

namespace nb = nanobind;

NB_MODULE(_core, m) {
    m.doc() = "The core library of lowkv: a layer's rows, packed and exact, and attention to them.";
    // Caches in a script's globals outlive the module at exit: nothing that a user could act on.
    nb::set_leak_warnings(false);
    nb::exception<lowkv::Error>(m, "Error", PyExc_ValueError).attr("__doc__") =
        "What lowkv can't do or was not given: the message says what was wrong and what would be "
        "right.";
    lowkv::python::bind_scheme(m);
    lowkv::python::bind_store(m);
    lowkv::python::bind_batch(m);
    lowkv::python::bind_paged(m);
}
