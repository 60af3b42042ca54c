"""Layers that read another layer's cache (Gemma 3n, Gemma 4), and that a step attends to its own
tokens exactly, whoever reads them."""

import numpy as np
import pytest
from logits import CONTEXT, cosine, log_probabilities, random_text
from plugin_models import write_model

TWO_BITS = "kivi2,window=32,sinks=0"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return random_text(tmp_path_factory.mktemp("text") / "random.txt")


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "gemma3n", "gemma4"])
def test_a_step_attends_to_its_own_tokens_exactly(name, text, tmp_path):
    model = write_model(name, tmp_path / f"{name}.gguf")

    def whole_context(scheme):
        return log_probabilities(tmp_path, text, model, scheme, CONTEXT, "--chunks", 1, "-fa", "on")[0]

    assert np.array_equal(whole_context("exact"), whole_context(TWO_BITS))


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_they_are_packed_or_the_plugin_says_that_it_is_not_active(name, text, tmp_path):
    """With llama.cpp's default, -fa auto, which gives flash attention up for all layers where one
    layer's is not on the cache's device."""
    model = write_model(name, tmp_path / f"{name}.gguf")
    exact, _ = log_probabilities(tmp_path, text, model, "exact", 96, "--chunks", 1)
    packed, run = log_probabilities(tmp_path, text, model, TWO_BITS, 96, "--chunks", 1)
    if "NOT active" in run.both:
        assert "lowkv: active" not in run.both
    else:
        run.said(r"lowkv: active")
        assert not np.array_equal(exact, packed), "said to be active, but nothing is packed"
        assert cosine(exact, packed).mean() > 0.9
