"""vLLM's CPU worker, which knows what an attention backend is not told: all layers, and the memory for the cache."""

from __future__ import annotations

from collections import defaultdict

from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.worker.cpu_worker import CPUWorker

from lowkv._core import Error
from lowkv.vllm import VARIABLE, settings
from lowkv.vllm.backend import Impl, backend_of

logger = init_logger("vllm.lowkv")  # vLLM shows loggers below its own
_MIB = 1 << 20


class Worker(CPUWorker):
    """Refuses models with other layers than lowkv's, keeps memory for what lies beside pages, and says what fits."""

    def __init__(self, vllm_config, *args, **kwargs) -> None:
        settings.use(vllm_config)
        # Again: vLLM makes a connector of --kv-offloading-size after the platform has looked.
        settings.require_config(settings.used(), vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args, **kwargs) -> None:
        super().load_model(*args, **kwargs)
        for name, layer in self.vllm_config.compilation_config.static_forward_context.items():
            if not hasattr(layer, "get_kv_cache_spec"):
                continue  # experts
            # Only the plain class: others change what a step's metadata mean.
            wrong = layer if type(layer) is not Attention else layer.impl if not isinstance(layer.impl, Impl) else None
            if wrong is not None:
                raise Error(f"lowkv in vLLM: layer {name} has {type(wrong).__name__}, which is not served; "
                            f"unset {VARIABLE}")
            layer.attn_backend = backend_of(extract_layer_index(name))
            layer.impl.spare = self.scheduler_config.max_num_seqs

    def get_kv_cache_spec(self):
        """Raises Error for layers whose pages vLLM would fill up to the size of the largest (kv_cache_utils.py,
        unify_kv_cache_spec_page_size), since that size then is all that counts."""
        specs = super().get_kv_cache_spec()
        cells = defaultdict(set)
        for spec in specs.values():
            cells[spec.num_kv_heads, spec.head_size].add(spec.state_content_bytes)
        if max(map(len, cells.values()), default=1) > 1 and not UniformTypeKVCacheSpecs.is_uniform_type(specs):
            raise Error(f"lowkv in vLLM: scheme {settings.used()}: layers of different sizes are served in models "
                        "whose layers all have a sliding window or all have none; leave layer.A= out")
        return specs

    def determine_available_memory(self) -> int:
        """Less what windows need at most, and the sinks of as many pages as then fit, each of which may begin a
        request. Unless the cache's size was named: that is then vLLM's pages alone."""
        available = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes is not None:
            return available
        beside = self._most_beside()
        if beside >= available:
            raise Error(f"lowkv in vLLM: exact rows of {self.scheduler_config.max_num_seqs} requests may take "
                        f"{beside // _MIB} MiB, and {available // _MIB} MiB are left for the cache; lower "
                        "--max-num-seqs, or window= in the scheme")
        page, sinks = self._page_bytes(), self._sink_bytes()
        return (available - beside) * page // (page + sinks)

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
        return total | {"saturated_numbers": settings.store().saturated}

    def _impls(self) -> dict[str, Impl]:
        layers = self.vllm_config.compilation_config.static_forward_context
        return {name: layer.impl for name, layer in layers.items() if isinstance(getattr(layer, "impl", None), Impl)}

    def _stock_bytes(self) -> dict[int, int]:
        """Of one token in each layer, in the model's own dtype."""
        item = self.model_config.dtype.itemsize
        return {extract_layer_index(name): 2 * impl.num_kv_heads * impl.head_size * item
                for name, impl in self._impls().items()}

    def _most_beside(self) -> int:
        """Exact rows of as many requests as may run, each with its window and a page that is being filled, and of as
        many pages that have ended or begin a request. Those of a long prompt's step come on top, in one layer at a
        time."""
        scheme, tokens = settings.used(), self.cache_config.block_size
        pages = 1 + scheme.retention(0, True).most_unquantized_blocks(tokens)  # sinks lie apart
        # An exact scheme's pages are vLLM's alone.
        rows = sum(size for layer, size in self._stock_bytes().items() if not scheme.exact(layer))
        return self.scheduler_config.max_num_seqs * pages * tokens * rows

    def _page_bytes(self) -> int:
        """Of one page in all layers, in vLLM's memory."""
        return self.cache_config.block_size * sum(
            impl.num_kv_heads * settings.cell_bytes(settings.used(), extract_layer_index(name), impl.num_kv_heads,
                                                    impl.head_size, self.model_config.dtype)
            for name, impl in self._impls().items())

    def _sink_bytes(self) -> int:
        """Beside a page that begins a request, in all layers, for as long as the page is there."""
        if settings.whole():
            return 0  # they are in the page
        scheme, stock = settings.used(), self._stock_bytes()
        layers = ((extract_layer_index(name), impl) for name, impl in self._impls().items())
        return sum(scheme.retention(layer, False).sinks * stock[layer] for layer, impl in layers
                   if impl.sliding_window is None and not scheme.exact(layer))

    def _say_what_fits(self, kv_cache_config) -> None:
        dtype, stock = self.model_config.dtype, sum(self._stock_bytes().values())
        packed = self._page_bytes() // self.cache_config.block_size
        groups = kv_cache_config.kv_cache_groups
        tokens = kv_cache_config.num_blocks // len(groups) * min(group.kv_cache_spec.block_size for group in groups)
        logger.info("lowkv: scheme %s, %d tokens fit: %.2f times as many as in %s; exact rows beside them take %.1f "
                    "MiB a request, at most %d MiB, and sinks at most %d MiB", settings.used(), tokens, stock / packed,
                    {2: "16 bits", 4: "32 bits"}[dtype.itemsize],
                    self._most_beside() / self.scheduler_config.max_num_seqs / _MIB, self._most_beside() // _MIB,
                    kv_cache_config.num_blocks // len(groups) * self._sink_bytes() // _MIB)
