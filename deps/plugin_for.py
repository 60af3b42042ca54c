#!/usr/bin/env python3
"""Find the llama.cpp plug-in for a program's ggml, or build it, and print its path: for `lowkv run --plugin`,
LOWKV_PLUGIN or GGML_BACKEND_PATH.

The plug-in that `make` builds is for many versions of ggml. Another one is built for a ggml that is newer, with the
headers of its llama.cpp tree, or whose two libraries have other names. It lies in plugins/<ggml version>-<hash>/ of
the cache; the hash covers everything that shaped it. A folder is renamed into place when it is complete, so an
interrupted build leaves nothing half made. Only the plug-in's own sources depend on ggml, so the core comes from
build/release where `make` has built it.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

import part  # noqa: E402  (needs the path above)
from setup import CACHE, Setup, locked  # noqa: E402
from tools import SetupError, compiler_identity, fingerprint, jobs, run, say, sha256  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = CACHE / "plugins"
LIBRARY = "libggml-lowkv.so"
OLDEST = "0.11.0"  # plugins/llama.cpp/CMakeLists.txt
NAMES = {name: f"lib{name}.so.0" for name in ("ggml", "ggml-base")}
HEADERS = ("ggml/include/ggml.h", "ggml/include/ggml-alloc.h", "ggml/include/ggml-backend.h",
           "ggml/include/ggml-cpu.h", "ggml/src/ggml-backend-impl.h")


class Host(NamedTuple):
    """A ggml to build for."""

    version: str
    libraries: dict  # "ggml" and "ggml-base" to their files; empty for a tree without a build
    tree: Path | None  # a llama.cpp tree with its headers


def ask_version(library):
    """The version that a libggml-base.so tells, in a process of its own."""
    program = ("import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).ggml_version; "
               "f.restype = ctypes.c_char_p; print(f().decode())")
    done = subprocess.run([sys.executable, "-c", program, library], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise SetupError(f"{library} does not tell its version ({why[0]}); ggml does since 0.9, and "
                         f"lowkv needs {OLDEST} or newer")
    return done.stdout.strip()


def tree_version(tree):
    text = (tree / "ggml" / "CMakeLists.txt").read_text()
    found = [re.search(rf"set\(GGML_VERSION_{x} +(\d+)", text) for x in ("MAJOR", "MINOR", "PATCH")]
    if not all(found):
        raise SetupError(f"{tree}/ggml/CMakeLists.txt names no version: this llama.cpp is older than ggml {OLDEST}")
    return ".".join(x[1] for x in found)


def numbers(version):
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def libraries_in(folder):
    """ggml's two libraries in a folder, or {}."""
    found = {}
    for name in NAMES:
        files = sorted(folder.glob(f"lib{name}.so*"), key=lambda x: len(x.name))
        if not files:
            return {}
        found[name] = files[0].resolve()
    return found


def libraries_of(program):
    """ggml's two libraries that a program or library is linked with, as the loader finds them."""
    listing = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    found = {}
    for name in NAMES:
        match = re.search(rf"^\s*lib{name}\.so\S* => (/.*) \(0x", listing, re.MULTILINE)
        if match:
            found[name] = Path(match[1]).resolve()
    return found


def llama_cpp_of(python):
    """The folder of the llama-cpp-python that belongs to a Python, without importing it."""
    program = ("import importlib.util as u; s = u.find_spec('llama_cpp'); "
               "print(s.submodule_search_locations[0] if s else '')")
    done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        raise SetupError(f"{python} has no llama_cpp: `{python} -m pip install llama-cpp-python` brings it")
    return Path(done.stdout.strip())


def host_of(libraries, tree=None):
    return Host(ask_version(libraries["ggml-base"]), libraries, tree)


def is_tree(path):
    return (path / "ggml" / "src" / "ggml-backend-impl.h").exists()


