"""Layers of hybrid models, which keep states beside rows or instead of them: of a convolution, of a state-space model,
of linear attention. The states are transformers' own; lowkv takes them back where a step fails."""

from __future__ import annotations

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
        return StatesAndRows(layer.index, layer.scheme, layer.sliding_window, layer.store)
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
        if tokens == 0 and not self.record_past:
            return
        for number, size in self.conv_kernel_size.items():
            if size is None:
                continue
            if tokens and self.recurrent_states[number] is not None:
                raise Error(f"layer {self.index}: a recurrent state can't go back by tokens; go on with a fork() from "
                            "before them")
            kept = self.conv_states[number].shape[-1] + tokens
            if tokens > 0 or kept < size:
                raise Error(f"layer {self.index}: a convolution's state can't go back by {abs(tokens)} tokens. Call "
                            "cache.activate_past_recording() before them, and crop() with a negative number")
            self.conv_states[number] = self.conv_states[number][..., kept - size : kept]

    def reset(self) -> None:
        LinearAttentionLayer.__init__(self)

    def selected(self, indices: torch.Tensor) -> dict:
        """States of these sequences of the batch, in this order, for take()."""
        return self._each(lambda state: state[indices.to(state.device)])

    def take(self, states: dict) -> None:
        vars(self).update(states)

    def saved(self) -> dict[str, torch.Tensor]:
        """What there is, without what is kept for crop() alone."""
        conv, recurrent = self.conv_states[0], self.recurrent_states[0]
        found = {"conv": None if conv is None else conv[..., -self.conv_kernel_size[0] :], "recurrent": recurrent}
        return {kind: state for kind, state in found.items() if state is not None}

    def restore(self, states: dict[str, torch.Tensor], device: torch.device) -> None:
        """Takes over what saved() gave."""
        for kind, state in states.items():
            self.lazy_initialization(**{f"{kind}_states": state.to(device)})
            getattr(self, f"{kind}_states")[0].copy_(state)
            self.has_previous_state[0] = True

    def begin(self) -> dict:
        """Begins a step; what it gives is for rollback()."""
        states = self._each(lambda state: state)
        self.take(self._each(torch.clone))
        return states

    def commit(self) -> None:
        """Nothing: states are what the step made them."""

    rollback = take

    def __deepcopy__(self, memo) -> States:
        new = type(self).__new__(type(self))
        vars(new).update(vars(self) | self._each(lambda state: state))
        return new

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict:
        """The attributes that are of states, all in dicts by a state's number."""
        return {name: {number: change(value) if isinstance(value, torch.Tensor) else value
                       for number, value in values.items()}
                for name, values in vars(self).items() if isinstance(values, dict)}


class StatesAndRows(States, Layer):
    """A layer that has both, as Falcon-H1's."""

    def __init__(self, index, scheme, sliding_window, store):
        States.__init__(self, index)
        Layer.__init__(self, index, scheme, sliding_window, store)

    def lazy_initialization(self, *rows, **states) -> None:
        if rows:
            Layer.lazy_initialization(self, *rows)
        else:
            States.lazy_initialization(self, **states)

    def crop(self, tokens: int) -> None:
        States.crop(self, tokens)
        Layer.crop(self, tokens)

    def reset(self) -> None:
        States.reset(self)
        Layer.reset(self)

    def selected(self, indices):
        return States.selected(self, indices), Layer.selected(self, indices)

    def take(self, both) -> None:
        States.take(self, both[0])
        Layer.take(self, both[1])

    def begin(self):
        states = self._each(lambda state: state)
        States.take(self, self._each(torch.clone))
        return states, Layer.begin(self)

    def commit(self) -> None:
        Layer.commit(self)

    def rollback(self, begun) -> None:
        States.take(self, begun[0])
        Layer.rollback(self, begun[1])

    def __deepcopy__(self, memo) -> StatesAndRows:
        new = Layer.__deepcopy__(self, memo)
        States.take(new, self._each(lambda state: state))
        return new
