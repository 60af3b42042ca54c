"""Says, once in a process, that keys or values were no numbers that a cache can hold."""

from __future__ import annotations

import functools
import logging

from lowkv._core import Store


def report(store: Store, logger: logging.Logger) -> None:
    """To call after a step."""
    if store.saturated:
        _say(logger)


@functools.cache
def _say(logger: logging.Logger) -> None:
    logger.warning("lowkv: a model's keys or values are NaN (stored as 0), infinite or above 65504 (stored as 65504); "
                   "other sequences are not affected")
