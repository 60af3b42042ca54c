#!/usr/bin/env python3
"""What a packed cache loses when llama-server moves conversations out and in again, or has two in one stream.

Two conversations take turns in one llama-server at its defaults: the one that waits is saved to the host's
memory, cleared, and restored when it goes on. Each turn appends a piece of text and then an answer, whose
tokens are given (the text's own), so that every server is asked for the same distributions. They are compared
with those of a server that holds one conversation alone:

    mean KL    of the alternating server's answers from those of the conversation alone, same scheme
    own loss   mean KL of the scheme alone from `exact` alone
    added      how much further from `exact` alone the answers are than the scheme's own loss, relative to it

Other ways of having two, with --ways: `slot-files`, where each turn of each conversation runs in a process of its own,
which gets the conversation through a slot file and never runs the prompt; `unified`, where both go on at once in two
slots that share one cache (--kv-unified), so that their rows lie among each other.

    make build && python3 deps/setup.py text && python3 eval/alternating.py --ways alternating,slot-files,unified

llama.cpp's own rounding is in all figures: the row `exact` shows it.
"""

import argparse
import contextlib
import json
import math
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paths import ROOT, fingerprint

CONTEXT = 8192
TEXT_STARTS = (20_000, 400_000)  # characters into the book, one conversation each
WAYS = ["alternating", "slot-files", "unified"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=Path)
    parser.add_argument("-m", "--model", help="a GGUF file (default: the set-up's SmolLM2)")
    parser.add_argument("--schemes", default="lowkv2.8,exact", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=3000, help="each conversation's first prompt (default: 3000)")
    parser.add_argument("--turns", type=int, default=8, help="of each conversation (default: %(default)s)")
    parser.add_argument("--piece", type=int, default=40, help="tokens appended per turn (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=8, help="distributions per turn (default: %(default)s)")
    parser.add_argument("--top", type=int, default=2000, help="tokens told apart, the others are one (default: 2000)")
    parser.add_argument("-t", "--threads", type=int, default=min(os.cpu_count() or 1, 2))
    parser.add_argument("--ways", default="alternating", help=f"of {', '.join(WAYS)} (default: %(default)s)")
    parser.add_argument("--cells", action="store_true", help="log the cells' positions and count those out of order")
    parser.add_argument("--keep", type=Path, metavar="FOLDER",
                        help="keep the answers here, and take those that are there already: one run may do a part")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    args.ways = args.ways.split(",")
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"--ways {','.join(sorted(unknown))}: they are {', '.join(WAYS)}")
    return args


def llama_servers(args):
    """tests/e2e's way to run llama-server, with this build's plug-in."""
    os.environ["LOWKV_BUILD_DIR"] = str(args.build)
    sys.path.insert(0, str(ROOT / "tests/e2e"))
    import plugin_tools
    return plugin_tools


class Measurement:
    def __init__(self, args, tools, folder):
        self.args, self.tools, self.folder = args, tools, folder
        self.model = args.model or tools.MODEL
        self.texts = None

    @contextlib.contextmanager
    def server(self, scheme, *more):
        log = self.tools.LOG_CELLS if self.args.cells else {"args": ("-lv", 4), "env": {}}
        env = {"OMP_WAIT_POLICY": "passive", **log["env"]}
        with self.tools.server(self.folder, "-c", CONTEXT, "-t", self.args.threads, *log["args"], *more,
                               scheme=scheme, model=self.model, env=env) as server:
            yield server
            log = server.log_text()
        if f"active: scheme {scheme}," not in log or "NOT active" in log:
            sys.exit(f"the plug-in was not active for all layers with {scheme}; {server.log}")

    def conversations(self):
        """The token ids of each conversation, prompt and turns."""
        if self.texts is None:
            book = Path(self.tools.PATHS["LOWKV_HANDBOOK_TEXT"]).read_text()
            need = self.args.tokens + self.args.turns * (self.args.piece + self.args.answer)
            with self.server("exact") as server:
                self.texts = [server.request("POST", "/tokenize", {"content": book[start:start + 10 * need]})[1]
                              ["tokens"][:need] for start in TEXT_STARTS]
            assert all(len(text) == need for text in self.texts), "the book is too short"
        return self.texts

    def turn(self, server, conversation, turn, **more):
        """The turn's distributions: [{token: probability}], one per token of the answer."""
        args = self.args
        start = args.tokens + turn * (args.piece + args.answer) + args.piece
        answers = []
        for end in range(start, start + args.answer):
            text = self.conversations()[conversation]
            # Sampled is a token of the text: half a UTF-8 character would come without its probabilities, which
            # are those before the bias.
            answer = server.complete(text[:end], tokens=1, n_probs=args.top, logit_bias=[[text[0], 100]], **more)
            # More than the appended piece was run: the conversation was not there any more.
            if turn > 0 and answer["timings"]["prompt_n"] > args.piece + 1:
                sys.exit(f"turn {turn} ran {answer['timings']['prompt_n']} tokens of its prompt again; {server.log}")
            top = answer["completion_probabilities"][0]["top_logprobs"]
            answers.append({str(t["id"]): math.exp(t["logprob"]) for t in top})
        return answers

    def kept(self, name, make):
        """make()'s answers, or those of an earlier run with the same arguments and the same plug-in."""
        a = self.args
        what = (Path(self.model).stem, fingerprint(self.tools.PLUGIN), a.tokens, a.turns, a.piece, a.answer, a.top)
        path = a.keep and a.keep / ("-".join(map(str, (name, *what))) + ".json")
        if path and path.exists():
            return json.loads(path.read_text())
        print(f"{name} ...", file=sys.stderr)
        answers = make()
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(answers))
        return answers

    def alone(self, scheme):
        def one(conversation):
            with self.server(scheme) as server:
                return [self.turn(server, conversation, turn) for turn in range(self.args.turns)]
        return self.kept(f"{scheme}-alone", lambda: [one(0), one(1)])

    def alternating(self, scheme):
        def make():
            answers = [[], []]
            with self.server(scheme) as server:
                for turn in range(self.args.turns):
                    for conversation in (0, 1):
                        answers[conversation].append(self.turn(server, conversation, turn))
                        if self.args.cells:
                            print(f"turn {turn}, conversation {conversation}: "
                                  f"{cells_out_of_order(server.positions_by_cell())}")
                restored = len(re.findall("found better prompt", server.log_text()))
            # All but the first turn of each conversation.
            if restored < 2 * (self.args.turns - 1):
                sys.exit(f"only {restored} conversations were restored from the host's memory; {server.log}")
            print(f"{scheme}: {restored} restores from the host's memory", file=sys.stderr)
            return answers
        return self.kept(f"{scheme}-alternating", make)

    def slot_files(self, scheme):
        def one(conversation):
            answers = []
            for turn in range(self.args.turns):
                with self.server(scheme, "--slot-save-path", self.folder) as server:
                    if turn > 0:
                        self.slot(server, "restore")
                    answers.append(self.turn(server, conversation, turn, id_slot=0))
                    self.slot(server, "save")
            return answers
        return self.kept(f"{scheme}-slot-files", lambda: [one(0), one(1)])

    def unified(self, scheme):
        def make():
            self.conversations()
            answers = [[], []]
            with self.server(scheme, "-np", 2, "--kv-unified", "-cram", 0) as server, ThreadPoolExecutor(2) as both:
                for turn in range(self.args.turns):
                    started = [both.submit(self.turn, server, c, turn, id_slot=c) for c in (0, 1)]
                    for conversation, answer in enumerate(started):
                        answers[conversation].append(answer.result())
            return answers
        return self.kept(f"{scheme}-unified", make)

    def slot(self, server, action):
        status, answer = server.request("POST", f"/slots/0?action={action}", {"filename": "conversation.bin"})
        if status != 200 or answer.get("n_restored", answer.get("n_saved", 0)) < self.args.tokens:
            sys.exit(f"slot {action} failed: {answer}; {server.log}")


