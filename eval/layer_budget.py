#!/usr/bin/env python3
"""A scheme for each layer, so that the whole cache costs at most so many bits an element.

    eval/layer_budget.py -m model.gguf -f book.txt --target-bits 2.5
    LOWKV_SCHEME=$(eval/layer_budget.py -m model.gguf -f book.txt --target-bits 2.5 --quiet)
    eval/layer_budget.py -m model.gguf -f book.txt --target-bits 2 --ladder lowkv1.5,lowkv2,lowkv3

`lowkv compare` measures the mean KLD against the exact cache with one layer packed at a time by the lowest rung of the
ladder, and with all layers at each rung. Codes of 8 bits show what the engine's own rounding loses: that floor is taken
off. A layer's loss at a higher rung is taken to shrink as the whole cache's does. Then layers are raised greedily, by
loss saved per bit, until the next step doesn't fit, and the choice is measured beside the uniform schemes below and
above it, on the text's second half where that is long enough. Where the uniform scheme below is as good, that is what
is recommended. The text is read once for each layer and rung, and some ten times more.

Bits count codes and all metadata of packed blocks, not unquantized tokens. Within a spelled-out scheme write + for the
comma. Needs `make build`."""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from paths import ROOT

LADDER = "lowkv2,lowkv2.8,lowkv3,lowkv4"
BLOCK = 128         # tokens of the longest block
COUNTED = 384       # positions, unless --tokens says otherwise
LEAST = 128         # or a mean says nothing
FLOOR_PROBES = 5    # layers
SURE = 2            # differences of fewer standard errors are taken for noise
ROUNDING = 1e-9     # sums of bits differ in their last digits from what one types
TOO_SHORT = "use a longer text"  # how `lowkv compare` ends its message


# ---- the choice ----

def steady_ratio(losses):
    """Each rung's loss as a share of the lowest one's: never rising, 1 where nothing is lost."""
    ratio = []
    for loss in losses:
        share = loss / losses[0] if losses[0] > 0 else 1.0
        ratio.append(min(max(share, 0.0), ratio[-1]) if ratio else 1.0)
    return ratio


def shrunk(losses, errors):
    """Losses drawn to their mean as far as the text can't tell them apart, at least 0."""
    n = len(losses)
    mean = sum(losses) / n
    spread = sum((loss - mean) ** 2 for loss in losses) / max(n - 1, 1)
    real = max(spread - sum(error ** 2 for error in errors) / n, 0.0)
    weights = [real / (real + error ** 2) if real + error ** 2 > 0 else 1.0 for error in errors]
    return [max(mean + w * (loss - mean), 0.0) for w, loss in zip(weights, losses, strict=True)]


def choose(sensitivity, ratio, added, spare):
    """Each layer's rung. added[layer][rung]: bits of the whole cache that the rung adds to the lowest one's. A layer
    that adds none keeps no keys and values. spare: bits that may be added in all."""
    rungs = [0] * len(added)
    while True:
        best = None
        for layer, bits in enumerate(added):
            for rung in range(rungs[layer] + 1, len(ratio)):
                cost = bits[rung] - bits[rungs[layer]]
                gain = sensitivity[layer] * (ratio[rungs[layer]] - ratio[rung])
                if cost > 0 and gain > 0 and (best is None or gain / cost > best[0]):
                    best = gain / cost, layer, rung
        if best is None:
            return rungs
        after = [*rungs[:best[1]], best[2], *rungs[best[1] + 1:]]
        if sum(bits[rung] for bits, rung in zip(added, after, strict=True)) > spare + ROUNDING:
            return rungs
        rungs = after


def expected_loss(sensitivity, ratio, rungs):
    return sum(loss * ratio[rung] for loss, rung in zip(sensitivity, rungs, strict=True))


# ---- schemes as text ----

def codecs(rung, presets):
    """The key and the value codec of a rung, spelled out."""
    found = {}
    for word in rung.split(","):
        name, _, value = word.partition("=")
        found |= {name: value} if value else {"k": presets[name]["keys"], "v": presets[name]["values"]}
    return found["k"], found["v"]


