"""Names that differ between versions of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable


def cache_argument(function: Callable) -> str:
    """What `function`, a model or its forward(), calls its cache: `cache`, or `past_key_values` before transformers
    5.24."""
    function = getattr(function, "forward", function)
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"