def look_at_folder(path):
    if is_tree(path):
        for build in sorted([path, *path.glob("build*")]):
            for folder in (build / "bin", build / "lib", build / "ggml" / "src"):
                libraries = libraries_in(folder)
                if libraries:
                    say(f"taking the build in {folder}")
                    return host_of(libraries, path)
        return Host(tree_version(path), {}, path)
    if (path / "pyvenv.cfg").exists():
        path = llama_cpp_of(path / "bin" / "python")
    for folder in (path, path / "lib", path / "lib64", path / "bin", *path.glob("lib/*-linux-gnu")):
        libraries = libraries_in(folder)
        if libraries:
            return host_of(libraries)
    raise SetupError(f"no libggml.so and libggml-base.so in {path} or its lib folder, and it is no llama.cpp "
                     "tree; name a program, a library folder, a tree or a Python that has llama-cpp-python")


def look_at_file(path):
    if re.match(r"libggml.*\.so", path.name):
        return look_at_folder(path.parent)
    if re.fullmatch(r"python[0-9.]*", path.name):
        return look_at_folder(llama_cpp_of(path))
    libraries = libraries_of(path)
    if len(libraries) == 2:
        return host_of(libraries, next(filter(is_tree, libraries["ggml-base"].parents), None))
    if b"GGML_BACKEND_PATH" in path.read_bytes():
        raise SetupError(f"{path} has ggml linked into it, and no plug-in can join that: a plug-in would "
                         "bring a second ggml. Build llama.cpp with BUILD_SHARED_LIBS=ON")
    raise SetupError(f"{path} is not linked with libggml.so; if it is a wrapper, name the program that it starts")


def look_at(path):
    if not path.exists():
        raise SetupError(f"there is no {path}")
    host = look_at_folder(path) if path.is_dir() else look_at_file(path)
    if numbers(host.version) < numbers(OLDEST):
        raise SetupError(f"{path} has ggml {host.version}; lowkv needs {OLDEST} or newer")
    return host


def own_sources():
    """A hash of what the plug-in is compiled from."""
    files = [ROOT / "CMakeLists.txt"]
    for folder in ("cmake", "devices", "guests", "include", "platform", "plugins", "src"):
        files += sorted(x for x in (ROOT / folder).rglob("*") if x.is_file())
    return fingerprint([[str(x.relative_to(ROOT)), sha256(x)] for x in files])


def devices():
    """CMake's options for the devices that the build in build/release has."""
    options = ROOT / "build" / "release" / "CMakeCache.txt"
    found = dict(re.findall(r"^(LOWKV_OPENCL|LOWKV_CUDA|LOWKV_CUDA_TARGETS):\w+=(.*)$",
                            options.read_text() if options.exists() else "", re.MULTILINE))
    return {name: value for name, value in found.items() if found.get(name.removesuffix("_TARGETS")) == "ON"}


def soname(library):
    listing = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    found = re.search(r"\(SONAME\).*\[(.*)\]", listing)
    return found[1] if found else library.name


def sonames(host):
    return {name: soname(host.libraries[name]) for name in NAMES} if host.libraries else NAMES


def own(host):
    """The plug-in that `make` builds, if it is there and for this ggml; or None."""
    library, newest = ROOT / "build" / "release" / "lib" / LIBRARY, Setup(CACHE).paths().get("LOWKV_GGML_VERSION")
    known = newest and numbers(OLDEST) <= numbers(host.version) <= numbers(newest)
    return library if known and sonames(host) == NAMES and library.exists() else None


def describe(host):
    """What shapes a plug-in, but for the headers: they are looked for only when it must be built."""
    return {"ggml": host.version, "sonames": sonames(host), "sources": own_sources(),
            "compiler": compiler_identity()[0], "devices": devices()}


def header_digests(tree):
    return {name: sha256(tree / name) for name in HEADERS}


def cached():
    """The complete plug-ins of the cache: their folders and what shaped them."""
    for stamp in sorted(PLUGINS.glob("*/plugin.json")):
        yield stamp.parent, json.loads(stamp.read_text())


def find(host):
    """A cached plug-in that fits, or None."""
    wanted = describe(host)
    if host.tree:
        wanted["headers"] = header_digests(host.tree)
    for folder, made in cached():
        if all(made.get(key) == value for key, value in wanted.items()):
            return folder / LIBRARY
    return None


def headers_for(host):
    if host.tree:
        return host.tree
    tree = Setup(CACHE).paths().get("LOWKV_LLAMA_SOURCE")
    if not tree or numbers(tree_version(Path(tree))) < numbers(host.version):
        raise SetupError(f"lowkv has no headers of ggml {host.version}: name the llama.cpp tree that this ggml was "
                         "built from, --for TREE")
    return Path(tree)


