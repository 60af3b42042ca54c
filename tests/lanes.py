#!/usr/bin/env python3
"""Runs the lanes: what `make test` leaves out. CI has no time for all of them in one run, so it takes first those whose
sources changed since the commit in .ci/landed, then those whose turn it is (each third landing), then others while the
time lasts. What was not run is said by name at the end."""

import argparse
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
    turn: int  # of three
    sources: tuple  # folders and files: where one changes, the lane comes first
    tools: tuple = ()  # programs that it needs


LANES = (
    Lane("long", "test-long", 760, 0, ("plugins", "cli", "python", "src/cache", "tests/e2e", "tests/python")),
    Lane("tidy", "lint-tidy", 560, 1, ("include", "src", "cli", "plugins", "python", "devices", "examples")),
    Lane("asan", "test-asan", 950, 2, ("include", "src", "cmake", "tests/CMakeLists.txt")),
    Lane("tsan", "test-tsan", 850, 0,
         ("plugins", "src/cache", "src/executor.cpp", "src/attention", "include/lowkv/executor.h")),
    Lane("aarch64", "test-aarch64", 500, 1, ("src/kernels",), ("aarch64-linux-gnu-g++", "qemu-aarch64")),
    Lane("windows", "test-windows", 1200, 2,
         ("platform", "cli/platform", "plugins", "tests/windows", "cmake", "src/kernels"),
         ("x86_64-w64-mingw32-g++-posix", "/usr/lib/wine/wine64")),
    Lane("opencl", "test-opencl PYTEST_ARGS='-k test_devices'", 250, 1, ("devices", "include/lowkv/device.h"),
         ("clinfo",)),
    Lane("cache-on", "test-cache-on", 700, 0, ("plugins", "devices"), ("clinfo",)),
    Lane("opencl-races", "test-opencl-races", 420, 2, ("devices/kernels",), ("oclgrind",)),
    Lane("opencl-intel", "compile-opencl", 60, 0, ("devices/kernels",), ("ocloc",)),
    Lane("macos", "compile-macos", 600, 1, ("platform", "cli/platform", "cmake", "src/kernels/neon")),
    Lane("hip", "compile-hip", 40, 1, ("devices/kernels",), ("hipcc",)),
    Lane("cuda", "count-cuda CUDA_TARGETS='75 80 90'", 460, 2, ("devices",), ("nvcc",)),
    Lane("cuda-emulated", "test-python-cuda PYTEST_ARGS='-k test_devices'", 300, 0,
         ("python/cuda", "devices", "tests/devices")),
    Lane("types", "test-sweep", 300, 1, ("python", "tests/sweep", "deps/requirements-transformers.txt")),
    Lane("older-transformers", "test-older-transformers", 200, 2, ("python",)),
    Lane("versions", "test-versions VERSIONS='0.11.0 0.25.1'", 800, 1, ("plugins", "cli/plugin", "deps/plugin_for.py")),
    Lane("builds", "test-builds BUILDS='dl noomp'", 900, 0, ("plugins", "cli/run", "cli/common")),
    Lane("llama-server", "test-llama", 900, 2, ("plugins",)),
    Lane("dist", "test-dist", 600, 1, ("plugins", "cli", "deps/dist.py", "tests/release", "cmake")),
    Lane("llama-cpp-python", "test-llama-cpp-python", 700, 1, ("python/lowkv/llama_cpp.py",)),
    Lane("vllm", "test-vllm", 2400, 2, ("python/lowkv/vllm", "tests/vllm")),
)


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def changed_files():
    """Those that differ from the commit that landed before. A shallow clone does not have it: then none."""
    done = git("diff", "--name-only", (ROOT / LANDED).read_text().strip(), "HEAD")
    if done.returncode != 0:
        print(f"lanes: this clone lacks the commit in {LANDED}, so no lane comes first for its changes")
    return done.stdout.splitlines()


def in_order(lanes, changed, landings):
    """Those that changed, then those whose turn it is, then the others."""
    def rank(lane):
        touched = any(path == source or path.startswith(source + "/") for path in changed for source in lane.sources)
        return (not touched, (lane.turn - landings) % 3)
    return sorted(lanes, key=rank)


def run(lane):
    """How it ended, in words, and whether that is good."""
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
    parser.add_argument("--within", type=int, default=0, metavar="SECONDS", help="begin none that may not end in time")
    parser.add_argument("--list", action="store_true", help="print them, run nothing")
    arguments = parser.parse_args()
    unknown = set(arguments.lane) - {lane.name for lane in LANES}
    if unknown:
        parser.error(f"no lane {', '.join(sorted(unknown))}; there are: {', '.join(lane.name for lane in LANES)}")
    if arguments.list:
        for lane in LANES:
            print(f"{lane.name:19} make {lane.command:46} up to {lane.seconds} s")
        return 0
    if not (arguments.lane or arguments.all or arguments.within):
        parser.error("which lanes? name them, or give --all or --within SECONDS")

    end = time.monotonic() + (arguments.within or float("inf"))
    landings = len(git("log", "--format=%h", "--", LANDED).stdout.split())
    lanes = [lane for lane in LANES if lane.name in arguments.lane] if arguments.lane else LANES
    results, good = [], True
    for lane in in_order(lanes, changed_files(), landings):
        if time.monotonic() + lane.seconds > end:
            results.append((lane.name, f"skipped: no time for its {lane.seconds} s"))
            continue
        ended, passed = run(lane)
        results.append((lane.name, ended))
        good &= passed
    print("\n==== lanes")
    for name, ended in results:
        print(f"{name:19} {ended}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
