#!/usr/bin/env python3
"""Which faults the tests catch: changes the product in one place at random, and runs the tests of that place's room.

    make mutants                                20 mutants, their seed the day
    make mutants SAMPLE=100 SEED=7 ROOMS="core plug-in"
    make mutants AGAIN=1                        the survivors of last time, after a test was added

A mutant is a line changed by a rule of universalmutator, drawn by lines: each line of a room's code is as likely as any
other. It is built and tested in a scratch copy, build/mutants/tree, at -O1 and with two sets of kernels, AVX2's and the
scalar one. How it ends:

    killed      a test failed, took three times as long as usual, or asked for too much memory
    survived    no test of the room noticed
    equal       the compiler makes the same programs of it
    invalid     it doesn't compile; another is drawn

build/mutants/results.json has all that were drawn here, build/mutants/log what the last test said. Exit status 0,
whatever survives: what that means is for a reader to say."""

import argparse
import contextlib
import datetime
import hashlib
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from universalmutator import mutator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "deps"))
from house import counts  # noqa: E402

WORK = ROOT / "build/mutants"
TREE = WORK / "tree"
BUILD = TREE / "build/mutants"
SITE = WORK / "site"
RESULTS = WORK / "results.json"
MEMORY = 8 << 30  # bytes of addresses for a C++ test
GRACE = 60  # seconds that a test may take beside three times its usual time: others may run here, too


class Room(NamedTuple):
    """What tests a part of the product: programs that ctest knows and, where none of them fails, pytest's."""
    folders: tuple
    without: tuple = ()  # of the folders: what has tests or machines of its own
    ctest: str = ""
    pytest: tuple = ()


GUESTS = "calibrat|filter|blocks_filter|row|rope|kernel_row"  # how the names of their tests begin
CORE = f"(?!cli|plugin|cuda|device|install|example|format.cuda|{GUESTS})"
SETS = tuple(f"src/kernels/{name}" for name in ("amx", "avx512", "avx512_vbmi", "avx_vnni", "neon", "neon_i8mm"))
ROOMS = {
    "core": Room(("src", "include/lowkv", "platform"),
                 ("src/kernels", "platform/windows", "include/lowkv/cuda.h", "include/lowkv/opencl.h"),
                 CORE),
    "kernels": Room(("src/kernels",), SETS, CORE),
    "guests": Room(("guests",), (), f"({GUESTS})"),
    "plug-in": Room(("plugins/llama.cpp",), ("plugins/llama.cpp/trial",), "plugin", ("tests/e2e", "-k", "plugin")),
    "command": Room(("cli",), ("cli/calibrate", "cli/platform/windows"), "cli", ("tests/e2e", "-k", "not plugin")),
    "Python": Room(("python/lowkv",), ("python/lowkv/vllm", "python/lowkv/llama_cpp.py"), "", ("tests/python",)),
}


class Test(NamedTuple):
    name: str
    command: tuple
    environment: dict
    folder: str
    seconds: float = 600  # that it usually takes


def call(*command, folder=TREE, **more):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, **more)


