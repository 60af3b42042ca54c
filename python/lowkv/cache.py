"""The cache that is passed to a transformers model as `cache`, or `past_key_values` before transformers 5.24."""

from __future__ import annotations

import copy
import os
import weakref
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from lowkv import heap, saving
from lowkv._core import Error, Store, default_scheme, parse_scheme
from lowkv.budget import Budget
from lowkv.install import ATTENTION, install, layer_types, sliding_windows
from lowkv.layer import Layer
from lowkv.steps import Steps, watch


class Cache(Steps, transformers.Cache):
    """A packed cache for one model: `model.generate(..., cache=Cache.from_model(model))`.

    scheme: its text form; sliding_windows: for each layer the window in tokens, or None; device: where the rows lie
    and attention to them runs, 'cpu', 'opencl' or 'opencl:NAME' (words of a device's name), 'cuda' or 'cuda:NUMBER'
    (with the package lowkv-cuda), or, None, what LOWKV_DEVICE in the environment says, or else the CPU. The model is
    on the CPU, or on that CUDA device. budget: bytes that the cache may hold, as "24MiB". Tokens stay unquantized while
    they fit; then the oldest are packed with the more bits the newer they are, in the end by the scheme. On the CPU.
    """

    def __init__(self, scheme: str, sliding_windows: list[int | None], device: str | None = None,
                 budget: str | int | None = None):
        if not isinstance(scheme, str):
            raise Error(f"scheme must be a str such as {default_scheme!r}, not {type(scheme).__name__}")
        parsed = parse_scheme(scheme)
        parsed.require_layers(len(sliding_windows))
        heap.tune()
        self.scheme = str(parsed)
        self.model = None  # weak: a cache keeps no model alive
        self.memory = _store(device)
        self.budget = None if budget is None else Budget(budget, parsed, sliding_windows)
        if budget is not None and self.device != "cpu":
            raise Error(f"budget is for caches on the CPU, and this one is on {self.device}: leave it out, or give "
                        "device='cpu' with the model on the CPU")
        super().__init__(layers=[Layer(index, parsed, window, self.memory, self.budget)
                                 for index, window in enumerate(sliding_windows)])

    @classmethod
    def from_model(cls, model: PreTrainedModel, scheme: str = default_scheme, device: str | None = None,
                   budget: str | int | None = None) -> Cache:
        """An empty cache for `model`, which from here on calls lowkv's attention function: with other caches it
        computes what it did before. budget: as for Cache; device, too, but by default a CUDA model's. Raises
        lowkv.Error for a scheme or a model that is not served, or a device that is not there, and why."""
        windows, types = sliding_windows(model), layer_types(model)  # refuses what is no model
        if device is None and model.device.type == "cuda" and not os.environ.get("LOWKV_DEVICE"):
            device = str(model.device)
        cache = cls(scheme, windows, device, budget)
        if types is not None and not set(types) <= set(ATTENTION):
            from lowkv.states import layer_of  # which older transformers have nothing for

            cache.layers = [layer_of(*each) for each in zip(types, cache.layers, strict=True)]
            if cache.budget is not None:
                cache.budget.windows = [layer.sliding_window for layer in cache.attention_layers]
        install(model)
        watch(model)
        cache.model = weakref.ref(model)
        return cache

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """What a model's layer calls; see transformers.Cache. Raises Error after a step that failed, or where the
        model has more layers than the cache."""
        if layer_idx >= len(self.layers):
            raise Error(f"the model has a layer {layer_idx}, but this cache was made for one of {len(self.layers)} "
                        "layers; make it with Cache.from_model() of this model")
        if layer_idx == 0 and not self._in_step:
            self._require_even()
        self._require_step()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, *args, **kwargs):
        """What a layer with states asks for first; see transformers.Cache."""
        self._require_step()
        return super().get_conv_state(*args, **kwargs)

    @property
    def layers_with_states(self) -> list:
        """Those of a hybrid model: states are the model's own, and are not packed."""
        return [layer for layer in self.layers if hasattr(layer, "conv_states")]

    def _require_step(self) -> None:
        if not self._in_step and self.layers_with_states:
            raise Error("a hybrid model's states don't tell how many tokens they have seen: call the model that "
                        "Cache.from_model() was given, or else its layers in `with cache.step():`")

    def crop(self, *args, **kwargs) -> None:
        """Takes tokens back, in all layers or in none; see transformers.Cache."""
        with self.step():
            super().crop(*args, **kwargs)

    def batch_select_indices(self, indices) -> None:
        """Keeps these sequences of the batch, in this order, in all layers or in none. indices: a tensor, an array, a
        list or a slice."""
        numbers = torch.arange(max(self.attention_layers[0].batch_size, 0))  # -1: no rows yet
        if not len(numbers):
            return
        if isinstance(indices, tuple):
            indices = list(indices)
        indices = numbers[indices.cpu() if isinstance(indices, torch.Tensor) else indices].reshape(-1)
        selected = [layer.selected(indices) for layer in self._kept]
        for layer, what in zip(self._kept, selected, strict=True):
            layer.take(what)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Goes on with these beams; see batch_select_indices()."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Has each sequence of the batch `repeats` times; see batch_select_indices()."""
        self.batch_select_indices(torch.arange(max(self.attention_layers[0].batch_size, 0)).repeat_interleave(repeats))

    def fork(self) -> Cache:
        """A copy that shares all packed blocks: continue one prompt many times."""
        return copy.deepcopy(self)

    __copy__ = fork

    def __deepcopy__(self, memo) -> Cache:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__, _in_step=False)
        new.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        return new

    def __reduce_ex__(self, protocol):
        raise Error("a cache can't be pickled: save() writes it to a file, which load() reads")

    def save(self, path: str | Path) -> None:
        """Writes all rows, packed ones as they are, to a safetensors file that load() reads."""
        model = self.model() if self.model is not None else None
        self._require_even()
        if self.budget is not None:
            raise Error("save: a cache with a budget has tokens packed in several ways, and a file has one; make it "
                        "without budget=")
        if model is None:
            raise Error("save: the model that this cache was made for is gone, and the file must name it")
        saving.save(self, model, Path(path))

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, scheme: str | None = None,
             device: str | None = None) -> Cache:
        """The cache that save() wrote, on whichever device that was. Raises Error for a file of another model, of
        another scheme than `scheme` (if given), of another version of the format, or with damaged contents."""
        with saving.opened(Path(path), model, scheme) as (images, saved_scheme):
            cache = Cache.from_model.__func__(cls, model, saved_scheme, device)
            saving.restore(cache, images)
        return cache

    @property
    def device(self) -> str:
        """Where the rows lie and attention to them runs: 'cpu', 'cuda:NUMBER' or an OpenCL device's whole
        name."""
        return self.memory.device

    @property
    def exact_bytes(self) -> int:
        """Bytes of blocks of exact rows, room for more rows and those of forks included: a shared block counts once."""
        return self.memory.exact_bytes

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed blocks, those of forks included: a shared block counts once."""
        return self.memory.packed_bytes

    def activate_past_recording(self) -> None:
        """Announces guesses that crop() may take back: the newest 512 tokens stay exact, and nothing that a rolled
        back sliding window needs is dropped. transformers calls it for assisted decoding and prompt lookup."""
        for layer in self._kept:
            layer.activate_past_recording()

    def full(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, packed ones decoded, `[batch, kv_heads, tokens, head_dim]`: from the first
        token on, or from the first that a sliding window has kept."""
        return self.rows_of(layer).full()

    def rows_of(self, layer: int) -> Layer:
        """The layer, if it has keys and values."""
        if not isinstance(self.layers[layer], Layer):
            raise Error(f"layer {layer} of this model has no keys and values")
        return self.layers[layer]


def _store(device: str | None) -> Store:
    if device is None and os.environ.get("LOWKV_DEVICE"):
        try:
            return Store(os.environ["LOWKV_DEVICE"])
        except Error as error:
            raise Error(f"LOWKV_DEVICE in the environment: {error}") from None
    if device is not None and not isinstance(device, str):
        raise Error(f"device must be a str such as 'cpu' or 'opencl', not {type(device).__name__}")
    return Store("cpu" if device is None else device)
