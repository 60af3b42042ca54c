"""`lowkv compare` and its results, for eval/quality.py: what to run, and the CSV that remembers it.

A measurement is a scheme and a setting. OUT/quality.csv has one line for each, with the fingerprint of
the plug-in that was measured: another build's line is replaced when the scheme is measured again, and
read by the tables until then.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock

import quality_schemes as schemes
from paths import ROOT, fingerprint, set_up_paths
from sheet import Sheet
from weights import FOLDER, WEIGHTS, model_with

KEY = ["scheme", "windows", "tokens", "chunk", "skip", "weights", "calibration", "model", "text"]
FIGURES = ["bits", "perplexity", "perplexity_change_percent", "mean_kld", "mean_kld_error",
           "kld_p999", "same_top1", "kv_bytes"]
CALIBRATION_BYTES = 400_000
BUDGET_BITS = 2.5
MODELS = {"smollm2": ("SmolLM2-135M", "LOWKV_MODEL"), "gemma": ("Gemma 3 270M", "LOWKV_GEMMA")}
CALIBRATING = {}  # a lock for each file: two batches may want one


def of_set_up(variable):
    """A path that the set-up knows."""
    paths = set_up_paths()
    if variable not in paths:
        sys.exit(f"{variable} is missing: python3 deps/setup.py text bible dialogue gemma")
    return Path(paths[variable])


def models(names):
    """{name to show: file} of names of MODELS and of GGUF files."""
    return {MODELS[n][0]: of_set_up(MODELS[n][1]) for n in names if n in MODELS} | {
        Path(n).stem: Path(n) for n in names if n not in MODELS}


def add_options(parser, jobs):
    """Those of a script that measures with `lowkv compare`. Processors that are left over by the jobs are threads."""
    processors = os.cpu_count() or 1
    parser.add_argument("--build", default=ROOT / "build/release", type=lambda path: Path(path).resolve())
    parser.add_argument("--weights", default="f16", choices=WEIGHTS, help="their type (default: %(default)s)")
    parser.add_argument("--chunk", default=32, type=int, help="tokens read at a time (default: %(default)s)")
    parser.add_argument("--skip", default=256, type=int,
                        help="first positions that are not counted (default: %(default)s)")
    parser.add_argument("--batch", default=8, type=int,
                        help="schemes of one run; each run repeats `exact` (default: %(default)s)")
    parser.add_argument("--jobs", default=min(processors, jobs), type=int,
                        help="runs side by side (default: %(default)s)")
    parser.add_argument("--threads", default=max(1, 2 // jobs), type=int, help="of each run (default: %(default)s)")
    parser.add_argument("--redraw", action="store_true", help="tables and pictures from the CSV, nothing measured")


def usual(args):
    """The setting that a section's own changes are put on."""
    return {"windows": args.windows, "tokens": args.tokens, "chunk": args.chunk, "skip": args.skip,
            "weights": args.weights, "calibration": schemes.CALIBRATION,
            "model": fingerprint(args.model), "text": fingerprint(args.file)}


def key(scheme, setting):
    needed = {"calibration": "" if not schemes.needs_calibration(scheme) else setting["calibration"]}
    return (scheme, *(str((setting | needed)[k]) for k in KEY[1:]))


class Results(Sheet):
    """A line for each scheme and setting."""

    def __init__(self, path, plugin):
        super().__init__(path, KEY, ["plugin", *FIGURES])
        self.plugin = plugin

    def put(self, scheme, setting, figures):
        self.add(**dict(zip(KEY, key(scheme, setting), strict=True)), plugin=self.plugin,
                 **{k: figures[k] for k in FIGURES})

    def has(self, scheme, setting):
        """Whether this build was measured."""
        return self.get(*key(scheme, setting)).get("plugin") == self.plugin

    def find(self, scheme, setting):
        """The figures as numbers, of whichever build; None where this was not measured."""
        row = self.get(*key(scheme, setting))
        return {"scheme": scheme, "plugin": row["plugin"]} | {k: float(row[k]) for k in FIGURES} if row else None


