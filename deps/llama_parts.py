"""llama.cpp in the releases and builds that lowkv is built for and tested with."""

import re
import shutil
import sys
import tarfile
from pathlib import Path

from part import HERE, PYTHON, Part, cmake, pip_download
from tools import SetupError, compiler_identity, download, jobs, require, run, say, sha256

# ggml's version -> the newest release of llama-cpp-python whose source archive carries it.
RELEASES = {
    "0.10.2": ("0.3.22", "93c54af95d917fe6d6d70039efe16ca9240634d11010f5aaf795261b9f43042f"),
    "0.11.1": ("0.3.23", "85493cd887b543588941e8704640fef6a54c057443292e527559c30728375ffd"),
    "0.13.1": ("0.3.28", "958227b394f413425d6039952096daa0b8b98328c6b99d652862aec775f1672d"),
    "0.15.1": ("0.3.30", "798c9b42652d2e0bff5fe81e7e762089f425a99e67f66ffe5ae156957876e0d1"),
    "0.15.2": ("0.3.31", "c3fd23b2c7197770321020a89f23c6515a366511dce4fcda1e81cfb749267a94"),
    "0.15.3": ("0.3.33", "369ba03d02caaef42c1ed07bbdc454f7436e47c7675b8b9757fa13fbac6acd92"),
    "0.16.0": ("0.3.34", "d849d286d808284f1d3ec1bd6875572430d29d1f9574a010232caa4e9cef0e35"),
    "0.20.0": ("0.3.35", "1139dbb54509074b70893fab8554e3b079aa9f4d312058ce4018ef0019e3de12"),
    "0.25.3": ("0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"),
}


def unpack_llama(setup, release, digest, target, wanted=None):
    """llama.cpp's tree out of a source archive of llama-cpp-python; `wanted` says which of its files."""
    archive = download(
        setup.downloads, f"llama_cpp_python-{release}.tar.gz", digest,
        # Only this package from source: ":all:" would build pip's own build tools from source.
        pip_download(setup, f"llama-cpp-python=={release}", ["--no-binary", "llama-cpp-python"]))
    unpacked = target.parent / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    tree = Path(f"llama_cpp_python-{release}") / "vendor" / "llama.cpp"
    with tarfile.open(archive) as tar:
        members = [x for x in tar if Path(x.name).is_relative_to(tree)]
        if wanted:
            members = [x for x in members if wanted(str(Path(x.name).relative_to(tree)))]
        tar.extractall(unpacked, members)
    (unpacked / tree).rename(target)
    shutil.rmtree(unpacked)


class GgmlHeaders(Part):
    """What the plug-in needs of a ggml to be compiled for it (deps/plugin_for.py)."""

    needs = ("venv-pip",)

    def __init__(self, ggml):
        self.name, self.about = f"ggml-{ggml}", f"the headers of ggml {ggml}"
        self.release, self.digest = RELEASES[ggml]

    def inputs(self, setup):
        return {"sha256": self.digest}

    def make(self, setup, folder):
        target = folder / "llama.cpp"
        shutil.rmtree(target, ignore_errors=True)
        unpack_llama(setup, self.release, self.digest, target,
                     lambda path: path.startswith(("ggml/include/", "vendor/nlohmann/"))
                     or re.fullmatch(r"ggml/(src/[^/]*\.h|CMakeLists\.txt)", path))


class Llama(Part):
    name = "llama"
    about = "llama.cpp's tools (about 5 minutes)"
    needs = ("llama-libraries",)
    VERSION, SHA256 = RELEASES["0.25.3"]
    TARGETS = "llama-batched-bench llama-bench llama-completion llama-perplexity llama-server llama-quantize".split()
    OPTIONS = (
        "CMAKE_BUILD_TYPE=Release BUILD_SHARED_LIBS=ON CMAKE_BUILD_RPATH_USE_ORIGIN=ON "
        "LLAMA_OPENSSL=OFF LLAMA_BUILD_UI=OFF LLAMA_USE_PREBUILT_UI=OFF LLAMA_BUILD_TESTS=OFF "
        "LLAMA_BUILD_EXAMPLES=OFF LLAMA_BUILD_APP=OFF GGML_OPENMP=ON GGML_NATIVE=ON GGML_CCACHE=OFF"
    ).split()

    def inputs(self, setup):
        compiler, cpu = compiler_identity()
        return {"sha256": self.SHA256, "options": self.OPTIONS, "targets": self.TARGETS,
                "compiler": compiler, "cpu": cpu}

    def make(self, setup, folder):
        require("make", "it runs the builds")
        source, build = folder / "llama.cpp", folder / "build"
        if not source.exists():
            say(f"{self.name}: unpacking")
            unpack_llama(setup, self.VERSION, self.SHA256, source)
        log = folder / "build.log"
        resumed = build.exists()
        try:
            self.build(cmake(setup), source, build, log)
        except SetupError:
            if not resumed:
                raise
            say(f"{self.name}: the interrupted build can't be continued; starting it over")
            for other in folder.glob(".*"):  # stamps
                other.unlink()
            shutil.rmtree(build)
            self.build(cmake(setup), source, build, log)

    def build(self, tool, source, build, log):
        options = [f"-D{option}" for option in self.OPTIONS]
        run([tool, "-S", source, "-B", build, "-G", "Unix Makefiles", *options], log, f"{self.name}: configuring")
        run([tool, "--build", build, "-j", jobs(), "--target", *self.built()], log, f"{self.name}: building")

    def built(self):
        return self.TARGETS

    def paths(self, setup, folder):
        listing = (folder / "llama.cpp" / "ggml" / "CMakeLists.txt").read_text()
        version = [re.search(rf"set\(GGML_VERSION_{x} +(\d+)", listing)[1] for x in ("MAJOR", "MINOR", "PATCH")]
        return {"LOWKV_LLAMA_SOURCE": folder / "llama.cpp", "LOWKV_LLAMA_BUILD": folder / "build" / "bin",
                "LOWKV_GGML_VERSION": ".".join(version)}


