#!/usr/bin/env python3
"""The tables of documents that follow from the program: writes the words of a scheme and the bits of the presets
between their marks `<!-- NAME -->` and `<!-- /NAME -->`, or with --check says what differs, the table of
docs/schemes.md included. The bits of each preset are reckoned here once more, by the rules of docs/methods/bits.md,
and must be those that `lowkv schemes` and `lowkv plan` print. Needs `make build`."""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS, BITS, SCHEMES, BLOCKS = (ROOT / "docs" / page for page in (
    "reference/words.md", "methods/bits.md", "schemes.md", "internals-blocks.md"))
COMMAND = ROOT / "build/release/bin/lowkv"
SHOWN = 128  # head_dim of the table of bits; the others are checked only
LINE = 64    # bytes that a section is a multiple of
PARTS = ("codes", "scales", "zeros", "mean", "outliers", "positions", "statistics", "rows", "padding")


def ask(command, *args):
    """What a subcommand writes with --json."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.json"
        subprocess.run([command, *map(str, args), "--json", file], check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text())


def round_up(size, multiple=LINE):
    return -(-size // multiple) * multiple


def codes_bytes(bits, elements):
    if bits == "1.5":  # tiles of 64 codes, five to 64 bytes
        return -(-elements // 64 // 5) * 64
    return elements * int(bits) // 8


def bytes_of(codec, tokens, heads, head_dim):
    """Where a part of a packed block puts its bytes, by the words of its codec."""
    axis, bits, group, *words = codec.split("-")
    header, entry = (16, 1) if "fp8" in words else (0, 1) if "e5m3" in words else (0, 2)
    out = dict.fromkeys(PARTS, 0)
    if axis == "sorted":
        groups = head_dim // 16
        codes = sum(int(bits[4 * g // groups]) for g in range(groups)) * 16 * tokens // 8
        rows = next((int(w[0]) for w in words if re.fullmatch(r"\drows?", w)), 0)
        damping = head_dim // 2 if "weighted" in words else 0
        metadata = {"scales": tokens + 2, "mean": head_dim + 2 * groups, "rows": rows * (head_dim + 3),
                    "statistics": 2 * groups + head_dim * (2 if head_dim > 256 else 1) + damping}
        out.update({part: heads * size for part, size in metadata.items()} | {"codes": heads * codes})
        out["padding"] = heads * (round_up(sum(metadata.values())) + codes) - sum(out.values())
        return out
    codes = codes_bytes(bits, head_dim * tokens)
    out["codes"] = heads * codes
    row = group in ("row", "static") or "reorder" in words
    along = tokens if axis == "channel" else head_dim  # what a group runs along, and what there is a scale for each of
    across = head_dim if axis == "channel" else tokens
    if row:
        channels = heads * head_dim
        groups = {"row": 1, "static": 0}.get(group) if "reorder" not in words else (
            min(max(round(channels / int(group[1:])), 1), 32))
        out["scales"] = out["zeros"] = groups * tokens * entry
        share = next((float(w[:-1]) / 100 for w in words if w.endswith("%")), 0)
        most = -(-round(share * 1000) * channels // 1000) * tokens
        out["outliers"] = 4 * most + (round_up(2 * (heads + 1), 4) if most else 0)
        out["positions"] = 4 * tokens if "pre" in words else 0
        head = round_up(codes)
        total = heads * head + round_up(header + sum(out[p] for p in PARTS if p != "codes"))
    else:
        length = head_dim if group == "head" else min(int(group[1:]), along)
        scales = -(-along // length) * across * entry
        metadata = {"scales": scales, "zeros": 0 if {"normal", "trellis"} & set(words) else scales,
                    "mean": 2 * head_dim if "mean" in words else 0}
        out.update({part: heads * size for part, size in metadata.items()})
        total = heads * round_up(round_up(header + sum(metadata.values())) + codes)
    out["padding"] = total - sum(out.values())
    return out


def bits_of(preset, part, size):
    """Bits per element: where they go, in the order of PARTS."""
    heads, head_dim, tokens = size["kv_heads"], size["head_dim"], preset["block_tokens"]
    if preset[part] == "exact":
        return dict.fromkeys(PARTS, 0) | {"codes": 16}
    found = bytes_of(preset[part], tokens, heads, head_dim)
    return {name: 8 * found[name] / (heads * head_dim * tokens) for name in PARTS}


def wrong_bits(presets, planned):
    """Presets for which the program reckons otherwise."""
    for preset in presets:
        for size in preset["sizes"]:
            sums = []
            for part, said in (("keys", size["key_bits"]), ("values", size["value_bits"])):
                sums.append(sum(bits_of(preset, part, size).values()))
                if abs(sums[-1] - said) > 1e-9:
                    yield (f"{preset['name']}, {part} at head_dim {size['head_dim']}: {sums[-1]} bits by "
                           f"docs/methods/bits.md, {said} by lowkv schemes")
            both, planner = sum(sums) / 2, planned[preset["name"]]
            if size["head_dim"] == SHOWN and abs(both - planner) > 1e-9:
                yield f"{preset['name']}: {both} bits by docs/methods/bits.md, {planner} by lowkv plan"


def number(value):
    return f"{value:.6f}".rstrip("0").rstrip(".") if value else ""


def bits_table(presets):
    lines = ["| preset | part | " + " | ".join(PARTS) + " | sum | both |",
             "|---|---|" + "---|" * (len(PARTS) + 2)]
    for preset in presets:
        size = next(size for size in preset["sizes"] if size["head_dim"] == SHOWN)
        parts = {part: bits_of(preset, part, size) for part in ("keys", "values")}
        both = sum(sum(bits.values()) for bits in parts.values()) / 2
        for part, bits in parts.items():
            cells = [*(number(bits[name]) for name in PARTS), number(sum(bits.values()))]
            first, last = (f"`{preset['name']}`", f"{both:.2f}") if part == "keys" else ("", "")
            lines.append("| " + " | ".join([first, part, *cells, last]) + " |")
    return "\n".join(re.sub(r" {2,}", " ", line) for line in lines)


def words_table(answer):
    lines = ["| option | meaning |", "|---|---|"]
    lines += [f"| `{option['word']}` | {option['meaning']} |" for option in answer["options"]]
    lines += ["", "| in a codec, in this order | word | meaning |", "|---|---|---|"]
    for place in answer["codec"]:
        kind = place["name"] + (", if any" if place["optional"] else "")
        for word in place["words"]:
            lines.append(f"| {kind} | `{word['word']}` | {word['meaning']} |")
            kind = ""
    return "\n".join(re.sub(r" {2,}", " ", line) for line in lines)


def kernels_table(presets):
    """Presets of the same quantizers and kernels are a row."""
    def quoted(names):
        return ", ".join(f"`{name}`" for name in dict.fromkeys(names) if name)
    rows = {}
    for preset in presets:
        rows.setdefault((quoted(preset["quantizers"]), quoted(preset["kernels"])), []).append(preset["name"])
    lines = ["| preset | quantizer, of keys and values | kernels of keys, values |", "|---|---|---|"]
    return "\n".join(lines + [f"| {quoted(names)} | {quantizers} | {kernels} |".replace("|  |", "| |")
                              for (quantizers, kernels), names in rows.items()])


def filled(page, name, table):
    """The page's text with a table between its marks."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page.relative_to(ROOT)} lacks the marks {begin.strip()} and {end.strip()}")
    return before + begin + table + end + after


