#!/usr/bin/env python3
"""Draws `lowkv compare --json FILE`: the loss (mean KLD, log) against the cache's bytes per token.

usage: eval/plot_compare.py compare.json picture.png|svg

Needs matplotlib. The Python that `python3 deps/setup.py --paths` calls LOWKV_PYTHON has it.
"""

import json
import sys
import textwrap


def main(arguments) -> int:
    if len(arguments) != 2:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    try:
        import matplotlib
    except ImportError:
        print("plot_compare.py: this Python has no matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with open(arguments[0], encoding="utf-8") as file:
        data = json.load(file)
    reference = next(row for row in data["rows"] if row["reference"])
    rows = [row for row in data["rows"] if not row["reference"]]

    pyplot.rcParams.update({"font.size": 11, "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    styles = {"lowkv": ("#1f6fb4", "o", "lowkv"), "stock": ("#8a8a8a", "s", "stock llama.cpp")}
    kilo = 1024
    for kind, (colour, marker, label) in styles.items():
        chosen = [row for row in rows if row["kind"] == kind]
        if not chosen:
            continue
        x = [row["kv_bytes_per_token"] / kilo for row in chosen]
        y = [max(row["mean_kld"], 1e-6) for row in chosen]
        axes.scatter(x, y, s=70, color=colour, marker=marker, label=label, zorder=3)
        for row, at_x, at_y in zip(chosen, x, y, strict=True):
            # Labels at the right edge go to the left of their dot.
            right = at_x > 0.85 * reference["kv_bytes_per_token"] / kilo
            label = row["scheme"].removeprefix("stock ")
            if row["compression"] > 1.05:
                label += f"\n{row['compression']:.1f}x smaller"
            axes.annotate(
                label,
                (at_x, at_y),
                textcoords="offset points",
                xytext=(-9, 0) if right else (9, 0),
                ha="right" if right else "left",
                va="center",
                fontsize=9,
                color=colour if kind == "lowkv" else "#555555",
            )
    exact = reference["kv_bytes_per_token"] / kilo
    axes.axvline(exact, color="#c0392b", linewidth=1, linestyle="--", label="exact (f16), the reference")
    axes.set_xlim(0, exact * 1.08)
    axes.set_yscale("log")
    axes.margins(y=0.18)
    axes.set_xlabel("cache, KiB per token")
    axes.set_ylabel("mean KLD against exact (log; lower is better)")
    figure.suptitle(textwrap.fill(f"What a smaller cache costs: {data['model']}", 64), fontsize=12)
    axes.set_title(f"{data['positions']:,} positions", fontsize=9, color="#555555")
    axes.grid(True, which="major", color="#e4e4e4", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(arguments[1], dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