def as_layer(rung):
    """The rung as the value of layer.N=."""
    if "=" not in rung:
        return rung
    words = dict(word.split("=") for word in rung.split(","))
    return f"{words['k']}/{words['v']}"


def with_layers(base, layers, retention=()):
    """The scheme whose layers have these rungs, `base` being most layers'."""
    text, first = [base, *retention], 0
    for layer in range(1, len(layers) + 1):
        if layer < len(layers) and layers[layer] == layers[first]:
            continue
        if layers[first] != base:
            text.append(f"layer.{first}{f'-{layer - 1}' if layer - 1 > first else ''}={as_layer(layers[first])}")
        first = layer
    return ",".join(text)


def scheme_of(ladder, rungs, keeps, retention=()):
    """The shortest text of a choice. Layers that keep nothing join the layer before, or the first that keeps any."""
    last = rungs[keeps.index(True)]
    filled = []
    for rung, kept in zip(rungs, keeps, strict=True):
        last = rung if kept else last
        filled.append(ladder[last])
    return min((with_layers(base, filled, retention) for base in ladder if base in filled), key=len)


def in_8_bits(codec):
    """The same layout with codes of 8 bits: next to nothing is lost, but every number changes a little."""
    words = codec.split("-")
    if words[0] in ("exact", "sorted"):  # sorted keys have at most 5 bits; these have blocks as long
        return codec if codec == "exact" else "token-8-head-hadamard-mean"
    return "-".join([words[0], "8", *(w for w in words[2:] if w not in
                                      ("normal", "trellis", "learned", "unbiased", "lsq", "e5m3"))])


# ---- measuring ----

class Failure(Exception):
    pass


