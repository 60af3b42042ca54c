"""What is refused, and how: before a model is read. No engine is started here."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

os.environ["LOWKV_SCHEME"] = "lowkv2.8"

from lowkv import Error  # noqa: E402
from lowkv.vllm import settings  # noqa: E402


@pytest.fixture
def environment(monkeypatch):
    """Sets LOWKV_SCHEME."""
    def set_scheme(text):
        monkeypatch.setenv("LOWKV_SCHEME", text)
        settings.scheme.cache_clear()
    yield set_scheme
    settings.scheme.cache_clear()


@pytest.mark.parametrize("text,words", [
    ("lowkv5", r"Schemes: exact, lowkv1\.5, .*kvarn2$"),
    ("skvq-k2v2", "codecs of a token's row of all heads"),
    ("kivi2,layer.0=kivi4", "schemes of single layers are not served in vLLM"),
    ("kivi2,flush=128", "flush= are not served"),
])
def test_schemes(environment, text, words):
    environment(text)
    with pytest.raises(Error, match=words) as caught:
        settings.scheme()
    assert str(caught.value).startswith(f"LOWKV_SCHEME={text}: ")


def config(**changed):
    facts = {"cache_dtype": "auto", "block_size": 128, "kv_transfer_config": None, "speculative_config": None,
             "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "use_mla": False,
             "is_encoder_decoder": False, "architecture": "LlamaForCausalLM", "head_size": 64,
             "dtype": torch.bfloat16, **changed}
    space = SimpleNamespace(**facts)
    space.get_num_kv_heads, space.get_head_size = (lambda parallel: 2), (lambda: facts["head_size"])
    return SimpleNamespace(cache_config=space, parallel_config=space, model_config=space,
                           kv_transfer_config=space.kv_transfer_config, speculative_config=space.speculative_config)


@pytest.mark.parametrize("changed,words", [
    ({}, None),
    ({"cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    ({"block_size": 64}, "--block-size 64; a multiple of 128"),
    ({"block_size": 256}, None),
    ({"kv_transfer_config": object()}, "KV connectors"),
    ({"speculative_config": SimpleNamespace(method="eagle")}, "speculative decoding by eagle is not served; by ngram"),
    ({"speculative_config": SimpleNamespace(method="ngram")}, None),
    ({"decode_context_parallel_size": 2}, "context parallelism"),
    ({"use_mla": True}, "LlamaForCausalLM has multi-head latent attention"),
    ({"is_encoder_decoder": True}, "an encoder and cross-attention"),
    ({"head_size": 72}, "head_dim 72"),
    ({"dtype": torch.float64}, "a model of torch.float64"),
])
def test_engines(changed, words):
    if words is None:
        return settings.require_config(config(**changed))
    with pytest.raises(Error, match=words):
        settings.require_config(config(**changed))


@pytest.mark.parametrize("changed,words", [
    ({}, None),
    ({"attn_type": "encoder_only"}, "encoder_only attention"),
    ({"attn_type": "encoder_decoder"}, "encoder_decoder attention"),
    ({"use_mla": True}, "MLA"),
    ({"has_sink": True, "has_sliding_window": True}, "attention sinks"),
    ({"kv_cache_dtype": "fp8"}, "a cache of fp8"),
])
def test_layers(changed, words):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    facts = AttentionSelectorConfig(**{"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto",
                                       "block_size": 128, **changed})
    if words is None:
        return settings.require_layer(facts)
    with pytest.raises(Error, match=re.escape(words)):
        settings.require_layer(facts)


def test_versions():
    settings.require_version("0.32.0+cpu")
    with pytest.raises(Error, match=r"vLLM 0\.33\.1: this lowkv serves vLLM 0\.32\.0 only"):
        settings.require_version("0.33.1")


def platform_of(**environment):
    """vLLM's platform in a fresh process, or what it says."""
    names = ("LOWKV_SCHEME", "VLLM_TARGET_DEVICE", "VLLM_PLUGINS")
    program = ("from vllm.plugins import load_general_plugins; load_general_plugins()\n"
               "from vllm.platforms import current_platform; print(type(current_platform).__module__)")
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=120,
                          env={**{k: v for k, v in os.environ.items() if k not in names}, **environment})
    return (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]


def test_only_where_it_is_asked_for():
    assert platform_of() == "vllm.platforms.cpu"
    assert platform_of(LOWKV_SCHEME="lowkv2.8") == "lowkv.vllm.platform"
    assert "VLLM_TARGET_DEVICE=cpu" in platform_of(LOWKV_SCHEME="lowkv2.8", VLLM_TARGET_DEVICE="cpu")
