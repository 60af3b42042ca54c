"""One smoke test for every llama.cpp that the plug-in meets: versions of ggml, ways to build it.

LOWKV_MATRIX names the parts of deps/setup.py to test, e.g. "llama llama-0.15.3"; `make test-versions`
and `make test-builds` set them up first. All run the one plug-in that `make` has built.
"""

import os
import subprocess
from pathlib import Path

import pytest
from plugin_tools import BUILD, MODEL, PATHS, Run, assert_same_text, environment

COMMAND = BUILD / "bin/lowkv"
NAMES = os.environ.get("LOWKV_MATRIX", "llama").split()
STORY = ("The old lighthouse keeper counted seven ships, two whales and a red balloon before breakfast. "
         "He wrote them all down in a green book, closed the window and went to feed the cat. ")


def variable(name):
    return "LOWKV_LLAMA_BUILD" if name == "llama" else f"LOWKV_{name.upper().replace('-', '_').replace('.', '_')}"


class Build:
    """The programs of one llama.cpp."""

    def __init__(self, name):
        assert variable(name) in PATHS, f"{name} is not set up: deps/setup.py {name}"
        self.name, self.folder = name, Path(PATHS[variable(name)])

    def has(self, program):
        return (self.folder / program).exists()

    def run(self, program, *args, scheme=None, options=(), env=None):
        """Stock without a scheme, else through `lowkv run`."""
        command = [str(self.folder / program), *map(str, args)]
        if scheme is not None:
            command = [str(COMMAND), "run", *options, "--scheme", scheme, "--", *command]
        # Waiting threads must not take the processors from those that work: llama-simple starts four.
        done = subprocess.run(command, env=environment(None, GOMP_SPINCOUNT="0", **(env or {})),
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                              timeout=600)
        return Run(done)

    def write(self, prompt, tokens, **how):
        """A greedy continuation by llama-completion, or by llama-simple where that is all there is."""
        if self.has("llama-completion"):
            args = ("-p", prompt, "-n", tokens, "--temp", 0, "-no-cnv", "--ignore-eos", "-t", 2)
            done = self.run("llama-completion", "-m", MODEL, *args, **how)
        else:
            done = self.run("llama-simple", "-m", MODEL, "-n", tokens, prompt, **how)
        assert done.code == 0, done.both[-3000:]
        done.text = done.out[done.out.index(prompt) + len(prompt):]
        return done


# A static program is refused (test_builds.py).
@pytest.fixture(scope="module", params=[name for name in NAMES if name != "llama-static"])
def build(request):
    return Build(request.param)


# Stock sums up in f16, `exact` in f32: a free invention has close calls, a story told again has none.
def test_text_is_that_of_stock(build):
    stock = build.write(STORY * 8, 32)
    ours = build.write(STORY * 8, 32, scheme="exact")
    ours.said("lowkv: active: scheme exact")
    assert_same_text(stock.text, ours.text, at_least=100)


def test_packed_cache_is_read_well(build):
    """The story is told often enough that its first tellings are packed; telling it again takes them."""
    told = build.write(STORY * 14, 32, scheme="lowkv2.8", env={"LOWKV_VERBOSE": "1"})
    told.said("lowkv: active: scheme lowkv2.8, 30 layers, 23040 -> 4005 bytes per token")
    packed = int(told.said(r"cache freed: .*cells packed (\d+)").group(1))
    assert packed >= 256
    assert STORY.startswith(told.text.lstrip().rstrip("\n\ufffd")[:90]), told.text


def test_bench(build):
    if not build.has("llama-bench"):
        pytest.skip("llama-bench is not part of this build")
    run = build.run("llama-bench", "-m", MODEL, "-p", 0, "-n", 4, "-r", 1, "-t", 2, scheme="lowkv2.8")
    assert run.code == 0
    run.said("lowkv: active: scheme lowkv2.8")
