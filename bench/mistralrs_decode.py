#!/usr/bin/env python3
"""Decoding with stock llama.cpp, the plug-in and mistral.rs, taking turns, at several depths.

    python3 -m venv /tmp/mistralrs && /tmp/mistralrs/bin/pip install mistralrs==0.9.5
    bench/mistralrs_decode.py --python /tmp/mistralrs/bin/python

All three load the same file and decode 32 tokens after a prompt of each depth. llama-bench times its own
(tg32, with -fa 1). mistral.rs is asked for 33 tokens: the prompt's step gives the first, and 32 divided by
the time that it reports for the others (total_completion_time_sec) is its figure, without the prompt. Three
things differ, whichever engine they favour:

- mistral.rs drops what is below a millisecond from the time of each step: half a millisecond a token on
  average is given to it. (Its own avg_compl_tok_per_sec counts the prompt's token too, so it isn't used.)
- its steps sample (the most probable token); llama-bench's don't;
- its prompt is one word over and over, one of them at depth 0; llama-bench's tokens are random. Neither
  engine's time depends on which they are.

The last column is what attention to so many more tokens takes; weights cost the same at any depth. They
weigh against mistral.rs 0.9.5 on x86: Q4_1, the demo model's type, has portable code only, and its AVX-512
code takes Q4_K, Q6_K and Q8_0 with rows of a multiple of 256 (SmolLM2's have 576). With Q8_0 (eval/weights.py
q8_0 makes the file for -m) it is nearest to its best on this model.

Each turn is a process of its own. A figure is the median of its rounds; only ratios mean something."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from llama_tools import Tool, add_options, each_in_turn

PINNED = "mistralrs==0.9.5"
STOCK, PEER = "stock f16", "mistral.rs f16"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "llama-bench")
    parser.add_argument("--python", default=sys.executable, help="a Python that has mistralrs (default: this one)")
    parser.add_argument("--depths", default="0,4096,8000", help="tokens in the cache before (default: %(default)s)")
    parser.add_argument("--schemes", default="lowkv2.8", help="default: %(default)s")
    parser.add_argument("-n", "--answer", type=int, default=32, help="answer tokens (default: %(default)s)")
    parser.add_argument("-r", "--rounds", type=int, default=3, help="rounds of turns (default: %(default)s)")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(model, depth, answer):
    """Runs in the environment of mistral.rs. Its last line of output: {'tg': tokens/s, ...} or {'limit': tokens}."""
    from mistralrs import CompletionRequest, Runner, Which

    file = Which.GGUF(quantized_model_id=str(Path(model).parent), quantized_filename=Path(model).name)
    runner = Runner(which=file, max_seqs=1, prefix_cache_n=0)

    def ask(words, tokens):
        request = CompletionRequest(model="default", prompt=" the" * words, max_tokens=tokens, temperature=0.0,
                                    ignore_eos=True)
        return runner.send_completion_request(request).usage

    ask(8, 8)  # warms up
    limit = runner.max_sequence_length()
    if limit is not None and depth + answer + 1 > limit:
        print("\n" + json.dumps({"limit": limit}))
        return
    start = time.perf_counter()
    usage = ask(max(depth, 1), answer + 1)
    wall = time.perf_counter() - start
    if (usage.prompt_tokens, usage.completion_tokens) != (max(depth, 1), answer + 1):
        sys.exit(f"a prompt of {usage.prompt_tokens} tokens and an answer of {usage.completion_tokens}, "
                 f"where {max(depth, 1)} and {answer + 1} were asked for")
    print("\n" + json.dumps({"tg": answer / usage.total_completion_time_sec, "limit": limit, "seconds": wall,
                             "prompt_seconds": usage.total_prompt_time_sec}))


def version(options, bench):
    """That of mistralrs; a message where there is none."""
    ask = "import importlib.metadata as m, mistralrs; print(m.version('mistralrs'))"
    done = subprocess.run([options.python, "-c", ask], capture_output=True, text=True)
    if done.returncode != 0:
        bench.fail(f"{options.python} has no mistralrs. Make an environment with it and name that:\n"
                   f"    python3 -m venv /tmp/mistralrs && /tmp/mistralrs/bin/pip install {PINNED}\n"
                   f"    {sys.argv[0]} --python /tmp/mistralrs/bin/python")
    return done.stdout.strip()


def run_peer(bench, options, depth):
    threads = str(bench.threads)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RAYON_NUM_THREADS": threads, "CANDLE_NUM_THREADS": threads}
    command = [options.python, __file__, "--worker", json.dumps([bench.model, depth, options.answer])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        bench.fail(f"mistral.rs failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run(bench, options, name, depth):
    """One turn: {'tg': tokens/s, ...}, or None if the engine's context ends before."""
    if name == PEER:
        found = run_peer(bench, options, depth)
        if "tg" not in found:
            print(f"mistral.rs ends at {found['limit']} tokens: no figure at depth {depth}", file=sys.stderr)
            return None
        return found
    out, _ = bench.run(None if name == STOCK else name,
                       "-fa", 1, "-r", 1, "-o", "json", "-p", 0, "-n", options.answer, "-d", depth)
    row = json.loads(out)[0]
    return {"tg": row["avg_ts"], "cpu": row["cpu_info"]}


def main():
    options = arguments()
    if options.worker:
        worker(*json.loads(options.worker))
        return
    bench = Tool("llama-bench", options)
    peer_version = version(options, bench)
    depths = bench.depths(options.depths)
    names = [STOCK, *options.schemes.split(","), PEER]
    rows, first = [], {}
    print(f"| depth | engine | tg{options.answer} t/s | rounds | of stock | ms more than at depth {depths[0]} |\n"
          "|---|---|---|---|---|---|")
    for depth in depths:
        found = each_in_turn(depth, names, options.rounds,
                             lambda name, depth=depth: run(bench, options, name, depth))
        stock = statistics.median(one["tg"] for one in found[STOCK])
        for name, rounds in found.items():
            if None in rounds:
                continue
            middle = statistics.median(one["tg"] for one in rounds)
            each = ", ".join(f"{one['tg']:.1f}" for one in rounds)
            more = 1e3 / middle - 1e3 / first.setdefault(name, middle)
            print(f"| {depth} | {name} | {middle:.1f} | {each} | {middle / stock:.2f}x | {more:.1f} |", flush=True)
            rows.append({"depth": depth, "engine": name, "tg": middle, "tg_ratio": middle / stock, "ms_more": more,
                         "rounds": rounds})
    about = rows[0]["rounds"][0]
    print(f"\n{bench.threads} threads, medians of {options.rounds} interleaved rounds, {Path(bench.model).name}, "
          f"mistral.rs {peer_version}, ggml {bench.paths.get('LOWKV_GGML_VERSION', 'unknown')}, {about['cpu']}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