def run(command, words=None, **environment):
    """What a command writes to its standard output, given `words`; its errors are shown where it fails."""
    # A thread that waits for another lets go of its core: beside other work that is much faster.
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, input=words,
                          env={"OMP_WAIT_POLICY": "passive"} | os.environ | environment)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def bits(args, scheme):
    """Bits per element of packed tokens of this model, all layers and all metadata counted."""
    if scheme in schemes.STOCK_BITS:
        return schemes.STOCK_BITS[scheme]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run([args.build / "bin/lowkv", "plan", "-m", args.model, "--schemes", scheme.replace(",", "+"), "--json",
             file.name])
        return json.load(open(file.name))["rows"][1]["bits_per_element"]


def text_of(args, name):
    """A calibration text: the end of the book, which no window reaches, or another book."""
    if name == "bible":
        if not args.bible:
            sys.exit("the section calibration needs the Bible's text: python3 deps/setup.py bible")
        return Path(args.bible)
    path = FOLDER / f"{fingerprint(args.file)}-end.txt"
    if not path.exists():
        path.write_bytes(Path(args.file).read_bytes()[-CALIBRATION_BYTES:])
    return path


def calibration(args, scheme, setting):
    """The file of a scheme that needs one. Weights of another type share it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    codecs = schemes.codecs(scheme)
    name, tokens = setting["calibration"].split()
    path = FOLDER / f"{codecs}-{name}-{tokens}-{setting['model']}.safetensors"
    with CALIBRATING.setdefault(path, Lock()):
        if not path.exists():
            print(f"calibrating {codecs} on {setting['calibration']}", file=sys.stderr)
            run([args.build / "bin/lowkv", "calibrate", "-m", model_with("f16", args.model), "--text",
                 text_of(args, name), "--scheme", codecs.replace("+", ","), "--tokens", tokens, "-o", path,
                 "--threads", args.threads])
    return str(path)


def compare(args, names, setting):
    """One `lowkv compare` over some schemes: the rows of its JSON, by scheme."""
    stock = [n.removeprefix("stock ") for n in names if n in schemes.STOCK_BITS]
    own = [n for n in names if n not in schemes.STOCK_BITS and n != "exact"]
    calibrations = dict.fromkeys(calibration(args, n, setting) for n in own if schemes.needs_calibration(n))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run([args.build / "bin/lowkv", "compare", "-m", model_with(setting["weights"], args.model),
             "-f", args.file, "--schemes", ",".join(own) or "exact", "--stock", ",".join(stock) or "none",
             "--windows", setting["windows"], "--tokens", setting["tokens"], "--chunk", setting["chunk"],
             "--skip", setting["skip"], "--threads", args.threads, "--no-speed", "--json", file.name],
            LOWKV_CALIBRATION=":".join(calibrations))
        rows = json.load(open(file.name))["rows"]
    # In the order asked for, `exact` first; compare spells schemes in its own way.
    return dict(zip(["exact", *own, *(f"stock {n}" for n in stock)], rows, strict=True))


def measure_layers(args, path):
    """What each layer loses when it alone is packed: eval/layer_budget.py measures that to choose among them."""
    if not path.exists():
        print("measuring layer by layer", file=sys.stderr)
        run([sys.executable, ROOT / "eval/layer_budget.py", "--build", args.build, "-m", model_with("f16", args.model),
             "-f", args.file, "--target-bits", BUDGET_BITS, "--threads", args.threads, "--json", path])


def measure(args, results, plan):
    """Runs what of the plan, pairs of scheme and setting, this build lacks; in batches of one setting."""
    plan = {key(scheme, setting): (scheme, setting) for scheme, setting in plan}.values()
    todo = [(s, setting) for s, setting in plan if not results.has(s, setting)]
    batches = []
    while todo:
        setting = todo[0][1]
        batches.append(([s for s, other in todo if other == setting][:args.batch], setting))
        todo = [(s, other) for s, other in todo if s not in batches[-1][0] or other != setting]
    total, done, start = sum(len(names) for names, _ in batches), 0, time.monotonic()
    print(f"{total} schemes to measure", file=sys.stderr)
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(compare, args, names, setting): setting for names, setting in batches}
        for batch in as_completed(running):
            setting, rows = running[batch], batch.result()
            for scheme, row in rows.items():
                results.put(scheme, setting, {**row, "bits": bits(args, scheme)})
            done += len(rows) - 1
            left = (time.monotonic() - start) / done * (total - done)
            print(f"{total - done} schemes to go, about {left / 60:.0f} minutes", file=sys.stderr)
