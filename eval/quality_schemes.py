"""What eval/quality.py measures: for each table and picture of docs/quality, its schemes.

A scheme is written as `lowkv compare` takes it, "+" standing for the comma. One that several sections
name is measured once. (`lowkv2.8` and `lowkv2.8+window=128` would be two: so the plain name is used
where a sweep passes through a preset's own value.)

To add a preset to the tables: name it in PRESETS, then `eval/quality.py --schemes NAME`.
"""

import re

import quality_reference
from weights import WEIGHTS

STOCK_BITS = {"stock f16": 16.0, "stock q8_0": 8.5, "stock q4_0": 4.5}

PRESETS = ["lowkv1.5", "lowkv2", "lowkv2.8", "lowkv3", "lowkv4", "kivi2", "kivi4", "turboquant2",
           "turboquant3", "turboquant4", "turboquant2-qr", "turboquant3-qr", "turboquant4-qr", "int4", "int4h", "int8"]
# No longer in lowkv, which had them last at a0e1fdf: what was measured stays in the tables.
REMOVED = ["kvarn2", "kvarn3", "kvarn4"]
# These need a calibration of the model, which quality.py makes on a text of its own.
CALIBRATED = ["skvq-k4v4", "skvq-k2v2", "skvq-k2v1.5", "kvquant4", "kvquant3", "kvquant2", "kvquant4-1%",
              "kvquant3-1%", "kvquant2-1%"]
# KVQuant's presets have no window; these show what that costs. KIVI's paper keeps no sinks.
WINDOWED = ["kvquant3-1%+window=128+sinks=5", "kvquant2-1%+window=128+sinks=5"]
TABLE = [*PRESETS, *REMOVED, *CALIBRATED, *WINDOWED, "kivi2+sinks=0", "kivi4+sinks=0", *STOCK_BITS]


def needs_calibration(scheme):
    return bool(re.search("^(skvq|kvquant)|-(reorder|static|learned|clip)", scheme))


def codecs(scheme):
    """The part of a scheme that a calibration belongs to: without window and sinks."""
    return "+".join(part for part in scheme.split("+") if not re.match("(window|sinks|flush|rows)=", part))


H = "head-normal-hadamard"
# What lowkv's presets were before sorted keys and trellises: bits of keys and values.
ROTATED = {name: f"k=token-{key}-{H}-mean+v=token-{value}-{H}-unbiased" for name, key, value in
           (("1.5", "1.5", "1.5"), ("2", 2, 2), ("2.8", 3, 2), ("3", 3, 3))}
WORDS = {"norm": "", "unbiased": "-unbiased", "lsq": "-lsq"}

# Measured with each type of weights; f16 is what all other sections use.
WEIGHTS_SCHEMES = [ROTATED["2.8"], "lowkv4", "kivi2", "kivi4", "stock q4_0", "stock f16"]

# KIVI's 2 bits with each group's range searched, on which part.
SEARCH = [("no search (kivi2)", "kivi2"), ("keys", "k=channel-2-g32-search+v=token-2-g32"),
          ("values", "k=channel-2-g32+v=token-2-g32-search"),
          ("both", "k=channel-2-g32-search+v=token-2-g32-search")]

# KIVI's question: which axis may share a scale?
GRID = {(k, v): f"k={k}-2-g32+v={v}-2-g32+window=128+sinks=0" if (k, v) != ("channel", "token")
        else "kivi2+sinks=0"
        for k in ("token", "channel") for v in ("token", "channel")}

ROTATED_3 = "rotated keys of 3 bits"
SWEPT = {"kivi2": "kivi2", "turboquant2": "turboquant2", ROTATED_3: ROTATED["2.8"]}
WINDOWS = {name: {w: scheme if w == 128 else f"{scheme}+window={w}" for w in (0, 32, 64, 128, 256)}
           for name, scheme in SWEPT.items()}
# A block with a sink stays exact whole, so all counts within the first block are one scheme: the
# block has 128 tokens where the keys are centred and 32 elsewhere.
SINKS = {name: {s: SWEPT[name] if 0 < s <= block else f"{SWEPT[name]}+sinks={s}" for s in (0, 1, 5, 128)}
         for name, block in (("kivi2", 32), ("turboquant2", 32), (ROTATED_3, 128))}

NORM2 = f"k=token-2-{H}-mean+v=token-2-{H}"
NORM28 = f"k=token-3-{H}-mean+v=token-2-{H}"
# How the scale of the normal levels is chosen. Rows: which part is changed, the other one being `norm`.
FITS = {name: {
    **{("keys", fit): f"k=token-{bits}-{H}-mean{word}+v=token-2-{H}" for fit, word in WORDS.items()},
    **{("values", fit): f"k=token-{bits}-{H}-mean+v=token-2-{H}{word}" for fit, word in WORDS.items()},
} for name, bits in (("2-bit keys, 2-bit values", 2), ("3-bit keys, 2-bit values", 3))}

