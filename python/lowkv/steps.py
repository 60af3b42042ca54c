"""Steps are transactions: what happens to a cache in one happens as a whole or not at all.

Each call of a model that a cache was made for is a step. For that it becomes an instance of a subclass of its class,
under the same name. Hooks would not do: torch calls none of them after a KeyboardInterrupt, and one of the user's own
may fail after ours."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from lowkv._core import Error
from lowkv.attention import refuse_unstored, refuse_weights
from lowkv.install import installed, uninstall
from lowkv.layer import Layer
from lowkv.masks import NAME, computed_by
from lowkv.names import cache_argument
from lowkv.tripwire import Bypassed


class Steps:
    """What has `layers` that go forward together."""

    layers: list  # of Layer, of States, and of what keeps nothing
    _in_step = False

    @property
    def attention_layers(self) -> list[Layer]:
        """Those that have rows: all, but for hybrid models."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    @property
    def _kept(self) -> list:
        return [layer for layer in self.layers if hasattr(layer, "begin")]

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """What happens to the cache in a `with` block of it happens as a whole, or, if an exception leaves the block,
        not at all. Each call of the model is a step; a step within a step is a part of it."""
        if self._in_step:
            yield
            return
        self._require_even()
        kept = self._kept  # a model may add layers
        begun = [layer.begin() for layer in kept]
        try:
            self._in_step = True
            with computed_by(NAME):
                yield
            self._require_even(Bypassed)
        except BaseException:
            for layer, what in zip(kept, begun, strict=True):
                layer.rollback(what)
            raise
        finally:
            self._in_step = False
        for layer in self._kept:  # what an interruption leaves open here, the next begin() commits
            layer.commit()

    def _require_even(self, kind: type[Error] = Error) -> None:
        """Raises Error after something else than a step has ended half-way; `kind` where rows were not attended to."""
        for layer in self.attention_layers:
            layer.require_attended(kind)
        lengths = {layer.length for layer in self.attention_layers}
        if len(lengths) > 1 and kind is Bypassed:
            raise Error(f"the model gave some of the cache's layers {min(lengths)} tokens, others {max(lengths)}; "
                        "lowkv serves models that give all the same")
        if len(lengths) > 1:
            raise Error(f"the cache's layers hold different numbers of tokens, {min(lengths)} to {max(lengths)}: the "
                        "last step failed or was interrupted. Call reset(), or go on with a fork from before it")


def watch(model: PreTrainedModel) -> None:
    """Makes every call of `model` a step of the caches among its arguments. Doing it again changes nothing."""
    if not isinstance(model, _Stepped):
        model.__class__ = _stepped(type(model))


def restore(model: PreTrainedModel) -> None:
    """Makes `model` again what it was before Cache.from_model(): its class and its attention. Its lowkv caches can't
    be used any more, until from_model() is called again. Nothing where the model is as it was."""
    uninstall(model)
    if isinstance(model, _Stepped):
        model.__class__ = type(model).__mro__[2]


class _Stepped:
    def __call__(self, *args, **kwargs):
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Steps)]
        if not caches and torch.compiler.is_dynamo_compiling():
            return super().__call__(*args, **kwargs)
        weights = kwargs.get("output_attentions", self.config.output_attentions)
        try:
            with contextlib.ExitStack() as steps:
                if weights and caches:  # which some models keep from their attention
                    refuse_weights()
                if isinstance(kwargs.get("cache"), Steps) and _argument(type(self)) != "cache":
                    raise Error("before 5.24 transformers takes a cache as past_key_values=, and would ignore cache=")
                if caches and kwargs.get("use_cache") is False:
                    raise Error("use_cache=False in a step with a lowkv cache: generate() then gives the whole text in "
                                "each step, and the cache would take all of it again; give use_cache=True (the "
                                "model's generation_config may say otherwise)")
                steps.enter_context(computed_by(NAME if caches else "eager" if weights else None))
                for cache in caches:
                    steps.enter_context(cache.step())
                before = [cache.get_seq_length() for cache in caches]
                output = super().__call__(*args, **kwargs)
                if any(cache.get_seq_length() == length for cache, length in zip(caches, before, strict=True)):
                    refuse_unstored(self)
                return output
        except Bypassed:  # with its own caches, it computes what it did
            uninstall(self)
            raise

    def generate_batch(self, *args, **kwargs):
        if not installed(self):
            return super().generate_batch(*args, **kwargs)
        # It asks for an attention implementation by its name, computes in a thread of its own, and has a cache of its
        # own. A twin with the same weights leaves this model as it is for other threads.
        weights = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        twin = copy.deepcopy(self, weights)
        restore(twin)
        return twin.generate_batch(*args, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        if installed(self):
            raise Error("continuous batching has a cache of its own: call lowkv.restore(model) first, or "
                        "model.generate_batch(), which does without")
        return super().init_continuous_batching(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        # By its own class: pickle would not find the subclass by its name.
        _, _, *state = super().__reduce_ex__(protocol)
        return _new, (type(self).__mro__[2],), *state


_argument = functools.cache(cache_argument)


def _keeping_caches(stock: Callable) -> Callable:
    @functools.wraps(stock)  # generate() looks at its arguments' names
    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = stock(self, *args, **kwargs)
        for name, cache in kwargs.items():
            # Phi-3 leaves the cache out where it changes to its long factors: all of the text is computed again.
            if isinstance(cache, Steps) and not any(value is cache for value in inputs.values()):
                if kwargs.get("inputs_embeds") is not None:
                    raise Error(f"{type(self).__name__} computes the text again here, and inputs_embeds= lacks what "
                                "was generated since: give input_ids")
                recorded = any(layer.record_past for layer in cache.attention_layers)
                cache.reset()
                if recorded:
                    cache.activate_past_recording()
                again = {**kwargs, "next_sequence_length": None, "is_first_iteration": True}  # with images, if any
                return {**stock(self, *args, **again), name: cache}
        return inputs
    return prepare_inputs_for_generation


@functools.cache
def _stepped(kind: type) -> type:
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    if hasattr(kind, "prepare_inputs_for_generation"):
        named["prepare_inputs_for_generation"] = _keeping_caches(kind.prepare_inputs_for_generation)
    return type(kind.__name__, (_Stepped, kind), named)


def _new(kind: type):
    stepped = _stepped(kind)
    return stepped.__new__(stepped)
