"""How the pictures of bench/ look, and the figures beside them. Needs matplotlib: run with the set-up's Python, as the
Makefile does."""

import csv

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

pyplot.rcParams.update({
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True,
    "axes.axisbelow": True})

COLOURS = ("#7f7f7f", "#1f6fb4", "#d9782d", "#3a9a5b", "#9467bd")
MARKERS = "soD^v"
RED, GRID = "#c0392b", "#e4e4e4"


def side_by_side(count):
    """(figure, axes)"""
    figure, [axes] = pyplot.subplots(1, count, figsize=(5 * count, 4), squeeze=False)
    for axis in axes:
        axis.grid(color=GRID)
    return figure, axes


def save(figure, rows, out, name):
    """The picture and the rows that it shows: name.png and name.csv."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    figure.savefig(out / f"{name}.png", dpi=110)
    pyplot.close(figure)
