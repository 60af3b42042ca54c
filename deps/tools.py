"""Small helpers of the set-up: hashing, downloads, and commands that show their progress."""

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


class SetupError(Exception):
    """A failure whose message is all that the user needs."""


def say(text):
    print(f"[set-up] {text}", flush=True)


def fingerprint(inputs):
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def require(tool, why):
    path = shutil.which(tool)
    if not path:
        raise SetupError(f"{tool} is not installed ({why})")
    return path


def jobs():
    """How many compilers run at once: LOWKV_JOBS, or as many as the processors that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return os.environ.get("LOWKV_JOBS") or str(usable)


def run(command, log, label, cwd=None):
    """Runs a command into a log file. Shows percent lines or the seconds that it has run, so that
    nothing is silent for long; on failure, the end of the log."""
    tty = sys.stdout.isatty()
    start = shown = time.monotonic()
    percent = ""
    with open(log, "a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(map(str, command))}\n")
        out.flush()
        begin = out.tell()
        with subprocess.Popen(
            list(map(str, command)), cwd=cwd, stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, close_fds=False,  # the lock is inherited
        ) as process:
            while process.poll() is None:
                time.sleep(0.2)
                now = time.monotonic()
                if now - shown < (1 if tty else 10):
                    continue
                shown = now
                found = re.findall(r"^\[ *(\d+)%\]", _tail(log, begin), re.MULTILINE)
                percent = f"{found[-1]} %, " if found else percent
                line = f"[set-up] {label}: {percent}{now - start:.0f} s"
                print(f"\r{line}\033[K" if tty else line, end="" if tty else "\n", flush=True)
        if tty and shown != start:
            print("\r\033[K", end="", flush=True)
    if process.returncode != 0:
        print(_tail(log, begin, 3000), flush=True)
        raise SetupError(f"{label}: exit status {process.returncode}; the whole log is {log}")


def _tail(path, begin, size=4000):
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(begin, file.tell() - size))
        return file.read().decode(errors="replace")


def download(folder, name, digest, fetch):
    """Returns `folder/name` with the given hash. `fetch(temporary folder)` is called unless the file
    is there already; it must leave the file in the folder it is given."""
    target = folder / name
    if target.exists() and sha256(target) == digest:
        return target
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        fetch(Path(temporary))
        got = Path(temporary) / name
        if not got.exists():
            raise SetupError(f"the download did not bring {name} but {os.listdir(temporary)}")
        if sha256(got) != digest:
            raise SetupError(f"{name}: sha256 is {sha256(got)}, expected {digest}")
        got.replace(target)
    return target


def compiler_identity():
    """What makes a native build reusable: the compiler and the instruction sets of this CPU."""
    command = [os.environ.get("CXX") or "c++", "-dumpmachine", "-dumpfullversion"]
    try:
        compiler = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"no C++ compiler: {error}") from None
    cpu = ""
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    return compiler, hashlib.sha256(cpu.encode()).hexdigest()[:12]


# What ggml does before its first product with AMX.
AMX_PROBE = """
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
struct Tiles { unsigned char palette, start, reserved[14]; unsigned short bytes[16]; unsigned char rows[16]; };
static void configure() {
    alignas(64) Tiles tiles = {};
    tiles.palette = 1;
    for (int i = 0; i < 8; ++i) { tiles.rows[i] = 16; tiles.bytes[i] = 64; }
    _tile_loadconfig(&tiles);
}
int main() {
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;  // no permission for the tiles' state
    configure();
    _tile_zero(4);
    _tile_release();
}
"""


def amx_works():
    """Whether what this compiler makes of the probe runs. A compiler that doesn't know AMX uses none."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "tiles"
        compiler = os.environ.get("CXX") or "c++"
        built = subprocess.run([compiler, "-x", "c++", "-O2", "-mamx-tile", "-o", program, "-"], input=AMX_PROBE,
                               text=True, capture_output=True, check=False)
        return built.returncode != 0 or subprocess.run([program], capture_output=True, check=False).returncode == 0


@functools.cache
def native_flags(cache):
    """What a build for this CPU must leave out. g++ 12 takes the stores of a tiles' configuration for dead, all but the
    first eight bytes: with AMX, stock llama.cpp ends in its first prompt for an illegal instruction. The answer is kept
    in the cache, since every command of the set-up asks."""
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists() or " amx_tile" not in cpu.read_text():
        return ""
    known = cache / f"amx-{fingerprint([AMX_PROBE, compiler_identity()])}"
    if not known.exists():
        cache.mkdir(parents=True, exist_ok=True)
        written = known.with_name(f"{known.name}.{os.getpid()}")
        written.write_text("" if amx_works() else "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16")
        written.rename(known)
    return known.read_text()
