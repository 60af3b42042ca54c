#!/usr/bin/env python3
"""What restarts, kills and a full disk leave of the conversations of `lowkv run --keep FOLDER -- llama-server`.

    bench/keep.py restart --counts 1,4,12    conversations of 500 to 6,000 tokens (5 minutes)
    bench/keep.py stock --counts 1,4,12      the slot files that stock llama-server saves of them (5 minutes)
    bench/keep.py kills --kills 50           SIGKILL of lowkv run and the server at random moments (8 minutes)
    bench/keep.py full                       a folder on a small tmpfs (root; 1 minute)

Each conversation has a slot. `ready`: seconds until /health answers and, after a restart, the slots hold what was kept.
An answer is right if the distribution of its first token is that of a server that never stopped, but for --tolerance
(nats): what else is in a batch changes the order of sums."""

import argparse
import contextlib
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from soak import kl

ROOT = Path(__file__).resolve().parent.parent
MORE = 16  # tokens with which a client goes on
BACK = re.compile(r"--keep: what \d+ slots? held is back")


class Serving:
    """A llama-server with a slot for each conversation: that of `lowkv run --keep` where it has a folder."""

    def __init__(self, tools, place, lengths, *words, folder=None):
        self.tools, self.folder = tools, folder
        self.restores = bool(folder and files(folder))
        port, log = tools.free_port(), place / "log"
        by = [tools.BUILD / "bin/lowkv", "run", "--keep", folder, "--"] if folder else []
        command = [*by, tools.TOOLS / "llama-server", "--no-ui", "-m", tools.MODEL, "-t", 2, "--port", port,
                   "-c", len(lengths) * (max(lengths) + 256), "-np", len(lengths), "-cram", 0, *words]
        self.start = time.monotonic()
        with open(log, "w") as out:
            self.process = subprocess.Popen([str(word) for word in command], env=tools.environment(None), stdout=out,
                                            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.server = tools.Server(self.process, port, log)

    def ready(self):
        """Seconds it took; None where it ended before."""
        while self.process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                if (self.server.request("GET", "/health", timeout=5)[0] == 200 and
                        (not self.restores or BACK.search(self.server.log_text()))):
                    return time.monotonic() - self.start
            time.sleep(0.01)
        return None

    def kill(self):
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout
        for pid in (self.process.pid, *map(int, found.split())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def end(self):
        since = time.monotonic()
        self.process.terminate()
        assert self.process.wait(60) == 0, self.server.log_text()[-2000:]
        return time.monotonic() - since


def files(folder):
    return list(folder.glob("**/*.bin"))


def mebibytes(folder):
    return sum(path.stat().st_blocks for path in files(folder)) * 512 / 2**20


class Conversations:
    def __init__(self, tools, server, lengths):
        book = Path(tools.PATHS["LOWKV_HANDBOOK_TEXT"]).read_text(encoding="utf-8")
        self.lengths, self.tokens = lengths, []
        for number, length in enumerate(lengths):
            text = book[20_000 + 60_000 * number:][:8 * length]
            self.tokens.append(server.request("POST", "/tokenize", {"content": text})[1]["tokens"])

    def ask(self, server, number, more=0):
        """Timings, and the distribution of the token behind the first of the conversation's tokens and so many more."""
        tokens = self.tokens[number]
        found = server.complete(tokens[:self.lengths[number] + more], 1, n_probs=500, logit_bias=[[tokens[0], 100]])
        return found["timings"], {one["id"]: math.exp(one["logprob"])
                                  for one in found["completion_probabilities"][0]["top_logprobs"]}

    def begin(self, server):
        """What it says when each goes on; and leaves the slots as they were before that."""
        for number in range(len(self.lengths)):
            self.ask(server, number)
        right = [self.ask(server, number, MORE) for number in range(len(self.lengths))]
        for number in range(len(self.lengths)):
            self.ask(server, number)
        return right


def lengths_of(count):
    return [round(500 * 12 ** (i / (count - 1))) for i in range(count)] if count > 1 else [6000]


def restart(tools, options, place, count):
    lengths, folder = lengths_of(count), place / f"kept-{count}"
    first = Serving(tools, place, lengths, folder=folder)
    empty = first.ready()
    talks = Conversations(tools, first.server, lengths)
    right = talks.begin(first.server)
    ended = first.end()
    again = Serving(tools, place, lengths, folder=folder)
    ready = again.ready()
    back = [talks.ask(again.server, number, MORE) for number in range(count)]
    again.end()
    worst = max(kl(one[1], other[1]) for one, other in zip(right, back, strict=True))
    print(f"| {count} | {sum(lengths) + count * MORE:,} | {sum(timing['prompt_n'] for timing, _ in back):,} | "
          f"{mebibytes(folder):.1f} | {empty:.2f} | {ready:.2f} | {ended:.2f} | {worst:.4f} |", flush=True)
    return worst <= options.tolerance and all(timing["prompt_n"] <= 2 * MORE for timing, _ in back)


def stock(tools, _options, place, count):
    lengths, folder = lengths_of(count), place / f"stock-{count}"
    folder.mkdir()
    plain = Serving(tools, place, lengths, "-fa", "on", "--slot-save-path", folder)
    plain.ready()
    talks = Conversations(tools, plain.server, lengths)
    for number in range(count):
        talks.ask(plain.server, number)
        assert plain.server.request("POST", f"/slots/{number}?action=save", {"filename": f"{number}.bin"})[0] == 200
    plain.end()
    print(f"| {count} | {sum(lengths):,} | {mebibytes(folder):.1f} |", flush=True)
    return True


class Kills:
    def __init__(self, tools, options, place):
        self.tools, self.place, self.folder = tools, place, place / "kept"
        self.lengths, self.source = [400, 500, 600, 700], random.Random(options.seed)
        self.found, self.worst = Counter(), 0
        first = Serving(tools, place, self.lengths, folder=self.folder)
        first.ready()
        self.talks = Conversations(tools, first.server, self.lengths)
        self.right = self.talks.begin(first.server)
        first.end()

    def ask_all(self, serving):
        for number, length in enumerate(self.lengths):
            timing, said = self.talks.ask(serving.server, number, MORE)
            self.worst = max(self.worst, kl(self.right[number][1], said))
            self.found["asked for"] += 1
            self.found["back" if timing["cache_n"] >= length - 2 * MORE else "anew"] += 1

    def client(self, serving, moment):
        """Talks, and rests now and then so that slots are saved."""
        with contextlib.suppress(OSError, ValueError):  # its end
            if serving.ready() is None:
                return
            self.found["starts"] += 1
            self.ask_all(serving)
            while time.monotonic() < moment:
                self.talks.ask(serving.server, self.source.randrange(len(self.lengths)), self.source.randrange(MORE))
                time.sleep(min(self.source.choice([0, 0, 0.5, 6]), max(moment - time.monotonic(), 0)))

    def kill(self):
        serving = Serving(self.tools, self.place, self.lengths, folder=self.folder)
        moment = serving.start + self.source.choice([self.source.uniform(0, 2), self.source.uniform(2, 14)])
        client = threading.Thread(target=self.client, args=(serving, moment))
        client.start()
        time.sleep(max(moment - time.monotonic(), 0))
        self.found["ended by themselves"] += serving.process.poll() is not None
        serving.kill()
        client.join()
        self.found["kills"] += 1
        self.found["while a file was written"] += bool(list(self.folder.glob("*/*-part")))
        for line in re.findall(r"lowkv: --keep: .*(?:not restored|damaged|not saved).*", serving.server.log_text()):
            print(line, file=sys.stderr)


def kills(tools, options, place):
    trial = Kills(tools, options, place)
    for _ in range(options.kills):
        trial.kill()
    last = Serving(tools, place, trial.lengths, folder=trial.folder)
    assert last.ready() is not None, last.server.log_text()
    trial.ask_all(last)
    last.end()
    print(f"{dict(trial.found)}, largest KL {trial.worst:.4f}", flush=True)
    return trial.worst <= options.tolerance and trial.found["ended by themselves"] == 0


def full(tools, options, place):
    """One conversation fits and is saved, the next does not; then not even a byte does."""
    lengths, disk = [700, 4000], place / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", disk], check=True)
    try:
        for fill in (False, True):
            if fill:
                with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
                    while True:
                        filler.write(bytes(4096))
            serving = Serving(tools, place, lengths, folder=disk / "kept")
            assert serving.ready() is not None, serving.server.log_text()[-2000:]
            talks = Conversations(tools, serving.server, lengths)
            evaluated = [talks.ask(serving.server, number, MORE)[0]["prompt_n"] for number in range(2)]
            serving.end()
            said = [line for line in serving.server.log_text().splitlines() if "lowkv: --keep:" in line]
            print(f"evaluated {evaluated}, kept {[path.name for path in files(disk)]}", *said, sep="\n  ", flush=True)
            if len(files(disk)) != 1 or (fill and evaluated[0] > 2 * MORE):
                return False
        return True
    finally:
        subprocess.run(["umount", disk], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["restart", "stock", "kills", "full"])
    parser.add_argument("--build", default=ROOT / "build/release", type=Path, help="the build folder")
    parser.add_argument("--counts", default="1,4,12", help="of conversations (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=0.1, help="KL of an answer, nats (default: %(default)s)")
    options = parser.parse_args()
    os.environ["LOWKV_BUILD_DIR"] = str(options.build)
    sys.path.insert(0, str(ROOT / "tests/e2e"))
    import plugin_tools as tools
    runs = {"restart": restart, "stock": stock, "kills": kills, "full": full}
    heads = {"restart": ["conversations", "prompt tokens, evaluated without --keep", "evaluated after the restart",
                         "MiB kept", "ready, s: empty", "with them", "end, s", "largest KL"],
             "stock": ["conversations", "tokens", "MiB of slot files"]}
    with tempfile.TemporaryDirectory() as place:
        counts = [[int(count)] for count in options.counts.split(",")] if options.what in heads else [[]]
        if options.what in heads:
            print("| " + " | ".join(heads[options.what]) + " |\n" + "|--:" * len(heads[options.what]) + "|")
        good = [runs[options.what](tools, options, Path(place), *count) for count in counts]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
