"""Logits of tiny random models under the plug-in, against stock llama.cpp's own f16 cache."""

import numpy as np
import plugin_models as models
import pytest
from logits import divergence, log_probabilities, random_text
from plugin_tools import assert_same_text, tool

CASES = {
    "llama-64": models.llama,
    "llama-80": lambda path: models.llama(path, head_dim=80),
    "llama-96": lambda path: models.llama(path, head_dim=96),
    "llama-128": lambda path: models.llama(path, head_dim=128, heads=8, kv_heads=2),
    "llama-256": lambda path: models.llama(path, head_dim=256),
    "gemma2-96": models.gemma2,
    "bloom-64": models.bloom,
    "lfm2-64": models.lfm2,
    "nemotron_h-128": models.nemotron_h,
    "qwen3next-256": models.qwen3next,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return random_text(tmp_path_factory.mktemp("text") / "random.txt")


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory, text):
    """A model, and stock llama.cpp's log probabilities."""
    folder = tmp_path_factory.mktemp(request.param)
    model = CASES[request.param](folder / "model.gguf")
    return model, log_probabilities(folder, text, model, None, 96)[0]


@pytest.mark.parametrize("batch", [8, 96])  # the decode kernels, and the tiles for long batches
def test_exact_gives_stock_logits(case, text, batch, tmp_path):
    model, base = case
    ours, run = log_probabilities(tmp_path, text, model, "exact", batch)
    assert "NOT active" not in run.both
    run.said(r"lowkv: active: scheme exact")
    # llama.cpp adds values up in f16, we in f32.
    assert divergence(base, ours).mean() < 2e-5
    assert divergence(base, ours).max() < 1e-3
    assert abs(base - ours).max() < 0.2


@pytest.mark.parametrize("scheme, smaller", [("kivi2", r"5\.\d"), ("lowkv2", r"[67]\.\d")])
def test_two_bits_are_really_used(case, text, tmp_path, scheme, smaller):
    model, base = case
    ours, run = log_probabilities(tmp_path, text, model, scheme + ",window=32,sinks=0", 96)
    run.said(rf"active: scheme {scheme}.*\({smaller}x smaller\)")
    assert divergence(base, ours).mean() > 1e-4


def test_unsupported_head_size_stays_f16_and_right(tmp_path, text):
    model = models.llama(tmp_path / "llama-40.gguf", head_dim=40)
    base, _ = log_probabilities(tmp_path, text, model, None, 96)
    ours, run = log_probabilities(tmp_path, text, model, "kivi2", 96)
    run.said(r"lowkv: NOT active for 2 of 2 layers.*head_dim 40")
    assert np.array_equal(base, ours)


def test_layer_overrides(tmp_path):
    model = models.llama(tmp_path / "model.gguf")
    run = tool("llama-completion", "-p", "abc", "-n", 4, "-no-cnv", model=model,
               scheme="kivi2,layer.1=exact/token-8-g64")
    line = run.said(r"active: .* 2 layers, 1024 -> (\d+) bytes per token")
    # Layer 0: 3 bits of 2 x 128 elements. Layer 1: 16 bits of keys, 8.5 of values.
    assert int(line.group(1)) == 96 + 256 + 136


def test_hybrid_state_is_plain_memory(tmp_path):
    model = models.lfm2(tmp_path / "lfm2.gguf")
    texts = {scheme: tool("llama-completion", "-p", "hello world", "-n", 90, "--temp", "0",
                          "-no-cnv", "--ignore-eos", model=model, scheme=scheme).out
             for scheme in (None, "exact")}
    assert_same_text(texts[None], texts["exact"], at_least=60)
