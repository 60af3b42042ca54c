"""The cache that is passed to a transformers model as `past_key_values`."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from lowkv import heap, saving
from lowkv._core import BlockMemory, Error, default_scheme, parse_scheme
from lowkv.install import install, sliding_windows
from lowkv.layer import Layer


class Cache(transformers.Cache):
    """A packed cache for one model: `model.generate(..., past_key_values=Cache.from_model(model))`.

    scheme: its text form; sliding_windows: for each layer the window in tokens, or None.
    """

    def __init__(self, scheme: str, sliding_windows: list[int | None]):
        if not isinstance(scheme, str):
            raise Error(f"scheme must be a str such as {default_scheme!r}, not {type(scheme).__name__}")
        parsed = parse_scheme(scheme)
        parsed.require_layers(len(sliding_windows))
        heap.tune()
        self.scheme = str(parsed)
        self.model = None  # weak: a cache keeps no model alive
        self._begun: int | None = None  # tokens held when a call of the model began that has not ended well
        self.memory = BlockMemory()
        super().__init__(layers=[Layer(index, parsed, window, self.memory)
                                 for index, window in enumerate(sliding_windows)])

    @classmethod
    def from_model(cls, model: PreTrainedModel, scheme: str = default_scheme) -> Cache:
        """An empty cache for `model`, which from here on calls lowkv's attention function: with other caches it
        computes what it did before. Raises lowkv.Error for a scheme or a model that is not served, and why."""
        cache = cls(scheme, sliding_windows(model))
        install(model)
        _watch(model)
        cache.model = weakref.ref(model)
        return cache

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """What a model's layer calls; see transformers.Cache. Raises Error after a step that failed, or where the
        model has more layers than the cache."""
        if layer_idx >= len(self.layers):
            raise Error(f"the model has a layer {layer_idx}, but this cache was made for one of {len(self.layers)} "
                        "layers; make it with Cache.from_model() of this model")
        if layer_idx == 0:
            self._require_whole()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, *args, **kwargs) -> None:
        """Takes tokens back; see transformers.Cache. Raises Error after a step that failed before its last layer's
        attention had ended."""
        self._require_even()
        super().crop(*args, **kwargs)
        self._begun = None

    def reset(self) -> None:
        """Forgets all tokens, and with them a step that failed."""
        super().reset()
        self._begun = None

    def _require_even(self) -> None:
        for layer in self.layers:
            layer.require_attended()
        lengths = {layer.length for layer in self.layers}
        if len(lengths) > 1:
            raise Error(f"the cache's layers hold different numbers of tokens, {min(lengths)} to {max(lengths)}: the "
                        "last step failed or was interrupted. Call reset(), or go on with a fork from before it")

    def _require_whole(self) -> None:
        self._require_even()
        length = self.get_seq_length()
        if self._begun is not None and self._begun != length:
            raise Error(f"the last step failed or was interrupted after it had taken the cache from {self._begun} to "
                        f"{length} tokens: take them back with crop({self._begun - length}), call reset(), or go on "
                        "with a fork from before it")

    def _begin(self) -> None:
        self._require_whole()
        self._begun = self.get_seq_length()

    def _end(self) -> None:
        self._begun = None

    def fork(self) -> Cache:
        """A copy that shares all packed blocks: continue one prompt many times."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo) -> Cache:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        return new

    def save(self, path: str | Path) -> None:
        """Writes all rows, packed ones as they are, to a safetensors file that load() reads."""
        model = self.model() if self.model is not None else None
        self._require_whole()
        if model is None:
            raise Error("save: the model that this cache was made for is gone, and the file must name it")
        saving.save(self, model, Path(path))

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, scheme: str | None = None) -> Cache:
        """The cache that save() wrote. Raises Error for a file of another model, of another scheme than `scheme`
        (if given), of another version of the format, or with damaged contents."""
        path = Path(path)
        metadata, tensors = saving.read(path, model, scheme)
        cache = Cache.from_model.__func__(cls, model, metadata["scheme"])
        saving.restore(cache, path, metadata, tensors)
        return cache

    @property
    def exact_bytes(self) -> int:
        """Bytes of rows that are still exact, spare room included."""
        return sum(layer.exact.nbytes for layer in self.layers if layer.exact is not None)

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed blocks, those of forks included: a shared block counts once."""
        return self.memory.bytes

    def activate_past_recording(self) -> None:
        """Announces guesses that crop() may take back: the newest 512 tokens stay exact, and nothing that a rolled
        back sliding window needs is dropped. transformers calls it for assisted decoding and prompt lookup."""
        for layer in self.layers:
            layer.activate_past_recording()

    def full(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, packed ones decoded, `[batch, kv_heads, tokens, head_dim]`: from the first
        token on, or from the first that a sliding window has kept."""
        return self.layers[layer].full()


# A cache sees the layers of a step, but not what comes after the last one's attention.


def _watch(model: PreTrainedModel) -> None:
    """Lets `model` tell its caches when a call begins and when it has ended without an error."""
    if _began not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_began, with_kwargs=True)
        model.register_forward_hook(_ended, with_kwargs=True)


def _began(model, args, kwargs) -> None:
    for cache in _caches(args, kwargs):
        cache._begin()


def _ended(model, args, kwargs, output) -> None:
    for cache in _caches(args, kwargs):
        cache._end()


def _caches(args, kwargs) -> list[Cache]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
