#!/usr/bin/env python3
"""Run llama.cpp's own server tests on stock llama-server and with the plug-in, and compare test by test.

The suite is copied into build/llama-server-tests; small random-weight models stand in for the hub's
(models.py), and what belongs to the hub's models is adapted in the copy (suite.py). The exit status is 1
if a test passes on stock and fails with the plug-in, then again at a second try, or if a model was loaded
and its cache was not the plug-in's.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "e2e")]

import models  # noqa: E402  (needs the path above)
import suite  # noqa: E402
from plugin_tools import PATHS, PLUGIN, ROOT, TOOLS, environment  # noqa: E402

STOCK = "stock"
SOURCE = Path(PATHS["LOWKV_LLAMA_SOURCE"])
TIME_LIMIT = 1800
# The models without a cache, as they are named on llama-server's command line.
ENCODERS = re.compile("bert-bge-small|jina-reranker")
MODEL = re.compile(r"--hf-repo (\S+(?: --hf-file \S+)?)")
WHOLE = ["unit"]


def prepare(work):
    """The copy of the suite, in folders as in llama.cpp's tree, and the models beside it."""
    shutil.rmtree(work, ignore_errors=True)
    tests = work / "tools/server/tests"
    shutil.copytree(SOURCE / "tools/server/tests", tests)
    (work / "models").symlink_to(SOURCE / "models")
    suite.adapt(tests)
    models.fill(work / "hub", tests / "tmp", Path(PATHS["LOWKV_DEMO_TEXT"]).read_text(), SOURCE)
    return tests


def free_port():
    """Below the ports that the system gives to clients: one of them that asks a server that is not there
    yet could be given the server's own port, and would talk to itself."""
    for port in range(18080, 28080, 10):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SystemExit("no free port from 18080 to 28080")


def run(tests, work, scheme, names):
    """Runs the tests `names` with one scheme; returns a record per test."""
    record = work / f"{scheme}.json"
    record.unlink(missing_ok=True)
    more = {"LLAMA_SERVER_BIN_PATH": str(TOOLS / "llama-server"), "LLAMA_CACHE": str(work / "hub"),
            "MODEL_ENDPOINT": "http://127.0.0.1:9/", "PORT": str(free_port()),
            "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1", "LOWKV_SUITE_RECORD": str(record),
            "LLAMA_ARG_THREADS": "1"}
    if scheme != STOCK:
        more["LLAMA_ARG_DEVICE"] = "LOWKV"
    command = [PATHS["LOWKV_LLAMA_SERVER_TESTS_PYTHON"], "-m", "pytest", "-p", "no:cacheprovider", "-p", "suite_plugin",
               "-q", "--tb=line", *names]
    with open(work / f"{scheme}.log", "a") as log:
        subprocess.run(command, cwd=tests, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                       timeout=TIME_LIMIT, env=environment(None if scheme == STOCK else scheme, **more))
    if not record.exists():
        raise SystemExit(f"the tests did not start with {scheme}: see {work / scheme}.log")
    return json.loads(record.read_text())


def run_all(tests, work, schemes, names):
    """All tests with each scheme, then those again whose outcome differs from stock's, where they failed."""
    results = {scheme: run(tests, work, scheme, names) for scheme in (STOCK, *schemes)}
    for scheme in schemes:
        differing = [t for t, record in results[scheme].items() if record["outcome"] != outcome(results, STOCK, t)]
        for where in (STOCK, scheme):
            failed = [t for t in differing if outcome(results, where, t) == "failed"]
            if failed:
                for test, record in run(tests, work, where, failed).items():
                    results[where][test] = {**record, "again": True}
    return results


def outcome(results, scheme, test):
    return results[scheme].get(test, {}).get("outcome", "missing")


def cache_of(record):
    """What the log of a test says about the servers that it started: packed, f16 by its own options, none."""
    log = record.get("log", "")
    said = [kind for kind, words in (("packed", "lowkv: active: scheme"), ("f16", "layers, which stay f16"))
            if words in log]
    return " and ".join(said) or "none"


def short(test):
    return test.removeprefix("unit/")


def count(outcomes):
    """["passed", "passed", "failed"] -> "2 passed, 1 failed"; one alone goes without its number."""
    if len(outcomes) == 1:
        return outcomes[0]
    return ", ".join(f"{n} {outcome}" for outcome, n in collections.Counter(outcomes).most_common())


def cell(text):
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def grouped(tests, end):
    """Tests of one file (`end` is "::") or of one function ("[")."""
    groups = collections.defaultdict(list)
    for test in tests:
        groups[short(test).split(end)[0]].append(test)
    return groups.items()