class Command:
    """The command `lowkv` on a model."""

    def __init__(self, args):
        self.args = args

    def ask(self, *words):
        """What a subcommand writes with --json."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "answer.json"
            done = subprocess.run([str(self.args.build / "bin/lowkv"), *map(str, words), "--json", str(file)],
                                  capture_output=True, text=True)
            if done.returncode:
                raise Failure(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{words[0]} failed")
            return json.loads(file.read_text())

    def bits(self, schemes):
        """Bits an element of packed tokens, mean over all layers."""
        plan = self.ask("plan", "-m", self.args.model, "--schemes", ",".join(s.replace(",", "+") for s in schemes))
        return [row["bits_per_element"] for row in plan["rows"][1:]], len(plan["layers"])

    def compare(self, schemes, text):
        """(the run, a row for each scheme), some schemes at a time."""
        rows, run = [], None
        asked = [scheme for scheme in schemes if scheme != "exact"]  # which is always there, first
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(text)
            file.flush()
            for first in range(0, len(asked), self.args.batch):
                some = asked[first:first + self.args.batch]
                print(f"{first} of {len(asked)} schemes measured", file=sys.stderr)
                run = self.ask("compare", "-m", self.args.model, "-f", file.name, "--stock", "none", "--schemes",
                               ",".join(s.replace(",", "+") for s in some), "--tokens", self.args.tokens,
                               "--windows", 1, "--chunk", self.args.chunk, "--skip", self.args.skip, "--no-speed",
                               "--positions", *(["--threads", self.args.threads] if self.args.threads else []))
                rows += run["rows"][1:]
        for row in rows:
            if row["mean_kld"] is None:  # how NaN is written
                raise Failure(f"{row['scheme']}: its mean KLD is no number")
        rows = dict(zip(asked, rows, strict=True)) | {"exact": run["rows"][0]}
        return run, [rows[scheme] for scheme in schemes]


def floors_of(command, text, quiet, keeping, retention):
    """The floor of each layer that keeps rows, alone, from a few of them: it falls towards the last layers, which fewer
    follow."""
    count = min(FLOOR_PROBES, len(keeping))
    probed = [keeping[p * (len(keeping) - 1) // (count - 1)] if count > 1 else keeping[0] for p in range(count)]
    rows = command.compare([",".join(["exact", *retention, f"layer.{n}={as_layer(quiet)}"]) for n in probed], text)[1]
    known = dict(zip(probed, (row["mean_kld"] for row in rows), strict=True))
    floors = {}
    for low, high in zip(probed, probed[1:] or probed, strict=False):
        for n in range(low, high + 1):
            share = (n - low) / (high - low) if high > low else 0
            floors[n] = known[low] + share * (known[high] - known[low])
    return floors


def estimate(values):
    """(mean, standard error)"""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def saved(other, better):
    """What `better` saves against `other`, position by position."""
    mean, error = estimate([a - b for a, b in zip(other["klds"], better["klds"], strict=True)])
    return {"mean_kld": mean, "error": error}


def is_sure(found):
    return found is not None and found["mean_kld"] > SURE * found["error"]


def verify(command, text, ladder, ladder_bits, chosen, bits, target, retention):
    """The choice beside the uniform rungs below and above it."""
    below = max(r for r, cost in enumerate(ladder_bits) if r == 0 or cost <= target + ROUNDING)
    low, above = (",".join([ladder[r], *retention]) if r < len(ladder) else None for r in (below, below + 1))
    mixed = chosen != low
    asked = [(low, ladder_bits[below])] * mixed + [(chosen, bits)]
    asked += [(above, ladder_bits[below + 1])] if above else []
    rows = command.compare([scheme for scheme, _ in asked], text)[1]
    told = [{"scheme": scheme, "chosen": scheme == chosen, "bits": cost,
             **{k: row[k] for k in ("mean_kld", "mean_kld_error", "perplexity", "perplexity_change_percent")}}
            for (scheme, cost), row in zip(asked, rows, strict=True)]
    found = {"rows": told, "saved_against_below": saved(rows[0], rows[1]) if mixed else None,
             "saved_by_above": saved(rows[-2], rows[-1]) if above else None, "blind_mix_kld": None}
    if len(rows) == 3 and bits > ladder_bits[below]:
        share = (bits - told[0]["bits"]) / (told[2]["bits"] - told[0]["bits"])
        found["blind_mix_kld"] = told[0]["mean_kld"] + share * (told[2]["mean_kld"] - told[0]["mean_kld"])
    return found, low if mixed and not is_sure(found["saved_against_below"]) else chosen


def costs(command, args):
    """(bits of each rung for all layers, what each rung adds to the lowest one's in each layer alone)"""
    ladder = args.ladder
    ladder_bits, layers = command.bits(ladder)
    if any(high <= low for low, high in pairwise(ladder_bits)):
        raise Failure("--ladder must ascend in bits: " + ", ".join(
            f"{rung} has {bits:.4f}" for rung, bits in zip(ladder, ladder_bits, strict=True)))
    if not ladder_bits[0] - ROUNDING <= args.target_bits <= ladder_bits[-1] + ROUNDING:
        raise Failure(f"--target-bits {args.target_bits} is out of reach: this model takes from {ladder_bits[0]:.4f} "
                      f"bits ({ladder[0]} for all layers) to {ladder_bits[-1]:.4f} ({ladder[-1]})")
    raised = [f"{ladder[0]},layer.{n}={as_layer(rung)}" for n in range(layers) for rung in ladder[1:]]
    more = iter(bits - ladder_bits[0] for bits in command.bits(raised)[0])
    return ladder_bits, [[0.0, *(next(more) for _ in ladder[1:])] for _ in range(layers)]


def on_one_of(texts, measure):
    """(measure(text), the text) of the first text that is long enough."""
    *others, last = texts
    for text in filter(None, others):
        try:
            return measure(text), text
        except Failure as failure:
            if TOO_SHORT not in str(failure):
                raise
    return measure(last), last


def search(command, args, text):
    """All figures, as --json writes them."""
    ladder, retention = args.ladder, args.retention
    ladder_bits, added = costs(command, args)
    keeps = [bits[-1] > ROUNDING for bits in added]
    keeping = [n for n, kept in enumerate(keeps) if kept]
    presets = {preset["name"]: preset for preset in command.ask("schemes")["presets"]}
    quiet = "k={},v={}".format(*map(in_8_bits, codecs(ladder[0], presets)))

    half = max(text.find(" ", len(text) // 2), 0)
    whole = [",".join([rung, *retention]) for rung in [quiet, *ladder]]
    (run, (of_quiet, *of_rungs)), first = on_one_of([text[:half], text], lambda part: command.compare(whole, part))
    for rung, row in zip(ladder, of_rungs, strict=True):
        if row["nothing_packed"]:
            raise Failure(f"nothing was packed under {rung}: this model's caches are too short for a block to leave "
                          "the window; try a smaller --window")
    floor = of_quiet["mean_kld"]
    ratio = steady_ratio([max(row["mean_kld"] - floor, 0.0) for row in of_rungs])
    floors = floors_of(command, first, quiet, keeping, retention)
    alone = [",".join(["exact", *retention, f"layer.{n}={as_layer(ladder[0])}"]) for n in keeping]
    alone = dict(zip(keeping, command.compare(alone, first)[1], strict=True))
    losses = shrunk([row["mean_kld"] - floors[n] for n, row in alone.items()],
                    [row["mean_kld_error"] for row in alone.values()])
    sensitivity = [0.0] * len(added)
    for n, loss in zip(keeping, losses, strict=True):
        sensitivity[n] = loss

    rungs = choose(sensitivity, ratio, added, args.target_bits - ladder_bits[0])
    bits = ladder_bits[0] + sum(more[rung] for more, rung in zip(added, rungs, strict=True))
    chosen = scheme_of(ladder, rungs, keeps, retention)
    (verification, recommended), checked = on_one_of(
        [text[half:], first] if first != text else [first],
        lambda part: verify(command, part, ladder, ladder_bits, chosen, bits, args.target_bits, retention))
    told = [{"layer": n} for n in range(len(added))]
    for n, row in alone.items():
        told[n] |= {"mean_kld": row["mean_kld"], "floor": floors[n], "sensitivity": sensitivity[n],
                    "sensitivity_error": row["mean_kld_error"], "packed": not row["nothing_packed"],
                    "scheme": ladder[rungs[n]], "added_bits": added[n][rungs[n]]}
    return {
        "model": run["model"], "text": str(args.file), "tokens": run["tokens"], "chunk": run["chunk"],
        "skip": run["skip"], "positions": run["positions"], "target_bits": args.target_bits, "floor": floor,
        "ladder": [{"scheme": rung, "bits": cost, "mean_kld": row["mean_kld"], "ratio": share,
                    "mean_kld_error": row["mean_kld_error"]}
                   for rung, cost, row, share in zip(ladder, ladder_bits, of_rungs, ratio, strict=True)],
        "layers": told,
        "chosen": {"scheme": chosen, "bits": bits, "expected_kld": expected_loss(sensitivity, ratio, rungs)},
        "verification": {"other_text": checked != first, **verification}, "recommended": recommended}


# ---- what comes out ----

def report(found):
    lines = ["| layer | mean KLD alone | floor | sensitivity | scheme |", "|---|---|---|---|---|"]
    for layer in found["layers"]:
        if "scheme" not in layer:
            lines.append(f"| {layer['layer']} | keeps no keys and values | | | |")
            continue
        shown = f"{layer['sensitivity']:.5f}" if layer["packed"] else "never packed"
        lines.append(f"| {layer['layer']} | {layer['mean_kld']:.5f} | {layer['floor']:.5f} | {shown} "
                     f"| {layer['scheme']} |")
    lines += ["", "| scheme | bits | mean KLD | perplexity |", "|---|---|---|---|"]
    checked = found["verification"]
    for row in checked["rows"]:
        name = "the choice" if row["chosen"] else row["scheme"]
        lines.append(f"| {name} | {row['bits']:.3f} | {row['mean_kld']:.5f} ± {row['mean_kld_error']:.5f} "
                     f"| {row['perplexity']:.3f} ({row['perplexity_change_percent']:+.2f} %) |")
    on = ("text that the choice was not made on" if checked["other_text"] else
          "the very text that the choice was made on, which flatters it (for another, give twice as much)")
    lines += ["", f"Measured on {on}, over {found['positions']:,} positions."]
    if checked["saved_against_below"] is None:
        lines.append("No step that loses less fits into the target.")
    elif found["recommended"] != found["chosen"]["scheme"]:
        lines.append(f"{found['recommended']} for all layers is as good as far as this text can tell, and simpler: use "
                     "it. More --tokens tell smaller differences apart.")
    if checked["blind_mix_kld"] is not None:
        lines.append(f"Raising as many layers blindly would give about {checked['blind_mix_kld']:.5f}.")
    if checked["saved_by_above"] and not is_sure(checked["saved_by_above"]):
        lines.append(f"The choice is as good as {checked['rows'][-1]['scheme']}.")
    return "\n".join([*lines, "", "The scheme to use (--scheme, or LOWKV_SCHEME):"])


def round_up(value, multiple):
    return -(-value // multiple) * multiple


def arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=lambda path: Path(path).resolve())
    parser.add_argument("-m", "--model", required=True, help="a GGUF file")
    parser.add_argument("-f", "--file", required=True, type=Path, help="the text to measure on")
    parser.add_argument("-b", "--target-bits", required=True, type=float, help="of an element, mean over all layers")
    parser.add_argument("--ladder", default=LADDER, help="schemes by ascending bits (default: %(default)s)")
    parser.add_argument("--window", type=int, default=128, help="newest tokens that stay exact (default: %(default)s)")
    parser.add_argument("--sinks", type=int, default=5, help="first tokens that stay exact (default: %(default)s)")
    parser.add_argument("--flush", type=int, default=0, help="tokens that leave the window at once (default: a block)")
    parser.add_argument("-n", "--tokens", type=int, help="default: 384 after those that can't read a packed block")
    parser.add_argument("--chunk", type=int, default=64, help="tokens computed at once (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="schemes of one `lowkv compare` (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, help="default: the command's own")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the scheme alone")
    args = parser.parse_args(words)
    args.ladder = [rung.replace("+", ",") for rung in args.ladder.split(",")]
    if len(args.ladder) < 2:
        parser.error("--ladder needs two schemes or more to choose from")
    if args.ladder[0] == "exact":
        parser.error("--ladder: the lowest rung is exact, so nothing would be packed")
    for rung in args.ladder:
        if re.search(r"(^|,)(window|sinks|flush|layer\.|filter|keep|evict)", rung):
            parser.error(f"--ladder {rung}: a rung says how one layer is stored; --window, --sinks and --flush are for "
                         "all layers")
    args.retention = [f"{name}={value}" for name, value, usual in
                      (("window", args.window, 128), ("sinks", args.sinks, 5),
                                           ("flush", args.flush, 0)) if value != usual]
    # Before that, one rung or another has not packed and read a block.
    block = round_up(args.sinks, BLOCK) + BLOCK
    args.skip = round_up(args.window + (round_up(block, args.flush) if args.flush else block), args.chunk)
    args.tokens = args.tokens or args.skip + COUNTED
    if args.tokens < args.skip + LEAST + 1:
        parser.error(f"--tokens {args.tokens} is too few: {args.skip + LEAST + 1} are needed: before token {args.skip} "
                     f"no block of every rung has been packed and read, and fewer than {LEAST} positions say nothing")
    if args.json and args.json.resolve() in (args.file.resolve(), Path(args.model).resolve()):
        parser.error(f"--json {args.json}: it is what is read")
    return args


def main(words):
    args = arguments(words)
    try:
        found = search(Command(args), args, args.file.read_text())
    except Failure as failure:
        print(f"layer_budget.py: {failure}", file=sys.stderr)
        return 1
    if not args.quiet:
        print(report(found))
    print(found["recommended"])
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
