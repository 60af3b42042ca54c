"""llama.cpp's "KV buffer size", which --fit and people plan with, against what the plug-in holds
when the context is full."""

import re

import pytest
from logits import CONTEXT, random_text
from plugin_models import write_model
from plugin_tools import tool
from test_calibrate import lowkv

MIB = 1 << 20
INT8 = "int8,window=32,sinks=0"
# How much more may be announced than is held: the window's blocks are rounded up. Plain f16 is known
# to the byte, and llama.cpp prints two decimals.
SLACK = 1.25

# model, options of the tool, scheme
CASES = {
    "packed": ("llama", [], INT8),
    "two caches": ("gemma2", [], INT8),
    "without flash attention": ("llama", ["-fa", "off"], INT8),
    "head_dim no multiple of 16": ("llama-40", [], INT8),
    "head_dim 320": ("llama-320", [], INT8),
    "keys without values": ("deepseek2", [], INT8),
    "keys and values of two widths": ("deepseek2-old", [], INT8),
    "calibrated": ("llama", [], "kvquant3"),
}

# What llama.cpp says only after it has asked for the size: the plug-in puts it right in a line of its own.
NOT_TOLD_IN_TIME = {"without flash attention", "head_dim no multiple of 16"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return random_text(tmp_path_factory.mktemp("text") / "random.txt")


def sizes(case, model, text, options, scheme, env):
    """Bytes announced, bytes held, and those of the block that a context shift would keep unquantized."""
    run = tool("llama-perplexity", "-f", text, "-c", CONTEXT, "-b", CONTEXT, "-ub", 64, "--chunks", 1,
               "-v", *options, model=model, scheme=scheme, env={"LOWKV_VERBOSE": "1", **env})
    assert run.code == 0, run.both[-3000:]
    announced = sum(map(float, re.findall(r"LOWKV KV buffer size = *([\d.]+) MiB", run.both)))
    corrected = re.findall(r"lowkv: the layers that stay f16 take ([\d.]+) MiB, more than", run.both)
    assert bool(corrected) == (case in NOT_TOLD_IN_TIME)
    if corrected:
        announced = sum(map(float, corrected))
    freed = re.findall(r"cache freed: .*bytes packed (\d+), exact (\d+)", run.both)
    assert announced and freed, run.both[-3000:]
    shifted = 128 * sum(map(int, re.findall(r"lowkv: active: .* layers?, (\d+) -> \d+ bytes per token", run.both)))
    return announced * MIB, sum(int(packed) + int(exact) for packed, exact in freed), shifted


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_is_told_what_the_cache_takes(case, text, tmp_path):
    name, options, scheme = CASES[case]
    model, env = write_model(name, tmp_path / f"{name}.gguf"), {}
    if scheme == "kvquant3":
        env["LOWKV_CALIBRATION"] = str(tmp_path / "calibration.safetensors")
        made = lowkv("calibrate", "-m", model, "--text", text, "--scheme", scheme, "--tokens", CONTEXT,
                     "--context", CONTEXT, "-o", env["LOWKV_CALIBRATION"])
        assert made.code == 0, made.both
    announced, held, shifted = sizes(case, model, text, options, scheme, env)
    rounding = 0.005 * MIB * 2
    assert held - rounding <= announced <= held * SLACK + shifted + rounding
