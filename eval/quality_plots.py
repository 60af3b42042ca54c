"""The pictures of docs/quality, from the CSV's rows, as PNG and SVG. Used by eval/quality.py.

`find` gives the figures of a scheme under the usual setting, or under a changed one. A picture along a
setting is drawn when all of it was measured.
"""

import json
from itertools import product

import matplotlib
import matplotlib.ticker

matplotlib.use("Agg")
import quality_schemes as schemes
from matplotlib import pyplot

pyplot.rcParams.update({
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True,
    "axes.axisbelow": True})

FAMILIES = [  # prefix, label, colour, marker
    ("lowkv", "lowkv", "#1f6fb4", "o"), ("kivi", "KIVI", "#d9782d", "^"),
    ("turboquant", "TurboQuant", "#3a9a5b", "D"), ("kvarn", "KVarN", "#8c564b", "P"),
    ("skvq", "SKVQ (calibrated)", "#e377c2", "X"), ("kvquant", "KVQuant (calibrated)", "#a39612", "p"),
    ("int", "plain integers", "#9467bd", "v"),
    ("stock", "llama.cpp's own caches", "#7f7f7f", "s")]
BLUE, RED, GRID = "#1f6fb4", "#c0392b", "#e4e4e4"
KLD = "mean KLD against exact (log; lower is better)"


def family(scheme):
    return next((f for f in FAMILIES if scheme.startswith(f[0])), FAMILIES[0])


def save(figure, out, name):
    figure.savefig(out / f"{name}.png", dpi=110)
    pyplot.close(figure)


def log_axis(axis, between=(2, 5)):
    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, *between)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def name_of(scheme):
    name = scheme.removeprefix("stock ").replace("+window=128+sinks=5", ", window")
    return name.replace("+sinks=0", ", no sinks").replace("+", ", ")


# Where a label may go from its dot, in points: the first place that is free is taken.
PLACES = [(8, 0, "left", "center"), (-8, 0, "right", "center"), (0, 7, "center", "bottom"),
          (0, -7, "center", "top"), (7, 6, "left", "bottom"), (7, -6, "left", "top"),
          (-7, 6, "right", "bottom"), (-7, -6, "right", "top"), (0, 18, "center", "bottom"),
          (0, -18, "center", "top"), (14, 14, "left", "bottom"), (14, -14, "left", "top")]


def place_labels(figure, axes, points):
    """Names beside their dots (x, y, text, colour), none on another dot or name."""
    figure.canvas.draw()
    dots = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    taken = [matplotlib.transforms.Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in dots]
    for place, (x, y, text, colour) in enumerate(points):
        others = taken[:place] + taken[place + 1:]
        for dx, dy, side, height in PLACES:
            label = axes.annotate(text, (x, y), textcoords="offset points", xytext=(dx, dy), ha=side,
                                  va=height, fontsize=8.5, color=colour)
            box = label.get_window_extent()
            if not any(box.overlaps(other) for other in others):
                break
            label.remove()
        else:
            label = axes.annotate(text, (x, y), textcoords="offset points", xytext=PLACES[0][:2],
                                  va="center", fontsize=8.5, color=colour)
            box = label.get_window_extent()
        taken.append(box)


def overview(out, find):
    """Loss against size: what the reader came for."""
    rows = [r for s in schemes.TABLE if (r := find(s)) and r["bits"] < 16]
    if not rows:
        return
    figure, axes = pyplot.subplots(figsize=(10, 7.5))
    for prefix, label, colour, marker in FAMILIES:
        chosen = [r for r in rows if r["scheme"].startswith(prefix)]
        for changed in (False, True):  # another window or other sinks than most
            some = [r for r in chosen if ("+" in r["scheme"]) == changed]
            axes.scatter([r["bits"] for r in some], [r["mean_kld"] for r in some], s=60, zorder=3,
                         marker=marker, edgecolors=colour, linewidths=1.5,
                         color="white" if changed else colour, label=None if changed else label)
    best, front = float("inf"), []
    for row in sorted(rows, key=lambda r: (r["bits"], r["mean_kld"])):
        if row["mean_kld"] < best:
            best = row["mean_kld"]
            front.append((row["bits"], best))
    axes.plot(*zip(*front, strict=True), color="#555555", linewidth=1, linestyle=":",
              label="nothing smaller loses less", zorder=1)
    floor = find("stock f16")
    if floor:
        axes.axhline(floor["mean_kld"], color=RED, linewidth=1, linestyle="--",
                     label="llama.cpp's plain f16 cache")
    axes.set_yscale("log")
    axes.set_xscale("log")
    ticks = [1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8]
    axes.set_xticks(ticks, ticks)
    axes.set_xticks([], minor=True)
    axes.set_xlim(1.35, 9.6)
    log_axis(axes.yaxis)
    axes.set_xlabel("bits per element of this model, all metadata counted (f16 is 16)")
    axes.set_ylabel(KLD)
    axes.grid(True, which="major", color=GRID)
    axes.legend(facecolor="white", edgecolor="white", framealpha=1, loc="lower left", fontsize=9.5)
    order = sorted(rows, key=lambda r: not r["scheme"].startswith("lowkv"))  # the flagship's names first
    place_labels(figure, axes, [(r["bits"], r["mean_kld"], name_of(r["scheme"]), family(r["scheme"])[2])
                                for r in order])
    save(figure, out, "overview")


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


