#!/usr/bin/env python3
"""Stock llama-bench with and without the plug-in, taking turns, at several depths.

    bench/llama_bench.py                                    what `make bench` runs
    bench/llama_bench.py --schemes kivi2,kivi4 --depths 8000 --json out.json

For each depth and round, llama-bench runs once without the plug-in (stock f16) and once with each scheme;
each figure is the median of its rounds. pp512 is a prompt of 512 tokens at that depth, tg32 32 tokens of
answer. Only ratios mean something: absolute speeds belong to one machine and one hour."""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def set_up_paths():
    """What deps/setup.py has put into its cache, or nothing."""
    try:
        answer = subprocess.run(
            [sys.executable, ROOT / "deps/setup.py", "--paths"], capture_output=True, text=True, check=True
        )
        return json.loads(answer.stdout)
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError):
        return {}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(ROOT / "build/release"), help="the build folder (default: %(default)s)")
    parser.add_argument("--plugin", help="libggml-lowkv.so (default: the build folder's)")
    parser.add_argument("--llama-bench", help="stock llama-bench (default: the one that the set-up built)")
    parser.add_argument("-m", "--model", help="a GGUF file (default: the demo's model)")
    parser.add_argument("--depths", default="0,4096,8000", help="tokens in the cache before (default: %(default)s)")
    parser.add_argument("--schemes", default="lowkv2.8,kivi2", help="default: %(default)s")
    parser.add_argument("-t", "--threads", type=int, default=min(os.cpu_count() or 1, 2), help="default: %(default)s")
    parser.add_argument("-p", "--prompt", type=int, default=512, help="prompt tokens (default: %(default)s)")
    parser.add_argument("-n", "--answer", type=int, default=32, help="answer tokens (default: %(default)s)")
    parser.add_argument("-r", "--rounds", type=int, default=3, help="rounds of turns (default: %(default)s)")
    parser.add_argument("--json", help="write the figures to this file")
    return parser.parse_args()


def find(options):
    """(llama-bench, plug-in, model); a clear message when one is missing."""
    paths = set_up_paths()
    build = Path(options.build)
    plugin = options.plugin or next(build.rglob("libggml-lowkv.so"), build / "lib/libggml-lowkv.so")
    tools = Path(paths.get("LOWKV_LLAMA_BUILD", "."))
    bench = options.llama_bench or next(
        (path for path in (tools / "llama-bench", tools / "bin/llama-bench") if path.exists()), tools / "llama-bench"
    )
    model = options.model or paths.get("LOWKV_MODEL", "")
    for what, path, option in (
        ("llama-bench", bench, "--llama-bench"),
        ("plug-in", plugin, "--plugin"),
        ("model", model, "--model"),
    ):
        if not Path(path).is_file():
            sys.exit(f"llama_bench.py: there is no {what} at '{path}': run `make build`, or name it with {option}")
    return str(bench), str(Path(plugin).resolve()), str(model)


def run(bench, plugin, model, scheme, depth, options):
    """One llama-bench: {'pp': tokens/s, 'tg': tokens/s}. scheme None: without the plug-in."""
    environment = {k: v for k, v in os.environ.items() if k not in ("GGML_BACKEND_PATH", "LOWKV_SCHEME")}
    if scheme is not None:
        environment.update(GGML_BACKEND_PATH=plugin, LOWKV_SCHEME=scheme)
    command = [bench, "-m", model, "-t", str(options.threads), "-fa", "1", "-r", "1", "-o", "json"]
    command += ["-p", str(options.prompt), "-n", str(options.answer), "-d", str(depth)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"llama_bench.py: {' '.join(command)} failed ({done.returncode}):\n{done.stderr}")
    if (scheme is not None) != ("lowkv: active" in done.stderr):
        wrong = "did not become active" if scheme is not None else "is active though it was not asked for"
        sys.exit(f"llama_bench.py: the plug-in {wrong}:\n{done.stderr}")
    return {"pp" if row["n_prompt"] else "tg": row["avg_ts"] for row in json.loads(done.stdout)}


def table(rows, options):
    header = ["depth", "cache", f"pp{options.prompt} t/s", "of stock", f"tg{options.answer} t/s", "of stock"]
    lines = [header, ["-" * len(word) for word in header]]
    for row in rows:
        lines.append(
            [str(row["depth"]), row["scheme"], f"{row['pp']:.1f}", f"{row['pp_ratio']:.2f}x"]
            + [f"{row['tg']:.1f}", f"{row['tg_ratio']:.2f}x"]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("| " + " | ".join(word.rjust(width) for word, width in zip(line, widths)) + " |" for line in lines)


def main():
    options = arguments()
    bench, plugin, model = find(options)
    try:
        depths = [int(depth) for depth in options.depths.split(",")]
    except ValueError:
        sys.exit(f"llama_bench.py: --depths {options.depths}: whole numbers separated by commas")
    schemes = [None, *options.schemes.split(",")]
    rows = []
    for depth in depths:
        found = {scheme: [] for scheme in schemes}
        for turn in range(options.rounds):
            # The order turns round too, so that a machine that slows down favours nobody.
            for scheme in schemes if turn % 2 == 0 else reversed(schemes):
                print(f"depth {depth}, round {turn + 1}/{options.rounds}: {scheme or 'stock f16'}", file=sys.stderr)
                found[scheme].append(run(bench, plugin, model, scheme, depth, options))
        middle = {
            scheme: {kind: statistics.median(one[kind] for one in runs) for kind in ("pp", "tg")}
            for scheme, runs in found.items()
        }
        for scheme, speeds in middle.items():
            ratios = {f"{kind}_ratio": speeds[kind] / middle[None][kind] for kind in ("pp", "tg")}
            rows.append({"depth": depth, "scheme": scheme or "stock f16", **speeds, **ratios, "rounds": found[scheme]})
    print(table(rows, options))
    print(f"\n{options.threads} threads, medians of {options.rounds} interleaved rounds, {Path(model).name}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
