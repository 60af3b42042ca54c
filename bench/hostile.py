#!/usr/bin/env python3
"""What a hostile client of a llama-server with the plug-in costs the others: memory, and time per token.

    bench/hostile.py                         10 minutes, SmolLM2, lowkv2.8
    bench/hostile.py --minutes 0.5 --window 3
    bench/hostile.py --scheme stock          the same without the plug-in: what is llama-server's own

Two normal clients go on with conversations. Beside them is one of ATTACKS, or in turn a neighbour who computes as many
tokens in the usual way: windows of --window seconds of each. Afterwards

    time      seconds a token of the normal clients beside an attack are within --most of those beside the neighbour
    told      what the caches hold (LOWKV_STATS), its peak too, is within "KV buffer size" of the log
    memory    resident memory of the last third of the rounds is that of the middle third, of six rounds or more
    answer    a fixed question has the answer of the beginning, and no request failed"""

import argparse
import json
import math
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

from soak import kl

ROOT = Path(__file__).resolve().parent.parent
SLOTS, CONTEXT = 6, 1024  # of a slot
STATS = re.compile(r'^lowkv_cache_(\w+)\{[^}]*?(?:state="(\w+)")?\} (\d+)$', re.M)


class Neighbour:
    """A client that goes on with a conversation by requests of the sizes that an attack has."""

    def __init__(self, tokens, seed):
        self.tokens, self.source, self.prompt = tokens, random.Random(seed), []

    def some(self, count):
        start = self.source.randrange(len(self.tokens) - count)
        return self.tokens[start:start + count]

    def next(self, count, limit=CONTEXT - 96):
        if len(self.prompt) + count > limit:
            self.prompt = []
        self.prompt = self.prompt + self.some(count)
        return self.prompt


# Each returns a request's body. `hostile` or not, it computes as many tokens.


