"""Layers that read another layer's cache (Gemma 3n, Gemma 4), and that a step attends to its own
tokens exactly, whoever reads them."""

import subprocess

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


@pytest.mark.parametrize("options", [(), ("--no-op-offload",)])
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_they_are_packed_or_the_plugin_says_that_it_is_not_active(name, options, text, tmp_path):
    """With llama.cpp's default, -fa auto, which gives flash attention up for all layers where one
    layer's is not on the cache's device."""
    model = write_model(name, tmp_path / f"{name}.gguf")
    exact, _ = log_probabilities(tmp_path, text, model, "exact", 96, "--chunks", 1, *options)
    packed, run = log_probabilities(tmp_path, text, model, TWO_BITS, 96, "--chunks", 1, *options)
    if "NOT active" in run.both:
        assert "lowkv: active" not in run.both
    else:
        run.said(r"lowkv: active")
        assert not np.array_equal(exact, packed), "said to be active, but nothing is packed"
        assert cosine(exact, packed).mean() > 0.9


# llama.cpp's names for the norm of a layer's queries are how their attention is kept on the device.
OTHER_NAMES = """
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
struct ggml_tensor * ggml_set_name(struct ggml_tensor * tensor, const char * name);
struct ggml_tensor * ggml_format_name(struct ggml_tensor * tensor, const char * format, ...) {
    char name[64];
    va_list values;
    va_start(values, format);
    vsnprintf(name, sizeof name, format, values);
    va_end(values);
    if (strncmp(name, "Qcur_normed", 11) == 0) name[0] = 'q';
    return ggml_set_name(tensor, name);
}
"""


def test_under_other_tensor_names_they_stay_f16_by_name_or_are_read_as_copies(text, tmp_path):
    source, library = tmp_path / "names.c", tmp_path / "names.so"
    source.write_text(OTHER_NAMES)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    model = write_model("gemma3n", tmp_path / "gemma3n.gguf")

    def run(scheme, *options, **env):
        return log_probabilities(tmp_path, text, model, scheme, 96, "--chunks", 1, *options, env=env)

    _, given_up = run(TWO_BITS, LD_PRELOAD=str(library))
    given_up.said(r"lowkv: NOT active for 16 of 16 layers, which stay f16: it runs without flash attention "
                  r"\(drop -fa off, or say -fa on where llama.cpp gave it up\)")
    assert "lowkv: active" not in given_up.both
    on_copies, insisted = run(TWO_BITS, "-fa", "on", LD_PRELOAD=str(library))
    insisted.said(r"lowkv: active")
    assert cosine(run(TWO_BITS, "-fa", "on")[0], on_copies).mean() > 0.999
