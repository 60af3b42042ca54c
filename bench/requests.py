#!/usr/bin/env python3
"""What a server of many clients holds while requests come and go, beside what f16 would take for the same tokens.

    bench/requests.py                      llama-server at its defaults, 8 clients, 40 requests of 20 to 1,000 tokens
    bench/requests.py --requests 400       ... a quarter of an hour
    bench/requests.py --chats 32           one slot for each of 32 chats of 340 tokens, one unified cache

`rows` is what the unquantized tokens' rows take, `unquantized` the memory for them, `packed` that of the others,
`f16` all of these tokens in f16, `told` what llama.cpp was told before. All in MiB, by the plug-in's own statistics,
which it writes once a second: at the moment when unquantized memory is the largest beside its rows, at that when the
whole is the largest beside f16, and at the end. Moments with fewer than 1,000 tokens do not count."""

import argparse
import os
import random
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKEN_KIB = 22.5  # of SmolLM2 in f16: 30 layers, 2 x 3 heads of 64 channels
LEAST = 1000


def look(path):
    """The figures of all caches of the server, or nothing while there are none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    sums = {}
    for line in lines:
        found = re.match(r'lowkv_cache_(\w+)\{(?:[^}]*state="(\w+)")?[^}]*\} (\d+)', line)
        if found:
            name = "_".join(filter(None, found.group(1, 2)))
            sums[name] = sums.get(name, 0) + int(found[3])
    return sums


def row_of(sums):
    mib = 2**20
    exact, packed = sums["cells_exact"], sums["cells_packed"]
    return {"tokens": exact + packed, "rows": exact * TOKEN_KIB / 1024, "unquantized": sums["bytes_exact"] / mib,
            "packed": sums["bytes_packed"] / mib, "f16": (exact + packed) * TOKEN_KIB / 1024,
            "told": sums["told_bytes"] / mib}


def watch(path, options, busy):
    worst, last = {}, None
    while busy():
        time.sleep(0.5)
        sums = look(path)
        if not sums:
            continue
        last = row = row_of(sums)
        if row["tokens"] < LEAST:
            continue
        for name, ratio in (("unquantized", row["unquantized"] / max(row["rows"], 1e-9)),
                            ("whole", (row["unquantized"] + row["packed"]) / row["f16"])):
            if ratio > worst.get(name, (0, None))[0]:
                worst[name] = (ratio, row)
    return {**{name: row for name, (_, row) in worst.items()}, "end": last}


def client(server, options, left, lock, draw):
    while True:
        with lock:
            if not left:
                return
            left.pop()
            prompt = [draw.randint(100, 40000) for _ in range(draw.randint(20, 1000) if not options.chats else 300)]
            answer = draw.randint(20, 200) if not options.chats else 40
        body = {"prompt": prompt, "n_predict": answer, "ignore_eos": True, "temperature": 0}
        status, said = server.request("POST", "/completion", body, timeout=900)
        assert status == 200, said
        print(f"  {len(left)} requests to come ", file=sys.stderr, end="\r")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=Path, help="the build folder")
    parser.add_argument("--scheme", default="lowkv2.8", help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--chats", type=int, default=0, help="so many slots and chats instead")
    options = parser.parse_args()
    os.environ["LOWKV_BUILD_DIR"] = str(options.build)
    sys.path.insert(0, str(ROOT / "tests/e2e"))
    import plugin_tools as tools

    words = ("-np", options.chats, "-kvu", "-c", options.chats * 512) if options.chats else ()
    left = list(range(options.chats or options.requests))
    draw, lock = random.Random(1), threading.Lock()
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.prom"
        by = (options.build / "bin/lowkv", "run", "--scheme", options.scheme, "--")
        with tools.server(Path(folder), *words, scheme=None, by=by, env={"LOWKV_STATS": str(stats)}) as server:
            threads = [threading.Thread(target=client, args=(server, options, left, lock, draw))
                       for _ in range(options.chats or options.clients)]
            for thread in threads:
                thread.start()
            until = [None]

            def busy():  # and two more seconds, for the last figures
                if any(thread.is_alive() for thread in threads):
                    return True
                until[0] = until[0] or time.time() + 2.5
                return time.time() < until[0]

            found = watch(stats, options, busy)
    columns = ("tokens", "rows", "unquantized", "packed", "f16", "told")
    print(f"| {options.scheme} | {' | '.join(columns)} | unquantized / rows | f16 / held |")
    print("|---|" + "--:|" * (len(columns) + 2))
    for name, row in found.items():
        held = row["unquantized"] + row["packed"]
        print(f"| {name} | " + " | ".join(f"{row[c]:.0f}" if c == "tokens" else f"{row[c]:.1f}" for c in columns) +
              f" | {row['unquantized'] / row['rows']:.2f} | {row['f16'] / held:.2f} |")


if __name__ == "__main__":
    main()
