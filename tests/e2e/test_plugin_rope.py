"""Schemes that store keys before RoPE, on models whose RoPE can't be undone or isn't there."""

import numpy as np
import pytest
from logits import divergence, log_probabilities, random_text
from plugin_models import write_model

SCHEME = "k=token-4-row{},v=token-4-row,window=32,sinks=0"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return random_text(tmp_path_factory.mktemp("text") / "random.txt")


def run_model(name, scheme, text, folder):
    model = write_model(name, folder / f"{name}.gguf")
    return log_probabilities(folder, text, model, scheme, 96, "--chunks", 1)


@pytest.mark.parametrize("name, why", [
    ("hunyuan-moe", r"its keys are changed after their rotary embedding.*without pre"),
    ("qwen2vl", r"M-RoPE.*without pre"),
    ("qwen3vl", r"interleaved M-RoPE.*without pre"),
    ("qwen35", r"interleaved M-RoPE.*without pre")])
def test_a_rope_that_cannot_be_undone_is_refused_by_name(name, why, text, tmp_path):
    stock, _ = run_model(name, None, text, tmp_path)
    ours, run = run_model(name, SCHEME.format("-pre"), text, tmp_path)
    run.said(r"lowkv: NOT active for (\d) of \1 layers, which stay f16: .*" + why)
    assert "lowkv: active" not in run.both
    assert np.array_equal(stock, ours)
    _, run = run_model(name, SCHEME.format(""), text, tmp_path)  # only pre is refused
    run.said(r"lowkv: active")
    assert "NOT active" not in run.both


@pytest.mark.parametrize("name", ["gpt2", "bloom", "jamba", "granitehybrid", "nemotron_h"])
def test_keys_that_are_never_rotated_are_the_same_before(name, text, tmp_path):
    before, run = run_model(name, SCHEME.format("-pre"), text, tmp_path)
    run.said(r"lowkv: active")
    assert "NOT active" not in run.both
    after, _ = run_model(name, SCHEME.format(""), text, tmp_path)
    assert np.array_equal(before, after)


@pytest.mark.parametrize("name", ["llama", "phi3", "stablelm", "mistral3", "qwen3", "gemma3", "smollm3", "exaone4",
                                  "afmoe", "glm4moe", "minimax-m2", "qwen3next"])
def test_a_rope_that_can_be_undone_is(name, text, tmp_path):
    before, run = run_model(name, SCHEME.format("-pre"), text, tmp_path)
    run.said(r"lowkv: active")
    assert "NOT active" not in run.both
    after, _ = run_model(name, SCHEME.format(""), text, tmp_path)
    assert not np.array_equal(before, after)
    exact, _ = run_model(name, "exact", text, tmp_path)
    assert divergence(exact, before).mean() < 2 * divergence(exact, after).mean()