def table(results, schemes):
    ran = [t for t in results[STOCK] if outcome(results, STOCK, t) != "left out"]
    left_out = [t for t in results[STOCK] if outcome(results, STOCK, t) == "left out"]
    columns = (STOCK, *schemes)
    lines = ["| tests of | " + " | ".join(columns) + " | cache |", "|---|" + "---|" * (len(columns) + 1)]
    for file, cases in grouped(ran, "::"):
        cells = [count([outcome(results, s, t) for t in cases]) for s in columns]
        caches = sorted({cache_of(results[s][t]) for s in schemes for t in cases if t in results[s]})
        lines.append(f"| {file} | " + " | ".join(cells) + f" | {', '.join(caches)} |")
    totals = [count([outcome(results, s, t) for t in ran]) for s in columns]
    lines.append("| **all** | " + " | ".join(totals) + " | |")

    lines += ["", "## Not passed on stock", "", "| test | why |", "|---|---|"]
    lines += [f"| {cell(short(t))} | {outcome(results, STOCK, t)}: {cell(results[STOCK][t]['why'])[:160]} |"
              for t in ran if outcome(results, STOCK, t) != "passed"]
    lines += ["", "## Left out", "", "| tests | cases | why |", "|---|---|---|"]
    lines += [f"| {f} | {len(ts)} | {results[STOCK][ts[0]]['why']} |" for f, ts in grouped(left_out, "[")]
    second = sorted({short(t) for s in columns for t, r in results[s].items()
                     if r.get("again") and r["outcome"] == "passed"})
    if second:
        lines += ["", "Passed at the second try only: " + "; ".join(second) + "."]
    return "\n".join(lines) + "\n"


INTRO = """# llama.cpp's own server tests under the plug-in

Made by `make test-llama` (tests/llama_server/run.py) from the suite in llama.cpp's tree
(tools/server/tests, ggml {ggml}): each test on stock llama-server, then with `GGML_BACKEND_PATH`,
`LLAMA_ARG_DEVICE=LOWKV` and `LOWKV_SCHEME`. Small models with random weights stand in for the hub's, the
numbers that belong to those (lengths of prompts in tokens) are replaced in a copy of the suite, and where
a test looks for words that the hub's model answers with, any answer will do. "cache" is what the log of
the plug-in says: packed; f16 where a test asks for what isn't packed (`-fa off`); none where no
model with a cache is loaded (routers, encoders). Each test by itself is in build/llama-server-tests/results.json.

"""


def problems(results, schemes):
    """What must not be: passed on stock only, or a plug-in that was not there."""
    found = []
    for scheme in schemes:
        for test, record in results[STOCK].items():
            ours = outcome(results, scheme, test)
            if record["outcome"] == "passed" and ours != "passed":
                found.append(f"{scheme}: {short(test)}: {ours}: {results[scheme].get(test, {}).get('why', '')[:300]}")
            record = results[scheme].get(test, {})
            log = record.get("log", "")
            if "llama_server: model loaded" in log and not ENCODERS.search(log) and cache_of(record) == "none":
                found.append(f"{scheme}: {short(test)}: a model was loaded, but its cache is not the plug-in's")
    return found


def never_packed(results, schemes):
    """The models with a cache that no test had packed: then nothing was compared."""
    found = []
    for scheme in schemes:
        packed = collections.defaultdict(bool)
        for record in results[scheme].values():
            for model in MODEL.findall(record.get("log", "")):
                packed[model] |= "packed" in cache_of(record)
        found += [f"{scheme}: the cache of {model} was never packed" for model, was in packed.items()
                  if not was and not ENCODERS.search(model)]
        if not any(packed.values()):
            found.append(f"{scheme}: no cache was packed at all")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=WHOLE, help="e.g. unit/test_slot_save.py; all if none is named")
    parser.add_argument("--schemes", default="exact,lowkv2.8", help="commas between them (default: %(default)s)")
    parser.add_argument("--table", type=Path, help="write the table to this Markdown file")
    args = parser.parse_args()
    if "LOWKV_LLAMA_SERVER_TESTS_PYTHON" not in PATHS:
        parser.error("run `python3 deps/setup.py venv-llama-server-tests` first")
    if not os.path.exists(PLUGIN):
        parser.error(f"there is no plug-in at {PLUGIN}: run `make`, or name the build folder in LOWKV_BUILD_DIR")
    schemes = args.schemes.split(",")
    work = ROOT / "build/llama-server-tests"
    results = run_all(prepare(work), work, schemes, args.tests)
    (work / "results.json").write_text(json.dumps(results, indent=1))
    if args.table:
        args.table.write_text(INTRO.format(ggml=PATHS["LOWKV_GGML_VERSION"]) + table(results, schemes))
    for scheme in (STOCK, *schemes):
        print(f"{scheme}: {count([r['outcome'] for r in results[scheme].values()])}")
    found = problems(results, schemes)
    if args.tests == WHOLE:
        found += never_packed(results, schemes)
    print("\n".join(found) if found else "what passes on stock passes with the plug-in")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
