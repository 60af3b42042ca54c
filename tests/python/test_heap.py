"""Memory: nothing keeps a prompt's exact rows alive, and malloc gives back what a prompt needed."""

import gc
import os
import subprocess
import sys
import weakref

import lowkv
import pytest
import torch
from families import build
from lowkv import heap

LEFT_ALONE = [{"LOWKV_KEEP_MALLOC": "1"}, {"MALLOC_MMAP_THRESHOLD_": "131072"}]


@torch.no_grad()
def test_packed_rows_leave_nothing_behind():
    """A view into the prompt's keys would keep all of them."""
    cache = lowkv.Cache.from_model(build("llama")[0], "kivi2,window=16")
    keys, values = torch.randn(2, 1, 2, 4096, 16)
    held = [weakref.ref(x.untyped_storage()) for x in (keys, values)]
    cache.layers[0].take_over(keys, values)
    assert cache.exact_bytes < 4096 * 2 * 16 * 4 / 10
    del keys, values
    gc.collect()
    assert [ref() for ref in held] == [None, None]


@pytest.mark.skipif(not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
                    reason="malloc is not glibc's")
@pytest.mark.parametrize("variables", [{}, *LEFT_ALONE])
def test_malloc_is_told_once_and_can_be_left_alone(variables):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES", "LOWKV_KEEP"))}
    done = subprocess.run([sys.executable, "-c", "from lowkv import heap; print(heap.tune())"], capture_output=True,
                          text=True, env=inherited | variables, check=True)
    assert done.stdout.split() == [str(not variables)]


@pytest.mark.skipif(not heap.tune(), reason="malloc is left alone")
@torch.no_grad()
def test_a_long_step_gives_back_what_it_left(monkeypatch):
    calls = []
    monkeypatch.setattr(heap, "trim", lambda: calls.append(None))
    model, _ = build("llama")
    model(torch.arange(1000)[None] % 100, past_key_values=lowkv.Cache.from_model(model))
    assert not calls
    model(torch.arange(1024)[None] % 100, past_key_values=lowkv.Cache.from_model(model))
    assert len(calls) == len(model.model.layers)


@pytest.mark.skipif(not heap.tune(), reason="malloc is left alone")
def test_what_takes_long_is_not_done_often(monkeypatch):
    """Beside many small blocks it takes some 25 ms, and a prompt's chunk has 30 layers."""
    clock, calls = [1000.0], []

    class Slow:
        def malloc_trim(self, _):
            calls.append(clock[0])
            clock[0] += 0.025

    monkeypatch.setattr(heap, "_rested", 0.0)
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: Slow())
    monkeypatch.setattr(heap.time, "monotonic", lambda: clock[0])
    for _ in range(300):
        clock[0] += 0.01
        heap.trim()
    assert 2 <= len(calls) <= 6


@pytest.mark.parametrize(("place", "unused", "why", "calls"),
                         [("cuda", 1, "has too little memory: of its 9 bytes", 2),
                          ("cuda", 1, "has no 9 bytes of memory left to work with", 2),
                          ("cuda", 0, "has too little memory: of its 9 bytes", 1),
                          ("cpu", 1, "has too little memory: of its 9 bytes", 1),
                          ("cuda", 1, "was lost: what its memory holds is not to be relied on", 1)])
def test_a_call_without_room_is_made_again_with_what_torch_gives_back(monkeypatch, place, unused, why, calls):
    """A GPU's allocator is stood in for: test_gpu.py has the real one."""
    made, room = [], []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 + unused)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: room.append(True))

    def call(number):
        made.append(number)
        if not room:
            raise lowkv.Error(why)

    if calls == 2:
        heap.with_room(torch.device(place), call, 7)
    else:
        with pytest.raises(lowkv.Error, match="memory"):
            heap.with_room(torch.device(place), call, 7)
    assert made == [7] * calls