def lines(out, find, name, swept, label):
    """KLD of some schemes along one setting; `swept`: scheme, then tick, then what was measured."""
    if not all(find(s) for points in swept.values() for s in points.values()):
        return
    figure, axes = pyplot.subplots(figsize=(7.5, 4.4))
    for scheme, points in swept.items():
        rows = [find(s) for s in points.values()]
        _, _, colour, marker = family(scheme)
        axes.errorbar(range(len(rows)), [r["mean_kld"] for r in rows], yerr=[r["mean_kld_error"] for r in rows],
                      color=colour, marker=marker, markersize=7, capsize=2, label=scheme)
    ticks = list(next(iter(swept.values())))
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_xlabel(label)
    axes.set_ylabel("mean KLD against exact (log)")
    axes.set_yscale("log")
    log_axis(axes.yaxis)
    axes.grid(True, which="both", axis="y", color=GRID)
    figure.legend(frameon=False, loc="outside upper center", ncols=len(swept) + 1, fontsize=10)
    save(figure, out, name)


def bars(out, find, name, parts):
    """One scheme taken apart: (label, scheme), in the order shown."""
    parts = [(label, row) for label, s in parts if (row := find(s))]
    if not parts:
        return
    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.38 * len(parts)))
    left = 0.7 * min(row["mean_kld"] for _, row in parts)
    for y, (_, row) in enumerate(reversed(parts)):
        axes.hlines(y, left, row["mean_kld"], color=BLUE, linewidth=2)
        axes.errorbar(row["mean_kld"], y, xerr=row["mean_kld_error"], color=BLUE, marker="o",
                      markersize=7, ecolor="#444444", capsize=2)
        change = row["perplexity_change_percent"]
        axes.annotate(f"{row['mean_kld']:.3g}  ({change:+,.{0 if change > 100 else 1}f} %)",
                      (row["mean_kld"] + row["mean_kld_error"], y), textcoords="offset points", xytext=(9, 0),
                      va="center", fontsize=9)
    axes.set_yticks(range(len(parts)), [f"{label}, {row['bits']:.2f} bits" for label, row in reversed(parts)])
    axes.set_xscale("log")
    right = 20 * max(row["mean_kld"] for _, row in parts)
    log_axis(axes.xaxis, (2, 5) if right < 500 * left else ())
    axes.set_xlim(left, right)
    axes.set_xlabel("mean KLD against exact (log), in brackets the change of perplexity")
    axes.grid(True, axis="x", color=GRID)
    save(figure, out, name)


def layers(out):
    """What each layer loses when it alone is packed, as eval/layer_budget.py measured it."""
    if not (out / "layers.json").exists():
        return
    budget = json.loads((out / "layers.json").read_text())
    figure, axes = pyplot.subplots(figsize=(9, 3.6))
    rungs = sorted({row["scheme"] for row in budget["layers"]})
    for rung, colour in zip(rungs, (BLUE, "#d9782d", "#3a9a5b", "#9467bd"), strict=False):
        some = [row for row in budget["layers"] if row["scheme"] == rung]
        axes.bar([row["layer"] for row in some], [1000 * row["mean_kld"] for row in some], color=colour,
                 label=f"gets {rung} at {budget['target_bits']} bits")
    axes.set_xticks(range(0, len(budget["layers"]), 2))
    axes.set_xlabel("layer that is packed, all others exact")
    axes.set_ylabel("mean KLD, thousandths")
    axes.grid(True, axis="y", color=GRID)
    axes.legend(frameon=False, fontsize=10)
    save(figure, out, "layers")


