"""`lowkv budget` on tiny random models: the target holds, the text parses, and more bits never lose
more."""

import json
import random
import re
import subprocess

import plugin_models as models
import pytest
from plugin_tools import BUILD, Run, environment

COMMAND = BUILD / "bin/lowkv"
LADDER = {"lowkv2": 2.28125, "lowkv2.8": 2.78125, "lowkv3": 3.28125, "lowkv4": 4.28125}  # head_dim 64
LAYERS = 6
RETENTION = ("--window", 32, "--sinks", 5)
# Blocks of 128: the first one that holds no sink is packed at 32 + 256 tokens; 320 in whole chunks.
SKIP, TOKENS = 320, 480


def lowkv(*args):
    done = subprocess.run([str(COMMAND), *map(str, args)], env=environment(None),
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    return Run(done)


def write_text(path, length):
    source = random.Random(1)
    path.write_text("".join(source.choice("abcdefgh ijklmnop,.\n") for _ in range(length)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("budget")


@pytest.fixture(scope="module")
def text(folder):
    return write_text(folder / "text.txt", 1100)


@pytest.fixture(scope="module")
def model(folder):
    return models.llama(folder / "model.gguf", layers=LAYERS)


@pytest.fixture(scope="module")
def budget(model, text, folder):
    def run(target, *more, retention=RETENTION, read=text):
        file = folder / "budget.json"
        found = lowkv("budget", "-m", model, "-f", read, "--target-bits", target, "-n", TOKENS,
                      "-t", 1, *retention, "--json", file, *more)
        assert found.code == 0, found.both
        return found, json.loads(file.read_text())
    return run


def layers_of(scheme):
    """Each layer's preset as the scheme text says, and its retention options."""
    base, *options = scheme.split(",")
    layers, rest = [base] * LAYERS, []
    for option in options:
        named = re.fullmatch(r"layer\.(\d+)(?:-(\d+))?=(.+)", option)
        if not named:
            rest.append(option)
            continue
        first = int(named[1])
        for layer in range(first, int(named[2] or first) + 1):
            layers[layer] = named[3]
    return layers, rest


def test_the_target_holds_and_the_text_says_what_was_chosen(budget):
    run, found = budget(2.7)
    chosen = found["chosen"]
    layers, rest = layers_of(chosen["scheme"])
    assert rest == ["window=32"]
    assert [layer["scheme"] for layer in found["layers"]] == layers
    assert len(set(layers)) > 1
    bits = [LADDER[name] for name in layers]
    assert sum(bits) / LAYERS == pytest.approx(chosen["bits"]) and chosen["bits"] <= 2.7
    said = lowkv("schemes", chosen["scheme"])
    assert said.code == 0 and said.out.splitlines()[0].startswith(chosen["scheme"]), said.both

    # The layer that loses most gets most, and every layer was measured.
    assert found["positions"] == TOKENS - SKIP - 1 and found["skip"] == SKIP
    losses = [layer["sensitivity"] for layer in found["layers"]]
    assert min(losses) > 0 and all(layer["packed"] for layer in found["layers"])
    assert bits[losses.index(max(losses))] == max(bits)
    ratios = [rung["ratio"] for rung in found["ladder"]]
    assert ratios[0] == 1 and ratios == sorted(ratios, reverse=True) and ratios[-1] < 0.3

    # It was measured on other text, beside the uniform rungs around it.
    verified = found["verification"]
    below, choice, above = verified["rows"]
    assert verified["other_text"] and (below["scheme"], above["scheme"]) == (
        "lowkv2,window=32", "lowkv2.8,window=32")
    assert choice["chosen"] and choice["scheme"] == chosen["scheme"]
    saved = verified["saved_against_below"]
    assert saved["mean_kld"] == pytest.approx(below["mean_kld"] - choice["mean_kld"])
    better = saved["mean_kld"] > 2 * saved["error"]
    assert found["recommended"] == (choice if better else below)["scheme"]
    assert run.out.splitlines()[-1] == found["recommended"]
    assert ("use it" in run.out) == (not better)


def test_more_bits_never_lower_a_layer(budget):
    before = None
    for target in (2.3125, 2.6, 3.0, 4.0, 4.28125):
        _, found = budget(target)
        names, _ = layers_of(found["chosen"]["scheme"])
        bits = [layer["bits"] for layer in found["layers"]]
        assert bits == pytest.approx([LADDER[name] for name in names])
        expected = found["chosen"]["expected_kld"]
        assert found["chosen"]["bits"] <= target + 1e-9
        if before:
            assert all(new >= old for new, old in zip(bits, before[0], strict=True)) and expected <= before[1]
        before = bits, expected
        if target in (2.3125, 4.28125):
            name = "lowkv2" if target < 3 else "lowkv4"
            assert found["chosen"]["scheme"] == found["recommended"] == f"{name},window=32"


def test_quiet_prints_a_scheme_alone(budget):
    run, found = budget(4.9, "--quiet", "--ladder", "kivi2,k=channel-3-g32+v=token-3-g32,exact",
                        retention=("--window", 64, "--sinks", 0))
    assert run.out == found["recommended"] + "\n"
    assert lowkv("schemes", run.out.strip()).code == 0
    assert found["chosen"]["bits"] <= 4.9 and found["ladder"][2]["ratio"] == 0
    assert "window=64,sinks=0" in found["chosen"]["scheme"]


def test_a_short_text_is_measured_and_verified_alike(budget, folder):
    short = write_text(folder / "short.txt", TOKENS + 10)
    run, found = budget(2.7, read=short)
    assert not found["verification"]["other_text"]
    run.said("the very text that the choice was made on")


@pytest.mark.parametrize("args, words", [
    (("--target-bits", 2.2), "from 2.2813 bits (lowkv2 for all layers) to 4.2812 (lowkv4)"),
    (("--target-bits", 4.4), "from 2.2813 bits (lowkv2 for all layers) to 4.2812 (lowkv4)"),
    ((), "--target-bits is required"),
    (("--target-bits", 3, "--ladder", "lowkv2"), "two schemes or more"),
    (("--target-bits", 3, "--ladder", "lowkv4,lowkv2"), "must ascend in bits: in layer 0, lowkv4"),
    (("--target-bits", 3, "--ladder", "exact,lowkv2"), "lowest rung is exact"),
    (("--target-bits", 3, "--ladder", "lowkv2,lowkv5"), "lowkv2.8"),
    (("--target-bits", 3, "--ladder", "lowkv2,lowkv4+window=32"), "--window"),
    (("--target-bits", 3, "--ladder", "lowkv2,lowkv4+layer.0=kivi2"), "treat layers differently"),
    (("--target-bits", 3, "--flush", 33), "multiple of 32"),
    (("--target-bits", 3, "--tokens", 500), "513 tokens are needed"),
    (("--target-bits", 3, "--tokens", 2000), "has 1,100 tokens; --tokens 2,000 were asked for"),
    (("--target-bits", 3, "--window", 2048), "has 1,100 tokens; 2,433 tokens are needed"),
])
def test_wrong_arguments_say_what_is_right(model, text, args, words):
    run = lowkv("budget", "-m", model, "-f", text, *args)
    assert run.code in (1, 2) and not run.out and words in run.err, run.both


def test_sliding_windows_are_served(folder, text):
    gemma = models.gemma2(folder / "gemma2.gguf")
    run = lowkv("budget", "-m", gemma, "-f", text, "--target-bits", 2.6, "-t", 1, "-n", TOKENS,
                "--quiet", *RETENTION)
    assert run.code == 0 and lowkv("schemes", run.out.strip()).code == 0, run.both


def test_of_models_with_recurrent_layers_those_that_attend_are_measured(folder, text):
    lfm2 = models.lfm2(folder / "lfm2.gguf")
    run = lowkv("budget", "-m", lfm2, "-f", text, "--target-bits", 3)
    assert run.code == 0 and run.out.count("keeps no keys and values") == 2, run.both
    assert re.search(r"\| 1 +\| +0\.0\d+ \|.*lowkv", run.out), run.both
