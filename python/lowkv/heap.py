"""Memory that has no use and that its allocator keeps all the same: glibc's, and torch's on a GPU.

glibc raises its threshold for memory of its own (mmap) up to 32 MiB as large blocks are freed. The later
temporaries of a prompt then come from the heap, between small blocks that stay, and what they leave is neither
given back nor used again: a process with a cache of 40 MiB peaked at 3 GiB."""

from __future__ import annotations

import ctypes
import functools
import os
import time

import torch

from lowkv._core import Error

OPT_OUT = "LOWKV_KEEP_MALLOC"  # set to anything: malloc stays as it is
_M_MMAP_THRESHOLD = -3  # malloc.h
_THRESHOLD = 256 << 10  # bytes; above a decode step's temporaries, which would pay for their pages each time

_REST = 30  # times as long as a trim() took there is none
_rested = 0.0

_TOO_LITTLE = "has too little memory: ", "bytes of memory left to work with"  # devices/host/memory.cpp, queue.cpp


@functools.cache
def tune() -> bool:
    """Fixes the threshold at 256 KiB for the whole process, once. False where malloc is not glibc's, or where the
    user has chosen: by OPT_OUT or by glibc's own variables."""
    if os.environ.get(OPT_OUT) or "MALLOC_MMAP_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ:
        return False
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD))


def trim() -> None:
    """Gives back what a long step's smaller temporaries left between blocks that stay. Nothing where malloc is left
    alone, nor soon after a call that took long, as it does beside many blocks."""
    global _rested
    begun = time.monotonic()
    if begun >= _rested and tune():
        ctypes.CDLL(None).malloc_trim(0)
        now = time.monotonic()
        _rested = now + _REST * (now - begun)


def with_room(device: torch.device, call, *arguments) -> None:
    """A call that leaves everything as it was where it fails. If it fails for want of a GPU's memory, and torch has
    some there that it has no use for, torch gives that back, and the call is made once more."""
    try:
        call(*arguments)
    except Error as error:
        unused = device.type == "cuda" and torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if not unused or not any(words in str(error) for words in _TOO_LITTLE):
            raise
        torch.cuda.empty_cache()
        call(*arguments)
