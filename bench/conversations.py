#!/usr/bin/env python3
"""Many conversations in a fixed amount of memory: how long each waits for its first token when it comes back.

    bench/conversations.py                     20 conversations of 4,000 tokens, 400 MiB (two hours on a slow core)
    bench/conversations.py --conversations 5 --memory 230     a quarter of that, which docs/saving.md has

Each conversation begins with a prompt of --tokens tokens; then all come back in turn with 16 more, --rounds times.
Stock llama-server has as many f16 cells as two of them need, and the rest of --memory for `-cram`, which holds what
waits. lowkv has a slot for each conversation and `-cram 0`: nothing is moved. The row with `-cram` is stock's way with
lowkv's cache: what waits has f16's size there, so it holds no more than stock. `memory` is the server's peak beside
what it takes without a conversation, with stock's cells, which are there from the beginning; `back` is the median and
worst time of the prompt when a conversation comes back, `again` how many of those had to be computed anew."""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from shapes import peak

ROOT = Path(__file__).resolve().parent.parent
MORE, ANSWER = 16, 8


def ways(options):
    """name: (scheme, options of the server)"""
    two = 2 * (options.tokens + options.room)
    kept = max(1, options.memory - round(two * options.f16_kib / 1024))
    all_of_them = options.conversations * (options.tokens + options.room)
    swap = ("-np", 1, "-c", two, "-cram", kept)
    return {"stock f16, -cram": (None, swap),
            options.scheme: (options.scheme, ("-np", options.conversations, "-c", all_of_them, "-cram", 0)),
            f"{options.scheme}, -cram": (options.scheme, swap)}


def measure(tools, options, scheme, words):
    own_slots = "-cram" in words and words[-1] == 0
    texts = [tools.text(number, 12 * (options.tokens + options.room)) for number in range(options.conversations)]
    with (tempfile.TemporaryDirectory() as folder,
          tools.server(Path(folder), "-fa", "on", *words, scheme=scheme) as server):
        tokens = [server.request("POST", "/tokenize", {"content": text})[1]["tokens"] for text in texts]
        before = peak(server)

        def say(number, end):
            slot = {"id_slot": number} if own_slots else {}
            return server.complete(tokens[number][:end], tokens=ANSWER, **slot)["timings"]

        for number in range(options.conversations):
            say(number, options.tokens)
            print(f"  begun: {number + 1} of {options.conversations}", file=sys.stderr, end="\r")
        back = []
        for turn in range(1, options.rounds + 1):
            for number in range(options.conversations):
                back.append(say(number, options.tokens + MORE * turn))
                print(f"  back: {len(back)} of {options.rounds * options.conversations}", file=sys.stderr, end="\r")
        waits = [one["prompt_ms"] / 1000 for one in back]
        # Stock fills its cells with zeros before `before`, a packed cache takes memory as it grows.
        filled = 0 if scheme else words[words.index("-c") + 1] * options.f16_kib / 1024
        return {"memory": (peak(server) - before) / 2**20 + filled,
                "median": statistics.median(waits), "worst": max(waits),
                "again": sum(one["prompt_n"] > options.tokens / 2 for one in back), "of": len(back)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=Path, help="the build folder")
    parser.add_argument("--scheme", default="lowkv2.8", help="default: %(default)s")
    parser.add_argument("--conversations", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=4000, help="of each (default: %(default)s)")
    parser.add_argument("--memory", type=int, default=400, help="MiB for all of them (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each comes back (default: %(default)s)")
    options = parser.parse_args()
    options.room = MORE * options.rounds + 2 * ANSWER
    options.f16_kib = 22.5  # of a token of SmolLM2: 30 layers, 2 x 3 heads of 64 channels
    os.environ["LOWKV_BUILD_DIR"] = str(options.build)
    sys.path.insert(0, str(ROOT / "tests/e2e"))
    import plugin_tools as tools

    print("| cache | memory, MiB | back: median, s | worst, s | computed again |\n|---|--:|--:|--:|--:|", flush=True)
    for name, (scheme, words) in ways(options).items():
        print(name, file=sys.stderr)
        row = measure(tools, options, scheme, words)
        print(f"| {name} | {row['memory']:.0f} | {row['median']:.2f} | {row['worst']:.2f} | "
              f"{row['again']} of {row['of']} |", flush=True)


if __name__ == "__main__":
    main()
