"""eval/layer_budget.py with the command itself, on tiny random models: the target holds, and the text parses."""

import json
import random
import subprocess
import sys
from pathlib import Path

import plugin_models as models
import pytest
from plugin_tools import BUILD, Run, environment

SCRIPT = Path(__file__).resolve().parents[2] / "eval/layer_budget.py"
LADDER = {"lowkv2": 2.28125, "lowkv2.8": 2.78125, "lowkv3": 3.28125, "lowkv4": 4.28125}  # head_dim 64
LAYERS, TOKENS = 6, 480


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    source = random.Random(1)
    path = tmp_path_factory.mktemp("budget") / "text.txt"
    path.write_text("".join(source.choice("abcdefgh ijklmnop,.\n") for _ in range(1100)))
    return path


def budget(model, text, *more):
    file = text.parent / "budget.json"
    done = Run(subprocess.run(
        [sys.executable, str(SCRIPT), "--build", str(BUILD), "-m", str(model), "-f", str(text), "-n", str(TOKENS),
         "--window", "32", "-t", "1", "--json", str(file), *map(str, more)], env=environment(None),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120))
    assert done.code == 0, done.both
    return done, json.loads(file.read_text())


def test_the_target_holds_and_the_text_says_what_was_chosen(tmp_path, text):
    run, found = budget(models.llama(tmp_path / "model.gguf", layers=LAYERS), text, "--target-bits", 2.7)
    assert [rung["bits"] for rung in found["ladder"]] == pytest.approx(list(LADDER.values()))
    schemes = [layer["scheme"] for layer in found["layers"]]
    bits = [LADDER[scheme] for scheme in schemes]
    assert len(schemes) == LAYERS and len(set(schemes)) > 1
    assert found["chosen"]["bits"] == pytest.approx(sum(bits) / LAYERS) and found["chosen"]["bits"] <= 2.7
    assert found["skip"] == 320 and found["positions"] == TOKENS - 320 - 1
    losses = [layer["sensitivity"] for layer in found["layers"]]
    assert min(losses) > 0 and all(layer["packed"] for layer in found["layers"])
    assert bits[losses.index(max(losses))] == max(bits)
    ratios = [rung["ratio"] for rung in found["ladder"]]
    assert ratios[0] == 1 and ratios == sorted(ratios, reverse=True) and ratios[-1] < 0.3
    verified = found["verification"]
    assert verified["other_text"]
    assert [row["scheme"] for row in verified["rows"]] == [
        "lowkv2,window=32", found["chosen"]["scheme"], "lowkv2.8,window=32"]
    assert run.out.splitlines()[-1] == found["recommended"]
    said = subprocess.run([BUILD / "bin/lowkv", "schemes", found["chosen"]["scheme"]], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr


def test_of_models_with_recurrent_layers_those_that_attend_are_measured(tmp_path, text):
    run, found = budget(models.lfm2(tmp_path / "lfm2.gguf"), text, "--target-bits", 3)
    assert run.out.count("keeps no keys and values") == 2
    assert sum("scheme" in layer for layer in found["layers"]) == len(found["layers"]) - 2
