"""What eval/quality.py measures: for each section of docs/quality.md, its schemes.

A scheme is written as `lowkv compare` takes it, "+" standing for the comma. One that several sections
name is measured once. (`lowkv2.8` and `lowkv2.8+window=128` would be two: so the plain name is used
where a sweep passes through a preset's own value.)
"""

STOCK_BITS = {"stock f16": 16.0, "stock q8_0": 8.5, "stock q4_0": 4.5}

PRESETS = ["lowkv1.5", "lowkv2", "lowkv2.6", "lowkv2.8", "lowkv3", "lowkv4", "kivi2", "kivi4", "turboquant2",
           "turboquant3", "turboquant4", "kvarn2", "kvarn3", "kvarn4", "int4", "int4h", "int8"]
# These need a calibration of the model, which quality.py makes on a text of its own. KVQuant's have no
# window; two with one show what that costs.
CALIBRATED = ["skvq-k4v4", "skvq-k2v2", "skvq-k2v1.5", "kvquant4", "kvquant3", "kvquant2", "kvquant4-1%",
              "kvquant3-1%", "kvquant2-1%"]
WINDOWED = ["kvquant3-1%+window=128+sinks=5", "kvquant2-1%+window=128+sinks=5"]
# The papers keep no sinks.
TABLE = [*PRESETS, *CALIBRATED, *WINDOWED, "kivi2+sinks=0", "kivi4+sinks=0", *STOCK_BITS]

# KIVI's 2 bits with each group's range searched, on which part.
SEARCH = {"keys": "k=channel-2-g32-search+v=token-2-g32", "values": "k=channel-2-g32+v=token-2-g32-search",
          "both": "k=channel-2-g32-search+v=token-2-g32-search"}

# KIVI's question: which axis may share a scale?
GRID = {(k, v): f"k={k}-2-g32+v={v}-2-g32+window=128+sinks=0" if (k, v) != ("channel", "token")
        else "kivi2+sinks=0"
        for k in ("token", "channel") for v in ("token", "channel")}

SWEPT = ["kivi2", "turboquant2", "lowkv2.8"]
WINDOWS = {name: {w: name if w == 128 else f"{name}+window={w}" for w in (0, 32, 64, 128, 256)}
           for name in SWEPT}
# A block with a sink stays exact whole, so all counts within the first block are one scheme: the
# block has 128 tokens where the keys are centred and 32 elsewhere.
SINKS = {name: {s: name if 0 < s <= block else f"{name}+sinks={s}" for s in (0, 1, 5, 128)}
         for name, block in (("kivi2", 32), ("turboquant2", 32), ("lowkv2.8", 128))}

H = "head-normal-hadamard"
NORM2 = f"k=token-2-{H}-mean+v=token-2-{H}"
NORM28 = f"k=token-3-{H}-mean+v=token-2-{H}"
# How the scale of the normal levels is chosen. Rows: which part is changed.
FITS = {
    "lowkv2": {
        ("keys", "norm"): NORM2, ("values", "norm"): NORM2,
        **{("keys", fit): f"k=token-2-{H}-mean-{fit}+v=token-2-{H}" for fit in ("unbiased", "lsq")},
        **{("values", fit): f"k=token-2-{H}-mean+v=token-2-{H}-{fit}" for fit in ("unbiased", "lsq")},
    },
    "lowkv2.8": {
        ("keys", "norm"): NORM28, ("values", "norm"): NORM28,
        **{("keys", fit): f"k=token-3-{H}-mean-{fit}+v=token-2-{H}" for fit in ("unbiased", "lsq")},
        **{("values", fit): f"k=token-3-{H}-mean+v=token-2-{H}-{fit}" for fit in ("unbiased", "lsq")},
    },
}

# The flagship taken apart, and its neighbours: label, scheme.
PARTS = [
    ("uniform levels, g32", "k=token-2-g32+v=token-2-g32"),
    ("norm + normal levels, no rotation", "k=token-2-head-normal+v=token-2-head-normal"),
    ("... + random rotation (turboquant2-qr)", "turboquant2-qr"),
    ("... + Hadamard rotation (turboquant2)", "turboquant2"),
    ("... + Hadamard, keys less their mean", NORM2),
    ("... + 3-bit keys", NORM28),
    ("... + values unbiased", f"k=token-3-{H}-mean+v=token-2-{H}-unbiased"),
    ("3-bit keys, fp8 norm on keys", f"k=token-3-{H}-mean-fp8+v=token-2-{H}"),
    ("3-bit keys, fp8 norm on values", f"k=token-3-{H}-mean+v=token-2-{H}-fp8"),
]

EDGES = "+layer.0-1=lowkv4+layer.28-29=lowkv4"
LAYERS = [(name, name + EDGES) for name in ("lowkv2", "lowkv2.8")]

QUICK = ["lowkv2", "lowkv2.8", "kivi2", "stock q4_0"]


def unique(schemes):
    return list(dict.fromkeys(schemes))


SECTIONS = {
    "table": unique(TABLE),
    "fit": unique([s for row in FITS.values() for s in row.values()] + [s for _, s in PARTS]),
    "grid": list(GRID.values()),
    "search": list(SEARCH.values()),
    "window": [s for row in WINDOWS.values() for s in row.values()],
    "sinks": [s for row in SINKS.values() for s in row.values()],
    "layers": unique(s for pair in LAYERS for s in pair),
}