def calibration(out, find):
    """KLD by what a scheme was calibrated on."""
    if not all(find(s, calibration=c) for s in schemes.CALIBRATIONS_SCHEMES for c in schemes.CALIBRATIONS):
        return
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    width = 0.8 / len(schemes.CALIBRATIONS)
    for place, what in enumerate(schemes.CALIBRATIONS):
        text, tokens = what.split()
        rows = [find(s, calibration=what) for s in schemes.CALIBRATIONS_SCHEMES]
        at = [x + (place - 1.5) * width for x in range(len(rows))]
        axes.bar(at, [r["mean_kld"] for r in rows], 0.92 * width, yerr=[r["mean_kld_error"] for r in rows],
                 capsize=2, color=RED if text == "bible" else pyplot.cm.Blues(0.35 + 0.25 * place),
                 label=f"{text}, {int(tokens):,} tokens")
        for x, row in zip(at, rows, strict=True):
            axes.annotate(f"{row['mean_kld']:.3f}", (x, row["mean_kld"]), ha="center",
                          textcoords="offset points", xytext=(0, 7), fontsize=8.5)
    axes.set_xticks(range(len(schemes.CALIBRATIONS_SCHEMES)), schemes.CALIBRATIONS_SCHEMES)
    axes.set_ylabel("mean KLD on the handbook")
    axes.legend(frameon=False, fontsize=10)
    save(figure, out, "calibration")


def passkey(out, found):
    """Share of right answers by length: a panel for each model, a curve for each scheme. For eval/passkey.py."""
    models = list(dict.fromkeys(model for model, _, _ in found))
    lengths = sorted({length for _, length, _ in found})
    if not models:
        return
    figure, all_axes = pyplot.subplots(1, len(models), figsize=(4.6 * len(models), 4.2), sharey=True, squeeze=False)
    names = list(dict.fromkeys(scheme for _, _, scheme in found))
    for axes, model in zip(all_axes.flat, models, strict=True):
        for place, name in enumerate(names):
            points = [(lengths.index(n), *found[model, n, name][:2]) for n in lengths if (model, n, name) in found]
            axes.errorbar([x + 0.04 * (place - len(names) / 2) for x, _, _ in points], [100 * s for _, s, _ in points],
                          yerr=[200 * (s * (1 - s) / count) ** 0.5 for _, s, count in points], capsize=2, marker="o",
                          color="black" if name == "exact" else pyplot.cm.viridis(0.9 * place / len(names)), label=name)
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axes.set_ylim(-3, 103)
        axes.set_xlabel("tokens")
        axes.grid(True, axis="y", color=GRID)
        axes.set_title(model, fontsize=11)
    all_axes[0, 0].set_ylabel("pass keys found, % (two standard errors)")
    figure.legend(*all_axes[0, 0].get_legend_handles_labels(), frameon=False, loc="outside lower center",
                  ncols=4, fontsize=9)
    save(figure, out, "passkey")


def by_text(out, find, models, names, texts, contexts):
    """KLD by text: a panel for each model, a curve for each scheme and context. For eval/texts.py."""
    figure, all_axes = pyplot.subplots(1, len(models), figsize=(5.2 * len(models), 4.6), sharey=True, squeeze=False)
    colours = pyplot.cm.viridis([i / max(1, len(names) - 1) * 0.9 for i in range(len(names))])
    drawn = False
    for axes, model in zip(all_axes.flat, models, strict=True):
        for (name, colour), context in product(zip(names, colours, strict=True), contexts):
            points = [(x, row) for x, text in enumerate(texts) if (row := find(model, name, text, context))]
            if points:
                drawn = True
                first = context == contexts[0]
                axes.errorbar([x for x, _ in points], [row["mean_kld"] for _, row in points], color=colour,
                              yerr=[row["mean_kld_error"] for _, row in points], capsize=2,
                              marker="o" if first else "s", mfc=colour if first else "white",
                              linestyle="-" if first else "--",
                              label=f"{name_of(name)}, {context:,} tokens")
        axes.set_xticks(range(len(texts)), texts)
        axes.set_xlim(-0.4, len(texts) - 0.6)
        axes.set_yscale("log")
        log_axis(axes.yaxis)
        axes.grid(True, axis="y", color=GRID)
        axes.set_title(model, fontsize=11)
    if not drawn:
        return pyplot.close(figure)
    all_axes[0, 0].set_ylabel(KLD)
    shown = all_axes[0, 0].get_legend_handles_labels()
    figure.legend(*shown, frameon=False, loc="outside lower center", fontsize=8.5,
                  ncols=max(1, len(shown[0]) // len(contexts)))  # a column for each scheme
    return save(figure, out, "texts")


PICTURES = {
    "table": overview,
    "grid": grid,
    "fit": lambda out, find: bars(out, find, "parts", schemes.PARTS),
    "skvq": lambda out, find: bars(out, find, "skvq", schemes.SKVQ),
    "kvquant": lambda out, find: bars(out, find, "kvquant", schemes.KVQUANT),
    "window": lambda out, find: lines(out, find, "window", schemes.WINDOWS,
                                      "window: newest tokens kept exact"),
    "sinks": lambda out, find: lines(out, find, "sinks", schemes.SINKS,
                                     "sinks: first tokens kept exact (in whole blocks)"),
    "calibration": calibration,
}


def draw(out, sections, find):
    for name in sections:
        if name in PICTURES:
            PICTURES[name](out, find)
