"""Stock llama.cpp's own benchmarks with and without the plug-in: where they are, and running one. Used by
bench/llama_bench.py, bench/llama_batch.py and bench/shapes.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def set_up_paths():
    """What deps/setup.py has put into its cache, or nothing."""
    try:
        answer = subprocess.run(
            [sys.executable, ROOT / "deps/setup.py", "--paths"], capture_output=True, text=True, check=True
        )
        return json.loads(answer.stdout)
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError):
        return {}


def add_options(parser, tool):
    parser.add_argument("--build", default=str(ROOT / "build/release"), help="the build folder (default: %(default)s)")
    parser.add_argument("--plugin", help="libggml-lowkv.so (default: the build folder's)")
    parser.add_argument(f"--{tool}", dest="tool", help=f"stock {tool} (default: the one that the set-up built)")
    parser.add_argument("-m", "--model", help="a GGUF file (default: the demo's model)")
    parser.add_argument("-t", "--threads", type=int, default=min(os.cpu_count() or 1, 2), help="default: %(default)s")


class Tool:
    """The tool, the plug-in and the model that the options name; a clear message when one is missing."""

    def __init__(self, name, options):
        self.script = Path(sys.argv[0]).name
        self.paths = set_up_paths()
        build, tools = Path(options.build), Path(self.paths.get("LOWKV_LLAMA_BUILD", "."))
        plugin = options.plugin or next(build.rglob("libggml-lowkv.so"), build / "lib/libggml-lowkv.so")
        places = (tools / name, tools / "bin" / name)
        found = options.tool or next((path for path in places if path.exists()), places[0])
        self.model = str(options.model or self.paths.get("LOWKV_MODEL", ""))
        self.threads = options.threads
        for what, path, option in (
            (name, found, f"--{name}"), ("plug-in", plugin, "--plugin"), ("model", self.model, "--model"),
        ):
            if not Path(path).is_file():
                self.fail(f"there is no {what} at '{path}': run `make build`, or name it with {option}")
        self.tool, self.plugin = str(found), str(Path(plugin).resolve())

    def depths(self, text):
        """Of --depths."""
        try:
            return [int(depth) for depth in text.split(",")]
        except ValueError:
            self.fail(f"--depths {text}: whole numbers separated by commas")

    def fail(self, message):
        sys.exit(f"{self.script}: {message}")

    def run(self, scheme, *words, **variables):
        """What it printed: (standard output, standard error). scheme None: without the plug-in."""
        environment = {k: v for k, v in os.environ.items() if k not in ("GGML_BACKEND_PATH", "LOWKV_SCHEME")}
        if scheme is not None:
            environment.update(GGML_BACKEND_PATH=self.plugin, LOWKV_SCHEME=scheme, **variables)
        command = [self.tool, "-m", self.model, "-t", str(self.threads), *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            self.fail(f"{' '.join(command)} failed ({done.returncode}):\n{done.stderr}")
        if (scheme is not None) != ("lowkv: active" in done.stderr):
            wrong = "did not become active" if scheme is not None else "is active though it was not asked for"
            self.fail(f"the plug-in {wrong}:\n{done.stderr}")
        return done.stdout, done.stderr


def turns(items, round_number):
    """The order turns round too, so that a machine that slows down favours nobody."""
    return items if round_number % 2 == 0 else items[::-1]


def each_in_turn(depth, names, rounds, measure):
    """{name: measure(name) of each round} at a depth; says on standard error what is measured."""
    found = {name: [] for name in names}
    for turn in range(rounds):
        for name in turns(names, turn):
            print(f"depth {depth}, round {turn + 1}/{rounds}: {name or 'stock f16'}", file=sys.stderr)
            found[name].append(measure(name))
    return found
