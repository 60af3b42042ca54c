#!/usr/bin/env python3
"""Minutes of mixed work on one llama-server with the plug-in, and what must be as it was when they are over.

    make soak                                          10 minutes, SmolLM2, lowkv2.8
    bench/soak.py --minutes 1 --model tiny --scheme kivi2
    bench/soak.py --scheme stock                       the same work without the plug-in, to compare

8 clients send prompts of mixed lengths, go on with conversations, hang up early, and save, restore and erase
slots; the server has its default slots, a unified cache, and its host prompt cache, which is on by default. Its
limit is lowered (--cram) so that it fills and evicts. Between rounds of work the server is quiet, and checked:

    answers    the distribution after a fixed prompt is that of the first time, both run afresh and continued
               after llama-server has moved it to the host's memory and back
    memory     resident memory less the host prompt cache stays flat
    books      llama.cpp never tells a backend that cells were dropped, so no figure returns to zero when slots
               are erased. But a prompt that fills the context writes every cell anew: what it leaves, in packed
               and exact cells, must be what it left in the fresh server
    log        no "NOT active", nothing at the level of errors, and the process is alive to the end
"""

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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATS_INTERVAL = 1.1  # seconds; the plug-in writes its figures once a second
SLACK_CELLS = 128  # one block


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=Path)
    parser.add_argument("-m", "--model", help='a GGUF file, or "tiny" (default: the set-up\'s SmolLM2)')
    parser.add_argument("--scheme", default="lowkv2.8", help='or "stock" (default: %(default)s)')
    parser.add_argument("--minutes", type=float, default=10, help="of work (default: %(default)s)")
    parser.add_argument("--round", type=float, default=30, help="seconds between two checks (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("-c", "--context", type=int, default=8192)
    parser.add_argument("-t", "--threads", type=int, default=min(os.cpu_count() or 1, 2))
    parser.add_argument("--cram", type=int, default=256, help="the host prompt cache's limit, MiB (default: 256)")
    # Stock llama.cpp's own answers differ by up to .053: what else is in a batch changes the order of its sums.
    parser.add_argument("--tolerance", type=float, default=0.1, help="KL of an answer, nats (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


class Soak:
    def __init__(self, args, tools, server, stats):
        self.args, self.tools, self.server, self.stats_path = args, tools, server, stats
        book = Path(tools.PATHS["LOWKV_HANDBOOK_TEXT"]).read_text(encoding="utf-8")
        _, answer = server.request("POST", "/tokenize", {"content": book[20_000:20_000 + 40 * args.context]})
        self.tokens = answer["tokens"]
        self.slots = len(server.request("GET", "/slots")[1])
        self.longest = args.context // (self.slots + 1)  # so that all slots fit into the cache at once
        self.question = self.tokens[:min(1500, self.longest)]
        self.counts, self.lock = Counter(), threading.Lock()
        self.rows = []

    # Work

    def count(self, **more):
        with self.lock:
            self.counts.update(more)

    def some_tokens(self, source, most):
        length = min(int(math.exp(source.uniform(math.log(16), math.log(most)))), most)
        start = source.randrange(len(self.tokens) - length)
        return self.tokens[start:start + length]

    def client(self, number, until):
        source = random.Random(f"{self.args.seed} {number} {until}")
        conversation = []
        while time.monotonic() < until:
            kind = source.choices(["new", "go on", "cancel", "slot"], [45, 35, 10, 10])[0]
            if kind == "slot":
                self.move_slot(source)
                continue
            if kind == "new" or len(conversation) > self.longest * 2 // 3:
                conversation = self.some_tokens(source, self.longest * 2 // 3)
            else:
                conversation = conversation + self.some_tokens(source, self.longest // 6)
            if kind == "cancel":
                self.server.cancel_early(conversation, 100)
                self.count(cancelled=1)
                continue
            body = {"prompt": conversation, "n_predict": source.randint(1, self.longest // 8), "temperature": 0.8,
                    "seed": source.randrange(1 << 30), "return_tokens": True, "ignore_eos": True}
            status, answer = self.server.request("POST", "/completion", body, timeout=600)
            if status == 200:
                conversation = conversation + answer["tokens"]
                self.count(answered=1, tokens=answer["tokens_evaluated"] + answer["tokens_predicted"])
            else:
                self.count(refused=1)
                print(f"status {status}: {answer}", file=sys.stderr)

    def move_slot(self, source):
        slot, action = source.randrange(self.slots), source.choice(["save", "restore", "erase"])
        body = {"filename": f"slot-{source.randrange(3)}.bin"}
        # llama-server lets a busy slot's action wait for the slot, and may never wake it when all work ends there.
        try:
            status, _ = self.server.request("POST", f"/slots/{slot}?action={action}", body, timeout=120)
        except TimeoutError:
            self.count(**{f"slot {action} unanswered": 1})
            return
        # A file that was never saved, or saved of an empty slot, can't be restored.
        self.count(**{f"slot {action}{'' if status == 200 else ' refused'}": 1})

    def work(self, seconds):
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(self.args.clients) as pool:
            for done in [pool.submit(self.client, n, until) for n in range(self.args.clients)]:
                done.result()

    # Checks

    def ask(self, prompt, **more):
        """The distribution of the next token: its most likely ones, and all others together."""
        # Sampled is a token of the text: half a UTF-8 character would come without its probabilities.
        body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 500,
                "logit_bias": [[self.tokens[0], 100]], **more}
        status, answer = self.server.request("POST", "/completion", body, timeout=600)
        assert status == 200, answer
        return {t["id"]: math.exp(t["logprob"]) for t in answer["completion_probabilities"][0]["top_logprobs"]}

    def books(self):
        """What the caches hold after a prompt that fills the context, by the plug-in's own figures."""
        if self.args.scheme == "stock":
            return None
        for slot in range(self.slots):
            self.server.request("POST", f"/slots/{slot}?action=erase")
        full = self.tokens[:self.args.context - 8]
        self.ask(full)
        time.sleep(STATS_INTERVAL)
        self.ask(full)  # one token: the plug-in writes its figures while it computes
        return self.stats()

    def stats(self):
        found = Counter()
        for name, state, value in re.findall(r'^lowkv_cache_(\w+)\{[^}]*?(?:state="(\w+)")?\} (\d+)$',
                                             self.stats_path.read_text(), re.M):
            found[f"{name} {state}".strip()] += int(value)
        return dict(found)

    def host_cache_mib(self):
        sizes = re.findall(r"cache state: \d+ prompts, ([\d.]+) MiB", self.server.log_text())
        return float(sizes[-1]) if sizes else 0.0

    def check(self, first, start):
        time.sleep(STATS_INTERVAL)
        row = {"seconds": round(time.monotonic() - start), "fresh": self.ask(self.question, cache_prompt=False)}
        if first:  # moved out by another prompt; the first time it stays where it is
            self.ask(self.tokens[-100:])
        row["kept"] = self.ask([*self.question, *self.tokens[-20:]])
        for name in ("fresh", "kept"):
            row[name] = kl(first[name], row[name]) if first else row[name]
        row |= {"host cache MiB": self.host_cache_mib(), "rss MiB": self.server.memory_kib() / 1024, **self.counts}
        if self.args.scheme != "stock":
            row["stats"] = self.stats()
        return row

    def run(self):
        args, start = self.args, time.monotonic()
        before = self.books()
        first = self.check(None, start)
        end = time.monotonic() + 60 * args.minutes
        while time.monotonic() < end:
            self.work(min(args.round, max(end - time.monotonic(), 1)))
            row = self.check(first, start)
            self.rows.append(row)
            print(progress(row), flush=True)
        return before, self.books()


def kl(reference, other):
    pairs = [(reference[t], other[t]) for t in reference.keys() & other.keys()]
    rest = [max(1 - sum(p[i] for p in pairs), 1e-9) for i in (0, 1)]
    return sum(p * math.log(p / q) for p, q in [*pairs, rest] if p > 0)


def progress(row):
    text = (f"{row['seconds']:5} s, {row.get('answered', 0)} answers, {row.get('cancelled', 0)} cancelled, "
            f"RSS {row['rss MiB']:.0f} MiB of which host cache {row['host cache MiB']:.0f}, "
            f"KL fresh {row['fresh']:.4f}, kept {row['kept']:.4f}")
    if "stats" in row:
        stats = row["stats"]
        text += (f", MiB packed {stats['bytes packed'] / 2**20:.1f} exact {stats['bytes exact'] / 2**20:.1f}, "
                 f"reopened {stats['reopened_blocks_total']}")
    return text


def verdicts(soak, before, after):
    """[(what, figures, good)]"""
    args, rows, log = soak.args, soak.rows, soak.server.log_text()
    own = [r["rss MiB"] - r["host cache MiB"] for r in rows]
    third = max(len(own) // 3, 1)
    # Not from the first third on: the heap and the host cache are still filling, with stock too.
    early, late = statistics.mean(own[-2 * third:-third] or own), statistics.mean(own[-third:])
    found = [("memory less host cache, middle and last third", f"{early:.0f} -> {late:.0f} MiB",
              late <= 1.05 * early + 8)]
    for name in ("fresh", "kept"):
        worst = max(r[name] for r in rows)
        found.append((f"fixed question, {name}: largest KL", f"{worst:.4f}", worst <= args.tolerance))
    found.append(("requests refused", str(soak.counts["refused"]), soak.counts["refused"] == 0))
    if before:
        for state in ("packed", "exact"):
            b, a = (s[f"cells {state}"] for s in (before, after))
            found.append((f"books: {state} cells of a full context", f"{b} -> {a}", abs(a - b) <= SLACK_CELLS))
        found.append(("lines with NOT active", str(log.count("NOT active")), "NOT active" not in log))
    # Slot files that were never saved are asked for too.
    errors = [e for e in re.findall(r"^[\d.]+ E .*", log, re.M)
              if "failed to open" not in e and "Unable to restore slot" not in e]
    found.append(("errors in the log", str(len(errors)), not errors))
    for error in errors[:5]:
        print(error, file=sys.stderr)
    return found


def main():
    args = arguments()
    os.environ["LOWKV_BUILD_DIR"] = str(args.build)
    sys.path.insert(0, str(ROOT / "tests/e2e"))
    import plugin_tools as tools
    if "LOWKV_HANDBOOK_TEXT" not in tools.PATHS:
        sys.exit("soak.py: the text is missing: python3 deps/setup.py text")
    scheme = None if args.scheme == "stock" else args.scheme
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model = args.model or tools.MODEL
        if model == "tiny":
            import plugin_models
            model = plugin_models.llama(folder / "tiny.gguf", layers=3)
        env = {"LOWKV_STATS": str(folder / "stats.prom"), "LOWKV_VERBOSE": "1"} if scheme else {}
        with tools.server(folder, "-c", args.context, "-t", args.threads, "-fa", "on", "-cram", args.cram, "--slots",
                          "--slot-save-path", folder, "-lv", 4, scheme=scheme, model=model, env=env) as server:
            soak = Soak(args, tools, server, folder / "stats.prom")
            before, after = soak.run()
            found = verdicts(soak, before, after)
        freed = re.findall(r"lowkv: (cache freed: .*)", server.log_text())
    print(f"\n{Path(model).name}, {args.scheme}, {args.minutes:g} minutes, {args.clients} clients, {soak.slots} slots: "
          + ", ".join(f"{n} {what}" for what, n in sorted(soak.counts.items())))
    print(*freed, sep="\n")
    print("\n| check | figures | |\n|---|---|---|")
    for what, figures, good in found:
        print(f"| {what} | {figures} | {'good' if good else 'FAILED'} |")
    if args.json:
        result = {"arguments": {k: str(v) for k, v in vars(args).items()}, "counts": soak.counts, "rounds": soak.rows,
                  "books": [before, after], "checks": found}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(good for _, _, good in found))


if __name__ == "__main__":
    main()
