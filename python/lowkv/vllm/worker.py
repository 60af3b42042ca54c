"""vLLM's CPU worker, which knows what an attention backend is not told: all layers, and the memory for the cache."""

from __future__ import annotations

import math

from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.cpu_worker import CPUWorker

from lowkv._core import Error
from lowkv.vllm import settings
from lowkv.vllm.backend import Impl

logger = init_logger("vllm.lowkv")  # vLLM shows loggers below its own
_MIB = 1 << 20


class Worker(CPUWorker):
    """Refuses models with other layers than lowkv's, keeps memory for what lies beside pages, and says what fits."""

    def load_model(self, *args, **kwargs) -> None:
        super().load_model(*args, **kwargs)
        for name, layer in self.vllm_config.compilation_config.static_forward_context.items():
            # Only the plain class: others change what a step's metadata mean. Layers of experts are in this list, too.
            if type(layer) is not Attention and hasattr(layer, "get_kv_cache_spec"):
                raise Error(f"lowkv in vLLM: layer {name} is {type(layer).__name__}, which is not served; unset "
                            f"{settings.VARIABLE}")
        for impl in self._impls().values():
            impl.spare = self.scheduler_config.max_num_seqs

    def determine_available_memory(self) -> int:
        """Less what windows need at most, unless the cache's size was named: that is then vLLM's pages alone."""
        available = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes is not None:
            return available
        beside = self._most_beside()
        if beside >= available:
            raise Error(f"lowkv in vLLM: exact rows of {self.scheduler_config.max_num_seqs} requests may take "
                        f"{beside // _MIB} MiB, and {available // _MIB} MiB are left for the cache; lower "
                        "--max-num-seqs, or window= in the scheme")
        return available - beside

    def initialize_from_config(self, kv_cache_config) -> None:
        super().initialize_from_config(kv_cache_config)
        if self.rank == 0:
            self._say_what_fits(kv_cache_config)

    def lowkv_statistics(self) -> dict[str, int]:
        """What lies beside the pages of all layers, and what was done; for `LLM.collective_rpc("lowkv_statistics")`."""
        total: dict[str, int] = {}
        for impl in self._impls().values():
            if impl.rows is None:
                continue
            stats = impl.rows.stats
            for name in ("exact_pages", "exact_bytes", "most_exact_pages", "sink_bytes", "packed", "reopened",
                         "evicted", "replaced"):
                total[name] = total.get(name, 0) + getattr(stats, name)
        return total

    def _impls(self) -> dict[str, Impl]:
        layers = self.vllm_config.compilation_config.static_forward_context
        return {name: layer.impl for name, layer in layers.items() if isinstance(getattr(layer, "impl", None), Impl)}

    def _stock_bytes(self) -> list[int]:
        """Of one token in each layer, in the model's own dtype."""
        item = self.model_config.dtype.itemsize
        return [2 * impl.num_kv_heads * impl.head_size * item for impl in self._impls().values()]

    def _most_beside(self) -> int:
        """Exact rows of as many requests as may run, each with its window and a page that is being filled, and of as
        many pages of requests that have ended. Those of a long prompt's step come on top, in one layer at a time."""
        scheme = settings.scheme()
        if scheme.exact(0):
            return 0  # vLLM's pages are exact themselves
        tokens = settings.PAGE_TOKENS
        pages = 2 + math.ceil(scheme.retention(0, False).window / tokens)
        return self.scheduler_config.max_num_seqs * pages * tokens * sum(self._stock_bytes())

    def _say_what_fits(self, kv_cache_config) -> None:
        item, stock = self.model_config.dtype.itemsize, sum(self._stock_bytes())
        packed = sum(impl.num_kv_heads * settings.cell_bytes(impl.num_kv_heads, impl.head_size, self.model_config.dtype)
                     for impl in self._impls().values())
        groups = kv_cache_config.kv_cache_groups
        tokens = kv_cache_config.num_blocks // len(groups) * min(group.kv_cache_spec.block_size for group in groups)
        logger.info("lowkv: scheme %s, %d tokens fit: %.2f times as many as in %s; exact rows beside them take %.1f "
                    "MiB a request, at most %d MiB", settings.scheme(), tokens, stock / packed,
                    {2: "16 bits", 4: "32 bits"}[item],
                    self._most_beside() / self.scheduler_config.max_num_seqs / _MIB, self._most_beside() // _MIB)
