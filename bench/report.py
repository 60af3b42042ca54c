#!/usr/bin/env python3
"""A dated benchmark report of this machine: what was run, what it printed, and the raw logs.

    bench/report.py                       what `make report` runs: a page in docs/reports, raw logs in a folder beside
    bench/report.py --only attention,plan    some steps, into the same report: the others keep what they had
    bench/report.py --list                the steps

Each step is a command that can be run by hand. Steps measure lowkv and its baseline in turn, so ratios can be compared
between machines; absolute figures belong to one machine and one hour. Nothing else should run meanwhile."""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "attention --op decode --heads 32/8 --tokens 4096,16384 --threads 2 --schemes " \
          "lowkv2.8,lowkv2,lowkv4,kivi2,kivi4 --peers f16,q8_0 --head-dim 64,128,256"


class Step(NamedTuple):
    name: str
    title: str
    command: str  # {lowkv}, {bench}, {model}, {text} and {python} stand for the build's and the set-up's
    minutes: int
    implementation: str = ""  # of the kernels; empty: the best of this CPU


STEPS = (
    Step("attention", "One attention of a decode step, beside ggml's kernels", "{bench} " + KERNELS, 3),
    Step("attention-avx2", "The same with AVX2 alone", "{bench} " + KERNELS, 2, "avx2"),
    Step("llama-bench", "Prompts and answers of SmolLM2-135M: stock llama-bench",
         "{python} bench/llama_bench.py --depths 0,4096,8000 --schemes lowkv2.8,lowkv2,kivi2 -n 64", 6),
    Step("shapes", "Decoding at depth in the shape of Qwen3-4B: stock llama-server",
         "{python} bench/shapes.py --shapes qwen3-4b --depths 16384 --caches f16,q8_0,lowkv2.8,lowkv2", 8),
    Step("conversations", "Five conversations that come back, in the same memory",
         "{python} bench/conversations.py --conversations 5 --memory 230", 25),
    Step("loss", "What each scheme loses on SmolLM2-135M: distributions beside f16's",
         "{lowkv} compare -m {model} -f {text} --tokens 4096 --schemes lowkv4,lowkv3,lowkv2.8,lowkv2,lowkv1.5,kivi4,"
         "kivi2", 4),
    Step("plan", "What fits: SmolLM2-135M", "{lowkv} plan -m {model}", 1),
)


def paths():
    found = json.loads(subprocess.run([sys.executable, ROOT / "deps/setup.py", "--paths"], capture_output=True,
                                      text=True, check=True).stdout)
    return {"model": found["LOWKV_MODEL"], "text": found["LOWKV_HANDBOOK_TEXT"], "python": found["LOWKV_PYTHON"]}


def printed(command):
    done = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def machine():
    """(what, words) of this machine and of what was built."""
    cpu = [line.split(":", 1)[1].strip() for line in printed("lscpu").splitlines() if line.startswith("Model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    changed = " and uncommitted changes" if printed("git status --porcelain -- include src cli plugins bench") else ""
    return [("processor", f"{cpu[0] if cpu else platform.machine()}, {os.cpu_count()} threads"),
            ("memory", f"{memory:.0f} GiB"), ("system", f"{platform.system()} {platform.release()}"),
            ("compiler", printed("g++ --version").splitlines()[0]),
            ("lowkv", printed("git describe --always") + changed)]


def run(step, names, folder):
    """Writes NAME.txt (what the step printed) and NAME.log (its progress); returns its record."""
    words = [word.format_map(names) for word in shlex.split(step.command)]
    environment = os.environ | ({"LOWKV_IMPLEMENTATION": step.implementation} if step.implementation else {})
    print(f"{step.name}: about {step.minutes} min", file=sys.stderr, flush=True)
    start = time.monotonic()
    with open(folder / f"{step.name}.txt", "w") as out, open(folder / f"{step.name}.log", "w") as log:
        code = subprocess.run(words, cwd=ROOT, env=environment, stdout=out, stderr=log, check=False).returncode
    if code != 0:
        sys.exit(f"report.py: {step.name} ended with status {code}; see {folder / step.name}.log")
    return {"seconds": round(time.monotonic() - start), "machine": machine(),
            "begun": f"{datetime.datetime.now():%H:%M}"}


def shown(step):
    """The command as its reader would type it."""
    names = {"lowkv": "lowkv", "bench": "lowkv-bench", "model": "SmolLM2-135M.gguf", "text": "handbook.txt",
             "python": "python3"}
    begin = f"LOWKV_IMPLEMENTATION={step.implementation} " if step.implementation else ""
    return begin + step.command.format_map(names)


def page(date, records, folder):
    """The report: at most 45 lines of each step's output, the rest in its log."""
    lines = [f"# Benchmarks of {date}", "",
             "Written by `make report` (`bench/report.py`). Ratios can be compared; seconds belong to this machine and",
             "hour.",
             "", "| | |", "|---|---|"]
    last = records[next(reversed(records))]
    lines += [f"| {what} | {words} |" for what, words in last["machine"]]
    for step in STEPS:
        if step.name not in records:
            continue
        text = (folder / f"{step.name}.txt").read_text().rstrip().splitlines()
        where = f"[output]({date}/{step.name}.txt), [log]({date}/{step.name}.log)"
        its = records[step.name]
        lines += ["", f"## {step.title}", "", f"`{shown(step)}`: {its['seconds']} s from {its['begun']}, {where}.", ""]
        shared = [list(pair) for pair in last["machine"]]
        if others := [" ".join(pair) for pair in its["machine"] if list(pair) not in shared]:
            lines += [f"Not as above: {'; '.join(others)}.", ""]
        table = [line for line in text if line.startswith("|")]
        lines += table[:45] if table else ["```text", *(line.rstrip() for line in text[:45]), "```"]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/reports", help="default: docs/reports")
    parser.add_argument("--build", default=ROOT / "build/release", type=Path, help="default: %(default)s")
    parser.add_argument("--only", help="names of steps, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the steps, run nothing")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{step.name:16} {step.minutes:3} min  {shown(step)}" for step in STEPS))
        return
    only = options.only.split(",") if options.only else [step.name for step in STEPS]
    if unknown := set(only) - {step.name for step in STEPS}:
        parser.error(f"no step {', '.join(sorted(unknown))}; there are: {', '.join(step.name for step in STEPS)}")

    date = f"{datetime.date.today()}"
    folder = options.out / date
    folder.mkdir(parents=True, exist_ok=True)
    names = paths() | {"lowkv": str(options.build / "bin/lowkv"), "bench": str(options.build / "bin/lowkv-bench")}
    kept = folder / "steps.json"
    records = json.loads(kept.read_text()) if kept.exists() else {}
    for step in STEPS:
        if step.name in only:
            records.pop(step.name, None)
            records[step.name] = run(step, names, folder)
            kept.write_text(json.dumps(records, indent=1) + "\n")
            (options.out / f"{date}.md").write_text(page(date, records, folder))
    print(f"{options.out / date}.md; link it from docs/performance.md and list it in mkdocs.yml")


if __name__ == "__main__":
    main()
