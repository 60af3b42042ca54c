#!/usr/bin/env python3
"""Runs the lanes: what `make test` leaves out. CI takes those whose sources changed since the commit in .ci/landed, and
one by turn, as far as its time goes; `make nightly` takes all. What was not run is named at the end."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LANDED = ".ci/landed"


class Lane(NamedTuple):
    name: str
    command: str  # of make, in the tree's root
    seconds: int  # on 2 slow cores, with the builds of `make test` there
    sources: tuple  # folders and files: where one changes, the lane comes first
    tools: tuple = ()  # programs that it needs


# Debian's packages for each tool: the one that has it, and others that the lane needs with it.
PACKAGES = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "x86_64-w64-mingw32-g++-posix": "g++-mingw-w64-x86-64-posix",
    "/usr/lib/wine/wine64": "wine64",
    "clinfo": "clinfo pocl-opencl-icd opencl-c-headers ocl-icd-opencl-dev",
    "oclgrind": "oclgrind opencl-c-headers ocl-icd-opencl-dev",
    "ocloc": "intel-opencl-icd opencl-c-headers ocl-icd-opencl-dev",
    "hipcc": "hipcc",
    "clang++-19": "clang-19 libclang-rt-19-dev libomp-19-dev",
}


LANES = (
    Lane("long", "test-long", 760, ("plugins", "cli", "python", "src/cache", "tests/e2e", "tests/python")),
    Lane("tidy", "lint-tidy", 560, ("include", "src", "guests", "cli", "plugins", "python", "devices", "examples")),
    Lane("core", "test-core", 600, ("include", "src", "guests", "cmake", "tests/CMakeLists.txt")),
    Lane("change-cost", "change-cost", 1500, ("deps/change_cost.py", "deps/changes")),
    Lane("asan", "test-asan", 950, ("include", "src", "guests", "cmake", "tests/CMakeLists.txt")),
    Lane("tsan", "test-tsan", 850,
         ("plugins", "src/cache", "src/executor.cpp", "src/attention", "include/lowkv/executor.h")),
    Lane("fuzz", "fuzz", 1500, ("include", "src", "guests/calibration", "plugins", "cli/common", "cli/plan", "cli/run",
                                "python", "tests/fuzz"), ("clang++-19",)),
    Lane("aarch64", "test-aarch64", 500, ("src/kernels", "guests/row/kernels"),
         ("aarch64-linux-gnu-g++", "qemu-aarch64")),
    Lane("windows", "test-windows", 1200,
         ("platform", "cli/platform", "plugins", "tests/windows", "cmake", "src/kernels"),
         ("x86_64-w64-mingw32-g++-posix", "/usr/lib/wine/wine64")),
    Lane("opencl", "test-opencl PYTEST_ARGS='-k test_devices'", 250, ("devices", "include/lowkv/device.h"),
         ("clinfo",)),
    Lane("cache-on", "test-cache-on", 700, ("plugins", "devices"), ("clinfo",)),
    Lane("opencl-races", "test-opencl-races", 420, ("devices/kernels",), ("oclgrind",)),
    Lane("opencl-intel", "compile-opencl", 60, ("devices/kernels",), ("ocloc",)),
    Lane("macos", "compile-macos", 600, ("platform", "cli/platform", "cmake", "src/kernels/neon")),
    Lane("hip", "compile-hip", 40, ("devices/kernels",), ("hipcc",)),
    Lane("cuda", "count-cuda CUDA_TARGETS='75 80 90'", 460, ("devices",), ("nvcc",)),
    Lane("cuda-emulated", "test-python-cuda PYTEST_ARGS='-k test_devices'", 300,
         ("python/cuda", "devices", "tests/devices")),
    Lane("types", "test-sweep", 600, ("python", "tests/sweep", "deps/requirements-transformers.txt")),
    Lane("older-transformers", "test-older-transformers", 200, ("python",)),
    Lane("versions", "test-versions VERSIONS='0.11.0 0.25.1'", 800, ("plugins", "deps/plugin_for.py")),
    Lane("builds", "test-builds BUILDS='dl noomp'", 900, ("plugins", "cli/run", "cli/common")),
    Lane("uses", "test-uses", 300, ("plugins", "tests/uses")),
    Lane("llama-server", "test-llama", 900, ("plugins",)),
    Lane("dist", "test-dist", 600, ("plugins", "cli", "deps/dist.py", "tests/release", "cmake")),
    Lane("deploy", "test-deploy", 60, ("deploy", "Dockerfile")),
    Lane("llama-cpp-python", "test-llama-cpp-python", 700, ("python/lowkv/llama_cpp.py",)),
    Lane("mutants", "mutants", 3000, ("tests/mutants.py",)),
    Lane("vllm", "test-vllm", 2400, ("python/lowkv/vllm", "tests/vllm")),
)


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def changed_files():
    """Those that differ from the commit that landed before. A shallow clone does not have it: then none."""
    done = git("diff", "--name-only", (ROOT / LANDED).read_text().strip(), "HEAD")
    if done.returncode != 0:
        print(f"lanes: this clone lacks the commit in {LANDED}, so no lane comes first for its changes")
    return done.stdout.splitlines()


def due(lanes, changed, landings):
    """The lanes whose sources changed, and one by turn. The turn moves on with each landing, and the lanes that changed
    begin with the one whose turn is nearest, so that none is left out for good where the time ends early."""
    def touched(lane):
        return any(path == source or path.startswith(source + "/") for path in changed for source in lane.sources)
    first = landings % len(lanes)
    by_turn = [*lanes[first:], *lanes[:first]]
    return [lane for lane in by_turn if touched(lane) or lane is by_turn[0]]


def run(lane, install):
    """How it ended, in words, and whether that is good."""
    packages = [PACKAGES[tool] for tool in lane.tools if tool in PACKAGES and not shutil.which(tool)]
    if install and packages:
        subprocess.run(f"apt-get update -qq && apt-get install -qqy --no-install-recommends {' '.join(packages)}",
                       shell=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, check=False)
    for tool in lane.tools:
        if not shutil.which(tool):
            return f"skipped: there is no {tool} here", True
    print(f"\n==== lane {lane.name}: make {lane.command}", flush=True)
    start = time.monotonic()
    code = subprocess.run(f"make {lane.command}", shell=True, cwd=ROOT, check=False).returncode
    return f"{'ran' if code == 0 else 'FAILED'}, {time.monotonic() - start:.0f} s", code == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lane", nargs="*", help="only these")
    parser.add_argument("--all", action="store_true", help="all, whatever time they take")
    parser.add_argument("--within", type=int, metavar="SECONDS",
                        help="those that are due, but begin none that may not end in this time")
    parser.add_argument("--install", action="store_true", help="what they need and this machine lacks, by apt-get")
    parser.add_argument("--list", action="store_true", help="print them, run nothing")
    arguments = parser.parse_args()
    unknown = set(arguments.lane) - {lane.name for lane in LANES}
    if unknown:
        parser.error(f"no lane {', '.join(sorted(unknown))}; there are: {', '.join(lane.name for lane in LANES)}")
    if arguments.list:
        for lane in LANES:
            print(f"{lane.name:19} make {lane.command:46} up to {lane.seconds} s")
        return 0
    if not (arguments.lane or arguments.all or arguments.within is not None):
        parser.error("which lanes? name them, or give --all or --within SECONDS")

    end = time.monotonic() + (float("inf") if arguments.within is None else arguments.within)
    lanes = [lane for lane in LANES if arguments.all or lane.name in arguments.lane]
    if arguments.within is not None:
        landings = len(git("log", "--format=%h", "--", LANDED).stdout.split())
        lanes = due(LANES, changed_files(), landings)
    results, good = [], True
    for lane in lanes:
        if time.monotonic() + lane.seconds > end:
            results.append((lane.name, f"skipped: no time for its {lane.seconds} s"))
            continue
        ended, passed = run(lane, arguments.install)
        results.append((lane.name, ended))
        good &= passed
    print("\n==== lanes")
    for name, ended in results:
        print(f"{name:19} {ended}")
    rest = [lane.name for lane in LANES if lane not in lanes]
    if arguments.within is not None and rest:
        print(f"not due: {', '.join(rest)} (`make nightly` runs all)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