# The flagship taken apart, and its neighbours: label, scheme.
PARTS = [
    ("uniform levels, g32", "k=token-2-g32+v=token-2-g32"),
    ("norm + normal levels, no rotation", "k=token-2-head-normal+v=token-2-head-normal"),
    ("... + random rotation (turboquant2-qr)", "turboquant2-qr"),
    ("... + Hadamard rotation (turboquant2)", "turboquant2"),
    ("... + Hadamard, keys less their mean", NORM2),
    ("... + 3-bit keys", NORM28),
    ("... + values unbiased", ROTATED["2.8"]),
    ("3-bit keys, fp8 norm on keys", f"k=token-3-{H}-mean-fp8+v=token-2-{H}"),
    ("3-bit keys, fp8 norm on values", f"k=token-3-{H}-mean+v=token-2-{H}-fp8"),
]

# SKVQ's and KVQuant's parts, one left out or changed at a time; each with a calibration of its own.
SKVQ = [
    ("all of it (skvq-k2v2)", "skvq-k2v2"),
    ("no clip", "k=token-2-g128-reorder-pre-fp8+v=token-2-g128-reorder-fp8"),
    ("no reorder: one group, range searched", "k=token-2-row-search-pre-fp8+v=token-2-row-search-fp8"),
    ("no reorder, no clip", "k=token-2-row-pre-fp8+v=token-2-row-fp8"),
    ("keys after RoPE", "k=token-2-g128-reorder-clip-fp8+v=token-2-g128-reorder-clip-fp8"),
    ("no window", "skvq-k2v2+window=0"),
    ("no sinks", "skvq-k2v2+sinks=0"),
    ("groups of 32", "k=token-2-g32-reorder-clip-pre-fp8+v=token-2-g32-reorder-clip-fp8"),
]
AS_PUBLISHED = "+window=0+sinks=1"
KVQUANT = [
    ("all of it (kvquant3-1%)", "kvquant3-1%"),
    ("no outliers (kvquant3)", "kvquant3"),
    ("uniform levels", "k=channel-3-static-1%-pre+v=token-3-row-1%" + AS_PUBLISHED),
    ("uniform levels, no outliers", "k=channel-3-static-pre+v=token-3-row" + AS_PUBLISHED),
    ("keys after RoPE", "k=channel-3-static-learned-1%+v=token-3-row-learned-1%" + AS_PUBLISHED),
    ("keys per token", "k=token-3-row-learned-1%-pre+v=token-3-row-learned-1%" + AS_PUBLISHED),
    ("no sink", "kvquant3-1%+sinks=0"),
    ("with window 128, sinks 5", "kvquant3-1%+window=128+sinks=5"),
]

# What a calibration is made on: text and tokens.
CALIBRATION = "handbook 4096"
CALIBRATIONS = ["handbook 1024", CALIBRATION, "handbook 16384", "bible 4096"]
CALIBRATIONS_SCHEMES = ["skvq-k2v2", "kvquant3", "kvquant3-1%"]

# More bits for the first and last layers.
EDGES = [(ROTATED[name], f"{ROTATED[name]}+layer.0-1=lowkv4+layer.28-29=lowkv4") for name in ("2", "2.8")]

QUICK = ["lowkv2", "lowkv2.8", "kivi2", "stock q4_0"]


def plain(schemes):
    """Measured under the usual setting."""
    return [(scheme, {}) for scheme in dict.fromkeys(schemes)]


# Of each section: schemes, and what differs from the usual setting.
SECTIONS = {
    "table": plain(s for s in TABLE if s not in REMOVED),
    "weights": [(s, {"weights": w}) for w in WEIGHTS for s in WEIGHTS_SCHEMES],
    "fit": plain([s for row in FITS.values() for s in row.values()] + [s for _, s in PARTS]),
    "grid": plain(GRID.values()),
    "search": plain(s for _, s in SEARCH),
    "window": plain(s for row in WINDOWS.values() for s in row.values()),
    "sinks": plain(s for row in SINKS.values() for s in row.values()),
    "skvq": plain(s for _, s in SKVQ),
    "kvquant": plain(s for _, s in KVQUANT),
    "calibration": [(s, {"calibration": c}) for c in CALIBRATIONS for s in CALIBRATIONS_SCHEMES],
    "edges": plain(s for pair in EDGES for s in pair),
    "reference": [(row.scheme, row.setting) for row in quality_reference.ROWS if row.scheme not in REMOVED],
}
