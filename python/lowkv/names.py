"""Names that differ between versions of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import transformers

_NEWEST = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"


def cache_argument(function: Callable) -> str:
    """What `function`, a model or its forward(), calls its cache: `cache`, or `past_key_values` before transformers
    5.24. One that names neither (Evolla) hands it on by the name of the version."""
    parameters = inspect.signature(getattr(function, "forward", function)).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), _NEWEST)
