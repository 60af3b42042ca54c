"""Layers of hybrid models, which keep states beside rows or instead of them: of a convolution, of a state-space model,
of linear attention. The states are transformers' own; lowkv takes them back where a step fails."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers.cache_utils import DummyLayer, LinearAttentionLayer

from lowkv._core import Error
from lowkv.layer import Layer


def layer_of(kind: str, layer: Layer) -> States | Layer | DummyLayer:
    """What a cache has for a layer of this type of transformers', in the place of `layer`."""
    if kind in ("linear_attention", "conv"):
        return States(layer.index)
    if kind == "hybrid":
        return StatesAndRows(layer.index, layer.scheme, layer.sliding_window, layer.store, layer.budget)
    return DummyLayer() if kind in ("moe", "mlp") else layer


class States(LinearAttentionLayer):
    """States of one layer. They change in steps alone, each of which begins with copies: forks share them."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def update_conv_state(self, conv_states, state_idx=0, conv_kernel_size=None, **kwargs):
        first = not self.has_previous_state[state_idx]
        full = super().update_conv_state(conv_states, state_idx, conv_kernel_size=conv_kernel_size, **kwargs)
        if first and self.record_past:  # then crop() finds a state before each of the first tokens, too
            self.conv_states[state_idx] = torch.nn.functional.pad(full, (self.conv_kernel_size[state_idx], 0))
        return full

    def crop(self, tokens: int) -> None:
        """Takes back the last `-tokens` tokens, for which activate_past_recording() must have been called before."""
        if tokens and self.recurrent_states[0] is not None:
            raise Error(f"layer {self.index}: a recurrent state can't go back by tokens; go on with a fork() from "
                        "before them")
        conv, size = self.conv_states[0], self.conv_kernel_size[0]
        if conv is None or (tokens == 0 and not self.record_past):
            return
        kept = conv.shape[-1] + tokens
        if tokens > 0 or kept < size:
            raise Error(f"layer {self.index}: a convolution's state can't go back by {abs(tokens)} tokens. Call "
                        "cache.activate_past_recording() before them, and crop() with a negative number")
        self.conv_states[0] = conv[..., kept - size : kept]

    def reset(self) -> None:
        LinearAttentionLayer.__init__(self)

    def saved(self) -> dict[str, torch.Tensor]:
        """What there is, without what is kept for crop() alone."""
        conv, recurrent = self.conv_states[0], self.recurrent_states[0]
        found = {}
        if conv is not None:
            found["conv"] = conv[..., -self.conv_kernel_size[0] :]
        if recurrent is not None:
            found["recurrent"] = recurrent
        return found

    def restore(self, kind: str, state: torch.Tensor) -> None:
        """Takes over one of what saved() gave."""
        self.lazy_initialization(**{f"{kind}_states": state})
        getattr(self, f"{kind}_states")[0].copy_(state)
        self.has_previous_state[0] = True

    def selected(self, indices: torch.Tensor) -> dict:
        """States of these sequences of the batch, in this order, for take()."""
        return self._each(lambda state: state[indices.to(state.device)])

    def begin(self) -> dict:
        """Begins a step; what it gives is for rollback()."""
        states = self._each(lambda state: state)
        self.take(self._each(torch.clone))
        return states

    def take(self, states: dict) -> None:
        vars(self).update(states)

    rollback = take

    def commit(self) -> None:
        """Nothing: states are what the step made them."""

    def __deepcopy__(self, memo) -> States:
        return copy.copy(self)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict:
        """The attributes that are of states, all in dicts by a state's number."""
        return {name: {number: change(value) if isinstance(value, torch.Tensor) else value
                       for number, value in values.items()}
                for name, values in vars(self).items() if isinstance(values, dict)}


class StatesAndRows(States, Layer):
    """A layer that has both, as Falcon-H1's."""

    commit, __deepcopy__ = Layer.commit, Layer.__deepcopy__

    def __init__(self, *layer):
        States.__init__(self, layer[0])
        Layer.__init__(self, *layer)

    def lazy_initialization(self, *rows, **states) -> None:
        (Layer if rows else States).lazy_initialization(self, *rows, **states)

    def crop(self, tokens: int) -> None:
        States.crop(self, tokens)
        Layer.crop(self, tokens)

    def reset(self) -> None:
        States.reset(self)
        Layer.reset(self)

    def selected(self, indices: torch.Tensor) -> dict:
        return {**States.selected(self, indices), "rows": Layer.selected(self, indices)}

    def begin(self) -> dict:
        return {**States.begin(self), "rows": Layer.begin(self)}

    def rollback(self, begun: dict) -> None:
        Layer.rollback(self, begun["rows"])
        self.take(begun)