class LlamaLibraries(Llama):
    """The least that lowkv is built on. The tools are built later, in the same folder."""

    name, home, stamp = "llama-libraries", "llama", ".libraries"
    about = "llama.cpp's libraries, from the source archive of llama-cpp-python (about 2 minutes)"
    needs = ("venv-pip",)

    def built(self):
        return ("llama",)


class LlamaCppPython(Part):
    name = "llama-cpp-python"
    about = "llama-cpp-python, built from the same archive (about 10 minutes), for make test-llama-cpp-python"
    needs = ("venv-pip",)
    REQUIREMENTS = HERE / "requirements-llama-cpp-python.txt"
    # Without the vision library and llama.cpp's tools, which the tests don't use.
    OPTIONS = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF"

    def inputs(self, setup):
        compiler, cpu = compiler_identity()
        return {"sha256": Llama.SHA256, "requirements": sha256(self.REQUIREMENTS), "options": self.OPTIONS,
                "python": PYTHON, "base": sys.base_prefix, "compiler": compiler, "cpu": cpu}

    def make(self, setup, folder):
        name, log = f"llama_cpp_python-{Llama.VERSION}", setup.cache / f"{self.name}.log"
        archive = download(setup.downloads, f"{name}.tar.gz", Llama.SHA256, pip_download(
            setup, f"llama-cpp-python=={Llama.VERSION}", ["--no-binary", "llama-cpp-python"]))
        if not (folder / name).exists():
            with tarfile.open(archive) as tar:
                tar.extractall(folder / "unpacked")
            (folder / "unpacked" / name).rename(folder / name)
        run([sys.executable, "-m", "venv", folder], log, f"{self.name}: making the environment")
        pip = [folder / "bin" / "python", "-m", "pip", "install"]
        run(pip + ["-r", self.REQUIREMENTS], log, f"{self.name}: installing what builds it")
        # In folders of our own, in which an interrupted build goes on.
        run(["env", f"CMAKE_ARGS={self.OPTIONS}", f"CMAKE_BUILD_PARALLEL_LEVEL={jobs()}", *pip, "--no-deps",
             "--no-build-isolation", "-C", f"build-dir={folder / 'build'}", folder / name], log,
            f"{self.name}: building")
        for done in ("unpacked", "build", name):
            shutil.rmtree(folder / done)

    def paths(self, setup, folder):
        return {"LOWKV_LLAMA_CPP_PYTHON": folder / "bin" / "python"}


class OlderLlama(Llama):
    """The least of an older llama.cpp that the smoke test of versions runs (tests/matrix)."""

    TARGETS = ("llama-simple",)
    OPTIONS = tuple(x.replace("EXAMPLES=OFF", "EXAMPLES=ON") for x in Llama.OPTIONS)

    def __init__(self, ggml):
        self.name, self.about = f"llama-{ggml}", f"llama-simple of the llama.cpp with ggml {ggml}"
        self.VERSION, self.SHA256 = RELEASES[ggml]
        self.variable = f"LOWKV_LLAMA_{ggml.replace('.', '_')}"

    def paths(self, setup, folder):
        return {self.variable: folder / "build" / "bin"}


class LlamaVariant(Llama):
    """llama's tree, built another way (tests/matrix)."""

    needs = ("llama-libraries",)

    def __init__(self, kind, about, options, targets=("llama-completion",)):
        self.name, self.about, self.TARGETS = f"llama-{kind}", about, tuple(targets)
        replaced = [x.split("=")[0] for x in options.split()]
        self.OPTIONS = [x for x in Llama.OPTIONS if x.split("=")[0] not in replaced] + options.split()
        self.variable = f"LOWKV_LLAMA_{kind.upper()}"

    def make(self, setup, folder):
        source = folder / "llama.cpp"
        if not source.is_symlink():
            source.symlink_to(setup.need("llama-libraries") / "llama.cpp")
        super().make(setup, folder)

    def paths(self, setup, folder):
        return {self.variable: folder / "build" / "bin"}
