"""vLLM's hooks of an attention backend. The rows themselves, in vLLM's pages and beside them, and attention to them
are the core's (lowkv._core.PagedLayer)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from lowkv import saturation
from lowkv._core import Error, PagedLayer, PagedStep
from lowkv.vllm import settings

logger = init_logger("vllm.lowkv")


@dataclass
class Metadata:
    """Of a step, for all layers of a builder."""

    tokens: int
    step: PagedStep


class Builder(AttentionMetadataBuilder[Metadata]):
    """Makes a step's metadata, once for all layers with the same pages."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        settings.use(vllm_config)  # again: vLLM remembers the backend that it chose for another engine
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        facts = common_attn_metadata
        if facts.causal is not True:
            raise Error("lowkv in vLLM: a step whose attention isn't causal")
        requests = facts.num_reqs
        step = PagedStep(facts.query_start_loc_cpu[: requests + 1], facts.seq_lens[:requests],
                         facts.block_table_tensor, self.kv_cache_spec.block_size)
        return Metadata(facts.num_actual_tokens, step)


class Backend(AttentionBackend):
    """Named as vLLM's own for the CPU: a name must be one that vLLM has."""

    layer: ClassVar[int] = 0  # whose scheme says how large pages are
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(settings.PAGE_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls):
        return (KVCacheLayout.LBHNC,)  # a page is one run of bytes

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec):
        """Pages of bytes, as many as lowkv's take. vLLM asks for other block sizes, too, and again for what it got."""
        if spec.state_content_bytes is not None:
            return spec
        if spec.head_size_v != spec.head_size:
            raise Error(f"lowkv in vLLM: keys of {spec.head_size} channels and values of {spec.head_size_v} are not "
                        "served")
        cell = settings.cell_bytes(settings.used(), cls.layer, spec.num_kv_heads, spec.head_size, spec.dtype)
        return replace(spec, dtype=torch.uint8, state_content_bytes=cell)

    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return Builder


@functools.cache
def backend_of(layer: int) -> type[Backend]:
    """vLLM asks a class for a page's size, and doesn't say of which layer."""
    return type(Backend.__name__, (Backend,), {"layer": layer, "__module__": __name__})


class Impl(AttentionImpl[Metadata]):
    """One layer's attention."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
                 kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
                 kv_sharing_target_layer_name=None, sinks=None, **extra):
        wrong = [what for what, asked in (
            (f"{attn_type} attention", attn_type != AttentionType.DECODER),
            (f"the cache of layer {kv_sharing_target_layer_name}", kv_sharing_target_layer_name is not None),
            *((name, value is not None) for name, value in extra.items()),
        ) if asked]
        if wrong:
            raise Error(f"lowkv in vLLM: a layer with {' and '.join(wrong)} is not served")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads if num_kv_heads is not None else num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window, self.softcap = sliding_window, float(logits_soft_cap or 0.0)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks  # a parameter, which is loaded later
        self.spare = 0  # pages that may keep exact rows for nobody: the worker knows how many requests may wait
        self.rows: PagedLayer | None = None
        self._pages: torch.Tensor | None = None

    def _rows(self, layer, pages: torch.Tensor, dtype: torch.dtype) -> PagedLayer:
        """What lies in and beside the pages that vLLM has given this layer; it may give others, after a sleep."""
        if self.rows is None or self._pages is not pages:
            index = extract_layer_index(layer.layer_name)
            plan = settings.plan(settings.used(), index, self.num_kv_heads, self.head_size, dtype)
            retention = settings.used().retention(index, self.sliding_window is not None)
            self.rows = PagedLayer(settings.store(), plan, retention, self.sliding_window or 0, pages.shape[2], pages,
                                   self.spare, settings.whole())
            self._pages = pages
        return self.rows

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        self._rows(layer, kv_cache, key.dtype).write(key, value, slot_mapping)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                output_block_scale=None):
        if attn_metadata is None:  # a profiling run
            return output
        if output_scale is not None or output_block_scale is not None:
            raise Error("lowkv in vLLM: attention with a quantized output is not served")
        tokens = attn_metadata.tokens
        attended = torch.empty(tokens, self.num_heads, self.head_size, dtype=torch.float32)
        logits = None if self.sinks is None else self.sinks.detach().float().contiguous()
        self._rows(layer, kv_cache, key.dtype).attend(attn_metadata.step, query[:tokens].float(), attended, self.scale,
                                                      self.softcap, torch.get_num_threads(), self.alibi_slopes, logits)
        saturation.report(settings.store(), logger)
        output[:tokens].copy_(attended.view_as(output[:tokens]))
        return output
