"""A ggml that lowkv does not know: made of the newest known one, with a number that is newer and something changed. The
trial takes those in which all is where it was, and refuses the others, however they end it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from plugin_tools import PATHS, PLUGIN, environment
from test_smoke import COMMAND, NAMES

pytestmark = pytest.mark.skipif("trial" not in NAMES, reason="LOWKV_MATRIX does not name it: make test-trial")

TREE = Path(PATHS["LOWKV_LLAMA_SOURCE"]) / "ggml"
TRIAL = COMMAND.with_name("lowkv-trial")
VERSION = "0.99"  # and the same last number
TENSOR, TABLES, OPERATIONS = "include/ggml.h", "src/ggml-backend-impl.h", "src/ggml.c"
# What is changed: file, what is there, what comes instead. Then what the trial says: None where it fits.
CHANGES = {
    "its number alone": ([], None),
    "an operation before all others": (
        [(TENSOR, "        GGML_OP_DUP,\n", "        GGML_OP_FIRST,\n        GGML_OP_DUP,\n"),
         (OPERATIONS, '    "DUP",\n', '    "FIRST",\n    "DUP",\n'),
         (OPERATIONS, '    "x",\n', '    "f(x)",\n    "x",\n'),
         *2 * [(OPERATIONS, "GGML_OP_COUNT == 101", "GGML_OP_COUNT == 102")]], None),
    "two fields of a tensor the other way round": (
        [(TENSOR, "        struct ggml_tensor * view_src;\n        size_t               view_offs;\n",
          "        size_t               view_offs;\n        struct ggml_tensor * view_src;\n"),
         (OPERATIONS, "/*.view_src     =*/ view_src,\n        /*.view_offs    =*/ view_offs,",
          "/*.view_offs    =*/ view_offs,\n        /*.view_src     =*/ view_src,")], "a view lies elsewhere"),
    "a field in a tensor": ([(TENSOR, "        void * data;\n\n        char name",
                              "        void * data;\n        void * more[4];\n\n        char name")], ""),
    "a function in a buffer type's table": (
        [(TABLES, "        size_t                (*get_alignment)",
          "        size_t                (*get_other)(ggml_backend_buffer_type_t buft);\n"
          "        size_t                (*get_alignment)"),
         ("src", "/* .get_alignment", "NULL, /* .get_alignment")], ""),
    "a function in a backend's table": (
        [(TABLES, "        enum ggml_status          (*graph_compute)",
          "        void (*other)(ggml_backend_t backend);\n        enum ggml_status          (*graph_compute)"),
         ("src", "/* .graph_compute", "NULL, /* .graph_compute")], ""),
    "masks of another type": (
        [(OPERATIONS, "(mask->type == GGML_TYPE_F16);\n        GGML_ASSERT(ggml_is_contiguous(mask));\n",
          "(mask->type == GGML_TYPE_F32);\n")], ""),
}


def built(source, build):
    """The folder of a ggml's libraries, without kernels: the trial computes by lowkv's."""
    (source / "ggml.pc.in").touch()  # which PyPI's archive lacks
    options = ["CMAKE_BUILD_TYPE=None", "CMAKE_CXX_FLAGS=-O1 -DNDEBUG", "CMAKE_C_FLAGS=-O1 -DNDEBUG",
               "GGML_NATIVE=OFF", "GGML_LLAMAFILE=OFF", "GGML_BUILD_TESTS=OFF", "GGML_BUILD_EXAMPLES=OFF",
               f"CMAKE_LIBRARY_OUTPUT_DIRECTORY={build}/bin"]
    subprocess.run(["cmake", "-S", source, "-B", build, *("-D" + option for option in options)], check=True,
                   capture_output=True)
    subprocess.run(["cmake", "--build", build, "-j", "2", "--target", "ggml"], check=True, capture_output=True)
    return build / "bin"


def changed(folder, changes):
    """The libraries of a ggml with these changes."""
    source = folder / "ggml"
    shutil.copytree(TREE, source)
    lists = source / "CMakeLists.txt"
    lists.write_text(re.sub(r"(set\(GGML_VERSION_MINOR) \d+", rf"\1 {VERSION.split('.')[1]}", lists.read_text()))
    for name, old, new in changes:
        file = source / name
        if file.is_file():
            assert old in file.read_text(), (name, old)
            file.write_text(file.read_text().replace(old, new, 1))
            continue
        for one in (*file.glob("*.cpp"), *file.glob("ggml-cpu/*.cpp")):  # in all tables
            one.write_text(one.read_text().replace(old, new))
    return built(source, folder / "build")


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_ggml(change, tmp_path):
    changes, says = CHANGES[change]
    libraries = changed(tmp_path, changes)
    done = subprocess.run([TRIAL, PLUGIN], env=environment(None, LD_LIBRARY_PATH=str(libraries)), capture_output=True,
                          text=True, timeout=60)
    if says is None:
        assert (done.returncode, done.stdout.startswith(VERSION)) == (0, True), done.stderr[-2000:]
    else:
        assert done.returncode != 0, done.stdout
        assert says in done.stdout, done.stdout
    print(f"{change}: {done.returncode} {done.stdout.strip()}")


def test_a_known_ggml_is_not_tried():
    done = subprocess.run([TRIAL, PLUGIN], env=environment(None), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