def cells_out_of_order(positions):
    """How many cells hold an earlier position than some cell below them."""
    used = [p for p in positions if p is not None]
    highest, out = -1, 0
    for position in used:
        out += position < highest
        highest = max(highest, position)
    return f"{out} of {len(used)} cells out of order"


def kl(reference, other):
    """KL in nats over the tokens that both tell apart, all others as one: a lower bound, and close."""
    both = reference.keys() & other.keys()
    pairs = [(reference[t], other[t]) for t in both]
    rest = [max(1 - sum(p[i] for p in pairs), 1e-9) for i in (0, 1)]
    return sum(p * math.log(p / q) for p, q in [*pairs, rest] if p > 0)


def mean_kl(reference, other, turns=slice(None)):
    all_of = [kl(r, o) for rs, os_ in zip(reference, other, strict=True)
              for rt, ot in zip(rs[turns], os_[turns], strict=True) for r, o in zip(rt, ot, strict=True)]
    return sum(all_of) / len(all_of)


def row_of(m, scheme, exact_alone):
    """The first turn is left out: nothing has been moved before it."""
    moved = slice(1, None)
    alone = m.alone(scheme)
    row = {"scheme": scheme, "own loss": mean_kl(exact_alone, alone, moved)}
    for name in m.args.ways:
        answers = getattr(m, name.replace("-", "_"))(scheme)
        row[name] = mean_kl(alone, answers, moved)
        row[f"{name}, by turn"] = [mean_kl(alone, answers, slice(t, t + 1)) for t in range(m.args.turns)]
        if row["own loss"] > 0:
            row[f"{name}, added"] = mean_kl(exact_alone, answers, moved) / row["own loss"] - 1
    return row


def main():
    args = arguments()
    tools = llama_servers(args)
    if "LOWKV_HANDBOOK_TEXT" not in tools.PATHS:
        sys.exit("alternating.py: the text is missing: python3 deps/setup.py text")
    with tempfile.TemporaryDirectory() as folder:
        m = Measurement(args, tools, Path(folder))
        exact_alone = m.alone("exact")
        rows = [row_of(m, scheme, exact_alone) for scheme in args.schemes.split(",")]
    ways = args.ways
    print("| scheme | own loss | " + " | ".join(f"mean KL, {w} | added, {w}" for w in ways) + " |")
    print("|---|---|" + "---|---|" * len(ways))
    for row in rows:
        cells = [f"{row[w]:.4f} | " + (f"{100 * row[w + ', added']:+.0f} %" if w + ", added" in row else "")
                 for w in ways]
        print(f"| {row['scheme']} | {row['own loss']:.4f} | " + " | ".join(cells) + " |")
    for row in rows:
        for w in ways:
            print(f"{row['scheme']}, {w}, mean KL by turn: " + " ".join(f"{x:.4f}" for x in row[f"{w}, by turn"]))
    print(f"\n{Path(m.model).name}, 2 conversations of {args.tokens} tokens, {args.turns} turns, "
          f"{2 * (args.turns - 1) * args.answer} distributions after the first turns")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