def prebuilt_core(cmake, log):
    """Brings the core in build/release up to date. Returns that folder; None if it does not exist or does not build."""
    folder = ROOT / "build" / "release"
    if not (folder / "CMakeCache.txt").exists():
        return None
    try:
        run([cmake, "--build", folder, "-j", jobs(), "--target", "lowkv", "lowkv_calibration_files"], log,
            "plug-in: bringing the core up to date")
    except SetupError:
        say(f"plug-in: the core in {folder} can't be used; building another one, which takes minutes")
        return None
    return folder


def compile_for(host, tree, log):
    with contextlib.closing(locked(CACHE)):
        cmake = part.cmake(Setup(CACHE))
    link, build = PLUGINS / "link", PLUGINS / "build"
    shutil.rmtree(link, ignore_errors=True)
    link.mkdir()
    for name in NAMES:
        target = link / f"lib{name}.so"
        if host.libraries:
            target.symlink_to(host.libraries[name])
        else:  # nothing but the name: what is missing shows when the plug-in is loaded
            compiler = os.environ.get("CXX") or "c++"
            run([compiler, "-shared", "-x", "c++", "/dev/null", f"-Wl,-soname,{NAMES[name]}", "-o", target], log,
                "plug-in: preparing")
    options = {
        "CMAKE_BUILD_TYPE": "Release", "CMAKE_SKIP_RPATH": "ON", "LOWKV_WERROR": "OFF", "LOWKV_BUILD_PLUGIN": "ON",
        "LOWKV_BUILD_CLI": "OFF", "LOWKV_BUILD_TESTS": "OFF", "LOWKV_LINK_CHECK": "ON" if host.libraries else "OFF",
        "LOWKV_LLAMA_SOURCE": tree, "LOWKV_LLAMA_BUILD": link, "LOWKV_GGML_VERSION": tree_version(tree),
        "LOWKV_GGML_OLDEST": host.version, "LOWKV_CORE": prebuilt_core(cmake, log) or "", **devices(),
    }
    for attempt in (build.exists(), False):
        try:
            run([cmake, "-S", ROOT, "-B", build, "-G", "Unix Makefiles",
                 *(f"-D{key}={value}" for key, value in options.items())], log, "plug-in: configuring")
            run([cmake, "--build", build, "-j", jobs(), "--target", "ggml-lowkv"], log, "plug-in: building")
            return build / "lib" / LIBRARY
        except SetupError:
            if not attempt:
                raise
            say("plug-in: what an earlier build left can't be used; starting over")
            shutil.rmtree(build)
    raise AssertionError


def build(host):
    with contextlib.closing(locked(PLUGINS)):
        library = find(host)  # another run may have built it while this one waited
        if library:
            return library
        tree = headers_for(host)
        made = {**describe(host), "headers": header_digests(tree), "tree": str(tree)}
        if host.tree and tree_version(tree) != host.version:
            raise SetupError(f"{tree} has the headers of ggml {tree_version(tree)}, its build is ggml {host.version}: "
                             "build that tree again")
        say(f"building the plug-in for ggml {host.version}")
        shaped = {key: value for key, value in made.items() if key != "tree"}
        folder = PLUGINS / f"{host.version}-{fingerprint(shaped)}"
        draft = PLUGINS / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        shutil.copy(compile_for(host, tree, PLUGINS / "build.log"), draft / LIBRARY)
        (draft / "plugin.json").write_text(json.dumps(made, indent=1) + "\n")
        draft.rename(folder)
        return folder / LIBRARY


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="path", type=Path, metavar="PATH", required=True, help="what to build for")
    parser.add_argument("--cached", action="store_true", help="build nothing: fail where none is cached")
    args = parser.parse_args()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            host = look_at(Path(os.path.abspath(args.path)))
            library = own(host) or find(host)
            if not library and args.cached:
                raise SetupError(f"no plug-in for {args.path}, which has ggml {host.version}, is built yet")
            library = library or build(host)
    except SetupError as error:
        print(f"lowkv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lowkv: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