def tiny_shifts(self, hostile):
    """An answer at the end of the context: each token makes room for itself alone, at another place."""
    if len(self.prompt) < CONTEXT - 40:
        self.prompt = self.some(CONTEXT - 40)
    more = {"n_discard": 1, "n_keep": self.source.randrange(CONTEXT // 2)} if hostile else {}
    return {"prompt": self.prompt, "n_predict": 72, **more}


def short_conversations(self, hostile):
    count = self.source.randrange(3, 20)
    return {"prompt": self.some(count) if hostile else self.next(count), "n_predict": 1}


def few_shared_tokens(self, hostile):
    count = self.source.randrange(100, 300)
    same = self.tokens[:self.source.randrange(4, 40)]
    return {"prompt": same + self.some(count) if hostile else self.next(count), "n_predict": 4}


def shuffled_pieces(self, hostile):
    """Pieces of its last prompt, some left out: with n_cache_reuse each is moved to another place."""
    if not hostile or len(self.prompt) < 200:
        return {"prompt": self.next(120), "n_predict": 2}
    kept, at = [], 0
    while at < len(self.prompt):
        piece = self.source.randrange(4, 24)
        kept += self.prompt[at:at + piece]
        at += piece + self.source.randrange(1, 6)
    self.prompt = kept + self.some(min(120, CONTEXT - 96 - len(kept)))
    return {"prompt": self.prompt, "n_predict": 2, "n_cache_reuse": 1}


ATTACKS = [tiny_shifts, short_conversations, few_shared_tokens, shuffled_pieces]


class Trial:
    def __init__(self, options, server, stats):
        self.options, self.server, self.stats = options, server, stats
        text = Path(server.tools.PATHS["LOWKV_HANDBOOK_TEXT"]).read_text(encoding="utf-8")[20_000:220_000]
        self.tokens = server.request("POST", "/tokenize", {"content": text})[1]["tokens"]
        self.times = defaultdict(list)  # (attack, hostile): (tokens, seconds) of the normal clients
        self.requests, self.failed, self.lock = defaultdict(int), [], threading.Lock()
        self.rows, self.worst = [], 0.0
        self.normal = [Neighbour(self.tokens, f"normal {i}") for i in range(2)]
        self.guests = {(attack, hostile): Neighbour(self.tokens, f"{attack.__name__} {hostile}")
                       for attack in ATTACKS for hostile in (False, True)}

    def send(self, body):
        body = {"temperature": 0.8, "seed": 1, "ignore_eos": True, **body}
        status, answer = self.server.request("POST", "/completion", body, timeout=900)
        if status != 200:
            self.failed.append(answer)
            return None
        return answer["timings"]

    def normal_client(self, number, key, until):
        while time.monotonic() < until:
            found = self.send({"prompt": self.normal[number].next(24, 800), "n_predict": 32})
            if found:
                with self.lock:
                    self.times[key].append((found["predicted_n"], found["predicted_ms"] / 1000))

    def guest(self, key, until):
        while time.monotonic() < until:
            self.send(key[0](self.guests[key], key[1]))
            self.requests[key] += 1

    def window(self, key):
        until = time.monotonic() + self.options.window
        clients = [threading.Thread(target=self.guest, args=(key, until)),
                   *(threading.Thread(target=self.normal_client, args=(i, key, until)) for i in range(2))]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def question(self):
        body = {"prompt": self.tokens[:600], "n_predict": 1, "temperature": 0, "n_probs": 500, "cache_prompt": False,
                "logit_bias": [[self.tokens[0], 100]]}
        answer = self.server.request("POST", "/completion", body, timeout=900)[1]
        return {t["id"]: math.exp(t["logprob"]) for t in answer["completion_probabilities"][0]["top_logprobs"]}

    def held(self):
        """Of all caches, MiB: now and at most."""
        if not self.stats:
            return 0.0, 0.0
        time.sleep(1.2)
        figures = STATS.findall(self.stats.read_text())
        return tuple(sum(int(n) for name, _, n in figures if name == kind) / 2**20 for kind in ("bytes", "peak_bytes"))

    def told(self):
        sizes = re.findall(r"KV buffer size = +([\d.]+) MiB", self.server.log_text())
        return float(sizes[-1])

    def run(self):
        first, end = self.question(), time.monotonic() + 60 * self.options.minutes
        attacks = [attack for attack in ATTACKS if self.options.attack in ("all", attack.__name__)]
        while time.monotonic() < end or not self.rows:
            for attack in attacks:
                for hostile in (False, True) if time.monotonic() < end or not self.rows else ():
                    self.window((attack, hostile))
            self.worst = max(self.worst, kl(first, self.question()))
            held, peak = self.held()
            self.rows.append({"rss": self.server.memory_kib() / 1024, "held": held, "peak": peak})
            print(f"round {len(self.rows)}: RSS {self.rows[-1]['rss']:.0f} MiB, held {held:.1f}, at most {peak:.1f} of "
                  f"{self.told():.1f} told", flush=True)

    def slower(self, attack):
        """By what beside an attack, and ms a token beside the neighbour."""
        each = {hostile: 1000 * statistics.median(s / n for n, s in self.times[attack, hostile])
                for hostile in (False, True)}
        return each[True] / each[False], each[False]

    def verdicts(self):
        """[(what, figures, good)]"""
        options, found = self.options, []
        for attack in ATTACKS:
            if self.times[attack, True] and self.times[attack, False]:
                ratio, alone = self.slower(attack)
                found.append((f"time per token, {attack.__name__.replace('_', ' ')} "
                              f"({self.requests[attack, True]:,} requests)",
                              f"{ratio:.2f}x of {alone:.1f} ms", ratio <= options.most))
        rss = [row["rss"] for row in self.rows]
        third = max(len(rss) // 3, 1)
        middle, late = statistics.mean(rss[-2 * third:-third] or rss), statistics.mean(rss[-third:])
        if len(rss) >= 6:  # before that the host cache is still filling
            found.append(("resident memory, middle and last third", f"{middle:.0f} -> {late:.0f} MiB",
                          late <= 1.05 * middle + 8))
        if self.stats:
            peak = max(row["peak"] for row in self.rows)
            found.append(("memory of the caches: told, at most held", f"{self.told():.1f}, {peak:.1f} MiB",
                          peak <= self.told()))
        found.append(("fixed question: largest KL", f"{self.worst:.4f}", self.worst <= 0.1))
        log = self.server.log_text()
        found.append(("requests refused, NOT active in the log", f"{len(self.failed)}, {log.count('NOT active')}",
                      not self.failed and "NOT active" not in log))
        return found


def attack(options, folder):
    """The trial's verdicts, with the server of a build."""
    import plugin_tools as tools
    scheme = None if options.scheme == "stock" else options.scheme
    stats = folder / "stats.prom" if scheme else None
    with tools.server(folder, "-c", SLOTS * CONTEXT, "-np", SLOTS, "-fa", "on", "-cram", 64, "--context-shift",
                      "-lv", 4, scheme=scheme, env={"LOWKV_STATS": str(stats)} if scheme else {}) as server:
        server.tools = tools
        trial = Trial(options, server, stats)
        trial.run()
        for failure in trial.failed[:5]:
            print(failure, file=sys.stderr)
        return trial.verdicts()


def arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=Path, help="the build folder")
    parser.add_argument("--scheme", default="lowkv2.8", help='or "stock" (default: %(default)s)')
    parser.add_argument("--minutes", type=float, default=10, help="default: %(default)s")
    parser.add_argument("--window", type=float, default=8, help="seconds of each load (default: %(default)s)")
    parser.add_argument("--attack", default="all", help="one of those above by its name (default: all)")
    parser.add_argument("--most", type=float, default=1.3, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    return parser.parse_args(words)


def main():
    options = arguments()
    os.environ["LOWKV_BUILD_DIR"] = str(options.build)
    sys.path.insert(0, str(ROOT / "tests/e2e"))
    with tempfile.TemporaryDirectory() as folder:
        found = attack(options, Path(folder))
    print(f"\n{options.scheme}, {options.minutes:g} minutes\n\n| check | figures | |\n|---|---|---|")
    for what, figures, good in found:
        print(f"| {what} | {figures} | {'good' if good else 'FAILED'} |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(good for _, _, good in found))


if __name__ == "__main__":
    main()
