"""The tables and pictures of docs/quality.md, from the CSV's rows. Used by eval/quality.py.

Tables go between the marks `<!-- NAME -->` and `<!-- /NAME -->` of OUT/../quality.md, where there is
one; pictures go to OUT as PNG and SVG.
"""

import re
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

import quality_schemes as schemes

pyplot.rcParams.update({
    "font.size": 11, "svg.fonttype": "none", "svg.hashsalt": "lowkv", "axes.spines.top": False,
    "axes.spines.right": False, "figure.constrained_layout.use": True, "axes.axisbelow": True})

FAMILIES = [  # prefix, label, colour, marker
    ("lowkv", "lowkv", "#1f6fb4", "o"), ("kivi", "KIVI", "#d9782d", "^"),
    ("turboquant", "TurboQuant", "#3a9a5b", "D"), ("kvarn", "KVarN", "#8c564b", "P"),
    ("skvq", "SKVQ (calibrated)", "#e377c2", "X"), ("kvquant", "KVQuant (calibrated)", "#bcae22", "p"),
    ("int", "plain integers", "#9467bd", "v"),
    ("stock", "llama.cpp's own caches", "#7f7f7f", "s")]
GRID = "#e4e4e4"
KLD = "mean KLD against exact (log; lower is better)"


def family(scheme):
    return next((f for f in FAMILIES if scheme.startswith(f[0])), FAMILIES[0])