def must(*command, folder=TREE, **more):
    done = call(*command, folder=folder, **more)
    if done.returncode:
        sys.exit(f"mutants: {' '.join(map(str, command[:3]))}:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def inside(path, folders):
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def files(room):
    """The room's sources, in order: their paths."""
    listed = must("git", "ls-files", *room.folders, folder=ROOT).splitlines()
    return [path for path in listed if path.endswith((".cpp", ".h", ".py")) and not inside(path, room.without)
            and "/tests/" not in path]


# Lines whose mutants don't compile, or are no code.
NO_CODE = ("#", "//", "*", "using ", "namespace ", "template", "static_assert", "import ", "from ", "@", '"""',
           "public:", "private:", "}", "extern ", "class ", "struct ", "friend ")


def lines_of(path):
    """The numbers of the lines that count, from 1."""
    in_text = False  # of a docstring
    for number, line in enumerate(path.read_text().splitlines(), 1):
        quotes = line.count('"""') if path.suffix == ".py" else 0
        begins = in_text
        in_text ^= quotes % 2 == 1
        if not begins and not quotes and counts(line) and not line.strip().startswith(NO_CODE):
            yield number


def mutants_of(path, number):
    """How one line can be changed: its new texts."""
    text = path.read_text().splitlines(keepends=True)
    only = [line if at == number else "\n" for at, line in enumerate(text, 1)]
    rules = ["python.rules"] if path.suffix == ".py" else ["c_like.rules", "cpp.rules"]
    with contextlib.redirect_stdout(io.StringIO()):
        found = mutator.mutants_regexp(only, ruleFiles=["universal.rules", *rules], ignorePatterns=(),
                                       ignoreStringOnly=True)
    # Without those that change spaces, and those that insert "break" or "continue": most are outside a loop.
    return sorted({new for at, new, *_ in found
                   if at == number and new.count("\n") == 1 and new.split() != text[number - 1].split()})


def draw(rng, rooms, tree):
    """Mutants without end: room, file, line, its text and the new one. Of each room about as many as it has lines."""
    places = [(name, path, number) for name in rooms for path in files(ROOMS[name])
              for number in lines_of(tree / path)]
    while True:
        name, path, number = rng.choice(places)
        if new := mutants_of(tree / path, number):
            old = (tree / path).read_text().splitlines()[number - 1]
            yield {"room": name, "file": path, "line": number, "old": old, "new": rng.choice(new).rstrip("\n")}


def key(mutant):
    """What makes it the same as one of an earlier run, whose line may have moved."""
    return mutant["file"], mutant["old"], mutant["new"]


def found_again(mutant):
    """An earlier mutant where its line is now; None if there is no such line any more."""
    lines = (TREE / mutant["file"]).read_text().splitlines() if (TREE / mutant["file"]).exists() else []
    places = [number for number, line in enumerate(lines, 1) if line == mutant["old"]]
    return mutant | {"line": min(places, key=lambda number: abs(number - mutant["line"]))} if places else None


def make_tree():
    """The scratch copy as this tree is, its edits included."""
    commit = must("git", "stash", "create", folder=ROOT).strip() or "HEAD"
    if not TREE.exists():
        must("git", "worktree", "prune", folder=ROOT)
        must("git", "worktree", "add", "--detach", "--force", str(TREE), commit, folder=ROOT)
    must("git", "reset", "--hard", commit)
    linker = " -fuse-ld=mold" if call("mold", "--version", folder=ROOT).returncode == 0 else ""
    must("cmake", "-S", TREE, "-B", BUILD, "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1 -w",
         "-DLOWKV_WERROR=OFF", "-DLOWKV_LEFT_OUT=amx;avx512_vbmi;avx512;avx_vnni",
         f"-DCMAKE_EXE_LINKER_FLAGS={linker}", f"-DCMAKE_SHARED_LINKER_FLAGS={linker}")


class Suite:
    """A room's tests, the quickest first, what they need built, and what that is without a mutant."""

    def __init__(self, name, paths):
        room, self.targets, self.python = ROOMS[name], ["all"], name == "Python"
        if self.python:
            shutil.copytree(ROOT / "build/python/site", SITE, symlinks=True, dirs_exist_ok=True)
        say(f"{name}: building its tests, and running them without a mutant")
        if not self.build():
            sys.exit(f"mutants: {name} does not build: see {WORK / 'log'}")
        tests = list(programs_of_ctest(room.ctest)) if room.ctest else []
        if room.pytest:
            tests.append(pytest(room.pytest, paths))
        else:
            self.targets = sorted({Path(test.command[2]).name for test in tests})
        failed, took = run(tests)
        if failed:
            sys.exit(f"mutants: without a mutant {failed}: see {WORK / 'log'}")
        self.tests = sorted((test._replace(seconds=took[test.name]) for test in tests), key=lambda test: test.seconds)
        self.same = None if self.python else self.made()

    def build(self):
        """Whether it compiles."""
        if self.python:
            shutil.copytree(TREE / "python/lowkv", SITE / "lowkv", dirs_exist_ok=True)
            return True
        done = call("cmake", "--build", BUILD, "-j", str(os.cpu_count()), "--target", *self.targets)
        (WORK / "log").write_text(done.stdout + done.stderr)
        return done.returncode == 0

    def made(self):
        """Of all programs and shared libraries, a hash."""
        found = hashlib.sha256()
        for path in sorted([*(BUILD / "bin").glob("*"), *(BUILD / "lib").glob("*.so")]):
            found.update(path.read_bytes())
        return found.hexdigest()

    def judge(self, mutant):
        """How a mutant ends, and by what."""
        file = TREE / mutant["file"]
        original = file.read_text()
        lines = original.splitlines(keepends=True)
        lines[mutant["line"] - 1] = mutant["new"] + "\n"
        file.write_text("".join(lines))
        try:
            if not self.build():
                return "invalid", ""
            if not self.python and self.made() == self.same:
                return "equal", ""
            failed, _ = run(self.tests)
            return ("killed", failed) if failed else ("survived", "")
        finally:
            file.write_text(original)


def programs_of_ctest(names):
    listed = json.loads(must("ctest", "--test-dir", BUILD, "--show-only=json-v1"))
    for test in (each for each in listed["tests"] if re.match(names, each["name"])):
        properties = {each["name"]: each["value"] for each in test["properties"]}
        own = dict(pair.split("=", 1) for pair in properties.get("ENVIRONMENT", ()))
        yield Test(test["name"], ("prlimit", f"--as={MEMORY}", *test["command"]),
                   {"LOWKV_TEST_SAMPLE": "2"} | own, properties["WORKING_DIRECTORY"])


def pytest(arguments, paths):
    """No further than the first failure."""
    package = "tests/python" in arguments
    python = paths["LOWKV_TRANSFORMERS_PYTHON" if package else "LOWKV_PYTHON"]
    environment = {"LOWKV_BUILD_DIR": str(BUILD), "LOWKV_MODEL": paths["LOWKV_MODEL"]}
    if package:
        environment["PYTHONPATH"] = f"{SITE}:{paths['LOWKV_LMCACHE']}"
    return Test("pytest", (python, "-m", "pytest", *arguments, "-m", "not long", "-x", "-q", "-n", "2", "--dist",
                           "loadfile", "--timeout", "300"), environment, str(TREE))


def run(tests):
    """Two at a time: the first that fails and how, or None, and the seconds that each took."""
    waiting, running, took = list(tests), {}, {}
    with open(WORK / "log", "w") as log:
        try:
            while waiting or running:
                if waiting and len(running) < 2:
                    test = waiting.pop(0)
                    process = subprocess.Popen(test.command, cwd=test.folder, env={**os.environ, **test.environment},
                                               stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                    running[process] = (test, time.monotonic())
                    continue
                time.sleep(.01)
                for process, (test, began) in list(running.items()):
                    took[test.name] = time.monotonic() - began
                    if process.poll() is not None:
                        del running[process]
                        if process.returncode:
                            return f"{test.name}: status {process.returncode}", took
                    elif took[test.name] > 3 * test.seconds + GRACE:
                        return f"{test.name}: {took[test.name]:.0f} s, usually {test.seconds:.0f}", took
        finally:
            for process in running:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return None, took


def table(results):
    rows = [("room", "drawn", "killed", "equal", "survived")]
    for name in [*ROOMS, "all"]:
        ends = [each["end"] for each in results if name in (each["room"], "all")]
        if ends:
            rows.append((name, len(ends), *(ends.count(end) for end in ("killed", "equal", "survived"))))
    return "\n".join("| " + " | ".join(map(str, row)) + " |" + ("\n|---|--:|--:|--:|--:|" if row is rows[0] else "")
                     for row in rows)


def say(text):
    print(f"mutants: {text}", file=sys.stderr, flush=True)


def show(mutant):
    by = f" by {mutant['by']}" if mutant["by"] else ""
    print(f"{mutant['end']}{by}: {mutant['file']}:{mutant['line']}\n    - {mutant['old'].strip()}\n"
          f"    + {mutant['new'].strip()}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=20, help="mutants that compile (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=int(datetime.date.today().strftime("%Y%m%d")),
                        help="default: the day, %(default)s")
    parser.add_argument("--room", action="append", choices=ROOMS, help="only of this one; may be repeated")
    parser.add_argument("--again", action="store_true", help=f"those that survived, of {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--list", action="store_true", help="print what would be drawn, build nothing")
    options = parser.parse_args()
    rooms = options.room or list(ROOMS)
    rng = random.Random(options.seed)
    if options.list:
        for mutant in itertools.islice(draw(rng, rooms, ROOT), options.sample):
            show(mutant | {"end": "drawn", "by": ""})
        return 0

    paths = json.loads(must(sys.executable, "deps/setup.py", "--paths", folder=ROOT))
    WORK.mkdir(parents=True, exist_ok=True)
    make_tree()
    known = {key(each): each for each in (json.loads(RESULTS.read_text()) if RESULTS.exists() else ())}
    if options.again:
        survivors = [each for each in known.values() if each["end"] == "survived" and each["room"] in rooms]
        drawn = filter(None, map(found_again, survivors))
        options.sample = len(survivors)
    else:
        drawn = draw(rng, rooms, TREE)
    suites, results = {}, []
    while len(results) < options.sample and (mutant := next(drawn, None)):
        if mutant["room"] not in suites:
            suites[mutant["room"]] = Suite(mutant["room"], paths)
        began = time.monotonic()
        mutant["end"], mutant["by"] = suites[mutant["room"]].judge(mutant)
        mutant["seconds"], mutant["seed"] = round(time.monotonic() - began), options.seed
        if mutant["end"] == "invalid":
            continue
        results.append(mutant)
        show(mutant)
        known[key(mutant)] = mutant
        RESULTS.write_text(json.dumps(list(known.values()), indent=1))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
