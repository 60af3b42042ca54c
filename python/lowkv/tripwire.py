"""What a layer's update() gives to the model instead of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._guards import TracingContext

from lowkv._core import Error

if TYPE_CHECKING:
    from lowkv.layer import Layer


class Bypassed(Error):
    """A model that was switched to lowkv's attention does not call it."""


class Rows(torch.Tensor):
    """Carries the layer to lowkv's attention function. Any other use raises: a model that computes its
    attention itself stops at its first operation, instead of attending to the new rows alone."""

    layer: Layer

    @classmethod
    def of(cls, rows: torch.Tensor, layer: Layer) -> Rows:
        made = torch.Tensor._make_subclass(cls, rows.detach())
        made.layer = layer
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        index = next((a.layer.index for a in args if isinstance(a, Rows)), "?")
        if TracingContext.try_get() is not None:
            raise Error("torch.compile with a lowkv cache is not served: call the model that is not compiled (a "
                        "compiled one goes on with other caches)")
        name = getattr(func, "__name__", str(func))
        raise Bypassed(
            f"layer {index}: this model's attention uses the cached keys or values itself ({name}) instead of "
            "calling the attention function that Cache.from_model() installed, so lowkv can't serve it. Use the "
            "model's own cache, or see docs/transformers/families.md for what works. (After lowkv.restore(), or "
            "after this message, a model needs Cache.from_model() again.)")