def save(figure, out, name):
    figure.savefig(out / f"{name}.png", dpi=110)
    figure.savefig(out / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def overview(out, rows, floor):
    """Loss against size: what the reader came for."""
    figure, axes = pyplot.subplots(figsize=(9, 6))
    for prefix, label, colour, marker in FAMILIES:
        chosen = [r for r in rows if r["scheme"].startswith(prefix) and r["bits"] < 16]
        for paper in (False, True):
            some = [r for r in chosen if ("sinks=0" in r["scheme"]) == paper]
            if not some:
                continue
            axes.scatter([r["bits"] for r in some], [r["mean_kld"] for r in some], s=70, zorder=3,
                         marker=marker, edgecolors=colour, linewidths=1.5,
                         color="white" if paper else colour,
                         label=label + (" as published (no sinks)" if paper else ""))
        if prefix in ("lowkv", "turboquant", "kvarn"):  # one method at several sizes
            line = sorted((r["bits"], r["mean_kld"]) for r in chosen)
            axes.plot(*zip(*line), color=colour, linewidth=1.2, alpha=0.5)
    for row in rows:
        if row["bits"] >= 16:
            continue
        dx, dy, side = LABELS.get(row["scheme"], (9, 0, "left"))
        name = row["scheme"].removeprefix("stock ").replace("+window=128+sinks=5", ", window")
        axes.annotate(name.replace("+", ", "),
                      (row["bits"], row["mean_kld"]), textcoords="offset points",
                      xytext=(dx, dy - 1), va="center", ha=side, fontsize=9,
                      color=family(row["scheme"])[2])
    if floor:
        axes.axhline(floor, color="#c0392b", linewidth=1, linestyle="--")
        axes.annotate("The engine's own noise: llama.cpp's plain f16 cache is as far from exact",
                      (0.01, floor), xycoords=("axes fraction", "data"),
                      textcoords="offset points", xytext=(0, -5), ha="left", va="top", fontsize=9,
                      color="#c0392b")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(1.5, 9.2)
    lowest = min([r["mean_kld"] for r in rows] + ([floor] if floor else []))
    axes.set_ylim(0.75 * lowest, 1.5 * max(r["mean_kld"] for r in rows))
    axes.set_xlabel("bits per element, all metadata counted (head_dim 64; f16 is 16)")
    axes.set_ylabel(KLD)
    axes.grid(True, which="major", color=GRID)
    axes.legend(frameon=False, loc="upper right", fontsize=9.5)
    save(figure, out, "overview")


# Where a label goes from its dot, in points, where the right of it is taken.
LABELS = {"lowkv2": (-9, 0, "right"), "lowkv2.8": (-9, 0, "right"), "lowkv3": (-8, -5, "right"),
          "lowkv4": (-9, -3, "right"), "turboquant2": (0, 13, "center"),
          "turboquant3": (9, 5, "left"), "turboquant4": (0, 13, "center"),
          "stock q8_0": (0, 11, "center"), "int8": (0, -12, "center")}


def grid(out, find):
    """KIVI's question: which axis may share a scale?"""
    axes_of = ("token", "channel")
    values = [[find(schemes.GRID[k, v]) for v in axes_of] for k in axes_of]
    if not all(cell for line in values for cell in line):
        return
    figure, axes = pyplot.subplots(figsize=(5.9, 4.4))
    klds = [[cell["mean_kld"] for cell in line] for line in values]
    image = axes.imshow(klds, cmap="YlOrRd", vmin=0, aspect="auto")
    for y, line in enumerate(values):
        for x, cell in enumerate(line):
            dark = cell["mean_kld"] > 0.6 * image.get_clim()[1]
            axes.text(x, y, f"KLD {cell['mean_kld']:.3f}\nperplexity "
                      f"{cell['perplexity_change_percent']:+.0f} %", ha="center", va="center",
                      color="white" if dark else "black")
    axes.set_xticks([0, 1], [f"values per {a}" for a in axes_of])
    axes.set_yticks([0, 1], [f"keys per {a}" for a in axes_of])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("2 bits, groups of 32, window 128, no sinks", fontsize=11)
    save(figure, out, "grid")


def sweep(out, find, name, swept, label, floor):
    """KLD of three schemes along one retention setting."""
    figure, axes = pyplot.subplots(figsize=(7, 4.4))
    for scheme, points in swept.items():
        have = [(i, find(s)["mean_kld"]) for i, s in enumerate(points.values()) if find(s)]
        if have:
            _, _, colour, marker = family(scheme)
            axes.plot(*zip(*have), color=colour, marker=marker, markersize=7, label=scheme)
    if floor:
        axes.axhline(floor, color="#c0392b", linewidth=1, linestyle="--", label="engine's noise")
    ticks = list(next(iter(swept.values())))
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_xlabel(label)
    axes.set_ylabel("mean KLD against exact (log)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="both", axis="y", color=GRID)
    axes.legend(frameon=False, loc="center right")
    save(figure, out, name)


def bars(out, find, floor):
    """The flagship taken apart."""
    parts = [(label, find(s)) for label, s in schemes.PARTS if find(s)]
    if not parts:
        return
    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    left = 0.7 * min([row["mean_kld"] for _, row in parts] + ([floor] if floor else []))
    for y, (_, row) in enumerate(reversed(parts)):
        axes.hlines(y, left, row["mean_kld"], color="#1f6fb4", linewidth=2)
        axes.errorbar(row["mean_kld"], y, xerr=row["mean_kld_error"], color="#1f6fb4", marker="o",
                      markersize=7, ecolor="#444444", capsize=2)
        axes.annotate(f"{row['mean_kld']:.4f}", (row["mean_kld"] + row["mean_kld_error"], y),
                      textcoords="offset points", xytext=(9, 0), va="center", fontsize=9)
    axes.set_yticks(range(len(parts)),
                    [f"{label}, {row['bits']:.2f} bits" for label, row in reversed(parts)])
    if floor:
        axes.axvline(floor, color="#c0392b", linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(left, 4 * max(row["mean_kld"] for _, row in parts))
    axes.set_xlabel("mean KLD against exact (log)" + ("; dashed: the engine's noise" if floor else ""))
    axes.grid(True, axis="x", color=GRID)
    save(figure, out, "parts")


def passkey(out, rows, names):
    """Right answers of those asked, by length and depth, one map per scheme."""
    names = [n for n in names if any(r["scheme"] == n for r in rows)]
    lengths = sorted({int(r["length"]) for r in rows})
    depths = sorted({int(r["depth"]) for r in rows})
    if not names:
        return
    figure, all_axes = pyplot.subplots(1, len(names), figsize=(2.4 * len(names) + 1, 3.2),
                                       sharey=True, squeeze=False)
    for axes, name in zip(all_axes[0], names):
        cells = [[[int(r["right"]) for r in rows if r["scheme"] == name
                   and int(r["length"]) == n and int(r["depth"]) == d] for n in lengths]
                 for d in depths]
        shares = [[100 * sum(c) / len(c) if c else float("nan") for c in line] for line in cells]
        axes.imshow(shares, cmap="RdYlGn", vmin=-50, vmax=150, aspect="auto")
        for y, line in enumerate(cells):
            for x, cell in enumerate(line):
                if cell:
                    axes.text(x, y, f"{sum(cell)} of {len(cell)}", ha="center", va="center",
                              fontsize=9)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(depths)), [f"{d} %" for d in depths])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(name, fontsize=11)
        axes.set_xlabel("tokens")
    all_axes[0][0].set_ylabel("depth of the number")
    save(figure, out, "passkey")


def table(rows):
    lines = ["| scheme | bits per element | perplexity % | mean KLD | 99.9 % KLD | same top-1 % "
             "| KV MiB |", "|---|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda r: (r["bits"], r["mean_kld"])):
        lines.append(
            f"| {row['scheme'].replace('+', ', ')} | {row['bits']:.2f} "
            f"| {row['perplexity_change_percent']:+.2f} | {row['mean_kld']:.4f} "
            f"± {row['mean_kld_error']:.4f} | {row['kld_p999']:.2f} "
            f"| {100 * row['same_top1']:.1f} | {row['kv_bytes'] / 2**20:.2f} |")
    return "\n".join(lines)


def fit_table(find):
    """Mean KLD by how the scale of the normal levels is chosen."""
    lines = ["| scheme, changed part | norm | unbiased | lsq |", "|---|---|---|---|"]
    for scheme, cells in schemes.FITS.items():
        for part in ("keys", "values"):
            got = [find(cells[part, fit]) for fit in ("norm", "unbiased", "lsq")]
            lines.append(f"| {scheme}, {part} | " + " | ".join(
                f"{r['mean_kld']:.4f} ({r['perplexity_change_percent']:+.2f} %)" if r else "-"
                for r in got) + " |")
    return "\n".join(lines)


def layers_table(find):
    lines = ["| scheme | mean KLD | with layers 0-1 and 28-29 as lowkv4 |", "|---|---|---|"]
    for plain, edges in schemes.LAYERS:
        if find(plain) and find(edges):
            lines.append(f"| {plain} | {find(plain)['mean_kld']:.4f}, "
                         f"{find(plain)['kv_bytes'] / 2**20:.2f} MiB | "
                         f"{find(edges)['mean_kld']:.4f}, {find(edges)['kv_bytes'] / 2**20:.2f} MiB |")
    return "\n".join(lines)


def fill(document, name, text):
    """Puts `text` between the marks of `name`."""
    if document.exists():
        marks = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        document.write_text(marks.sub(lambda m: m[1] + text + "\n" + m[2], document.read_text()))


def draw(out, sections, results, setting, table_setting):
    """All tables and pictures that the sections give, from what was measured."""
    def find(scheme):
        return results.find(scheme, setting)

    document = out.parent / "quality.md"
    floor = (find("stock f16") or {}).get("mean_kld")
    if "table" in sections:
        rows = [r for s in sections["table"] if (r := results.find(s, table_setting))]
        text = table(rows)
        print(text)
        fill(document, "table", text)
        (out / "table.md").write_text(text + "\n")
        own_floor = (results.find("stock f16", table_setting) or {}).get("mean_kld")
        overview(out, rows, own_floor)
    if "fit" in sections:
        text = fit_table(find)
        print(text, file=sys.stderr)
        fill(document, "fit", text)
        bars(out, find, floor)
    if "grid" in sections:
        grid(out, find)
    if "window" in sections:
        sweep(out, find, "window", schemes.WINDOWS, "window: newest tokens kept exact", floor)
    if "sinks" in sections:
        sweep(out, find, "sinks", schemes.SINKS, "sinks: first tokens kept exact (in whole blocks)",
              floor)
    if "layers" in sections:
        fill(document, "layers", layers_table(find))