def rounds_to(shown, value):
    """Whether a figure is the value, as exactly as it is written."""
    digits = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.5 * 10**-digits + 1e-9


def wrong_in_table(presets, text):
    """Figures of the table in docs/schemes.md that are not the program's."""
    table = text.partition("\n## ")[0]
    rows = dict(re.findall(r"^\| \**`([^`]+)`\** \| (.*)", table, re.M))
    for preset in presets:
        if preset["recommended"] and preset["mean_kld"] and preset["name"] not in rows:
            yield f"docs/schemes.md: the table lacks {preset['name']}"
        if preset["name"] not in rows:
            continue
        bits, perplexity, kld = (cell.strip() for cell in rows[preset["name"]].split("|")[:3])
        true = {size["head_dim"]: (size["key_bits"] + size["value_bits"]) / 2 for size in preset["sizes"]}
        said = bits.split(" / ") if "/" in bits else [bits, bits]
        good = [rounds_to(said[0], true[64]), rounds_to(said[1], true[128]), perplexity == preset["perplexity"],
                rounds_to(kld, float(preset["mean_kld"]))]
        if not all(good):
            yield (f"docs/schemes.md: {preset['name']}: {bits}, {perplexity}, {kld}; lowkv schemes says {true[64]:.3f} "
                   f"and {true[128]:.3f} bits, {preset['perplexity']}, {preset['mean_kld']}")


def problems(command, rewrite=False):
    """What differs from the program; with `rewrite`, what of it can't be written."""
    if not command.exists():
        return [f"{command} is not there: make build"]
    answer = ask(command, "schemes")
    planned = ask(command, "plan", "--all", "--layers", 1, "--kv-heads", 8, "--head-dim", SHOWN, "--context", 1)
    planned = {row["scheme"]: row["bits_per_element"] for row in planned["rows"]}
    presets = answer["presets"]
    found = list(wrong_bits(presets, planned)) + list(wrong_in_table(presets, SCHEMES.read_text()))
    for page, name, table in ((WORDS, "words", words_table(answer)), (BITS, "bits", bits_table(presets)),
                              (BLOCKS, "kernels", kernels_table(presets))):
        right = filled(page, name, table)
        if right != page.read_text():
            if rewrite:
                page.write_text(right)
            else:
                found.append(f"{page.relative_to(ROOT)} is not what the program says: deps/scheme_tables.py writes it")
    return found


def write_or_check(problems, description):
    """What a script does that writes pages by the command lowkv: its exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--command", type=Path, default=COMMAND, help="the command lowkv")
    args = parser.parse_args()
    found = problems(args.command, rewrite=not args.check)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(write_or_check(problems, __doc__))
