"""Copies of a cache, sequences that are selected from it, and the threads that work for it."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import lowkv
import numpy as np
import pytest
import torch
from families import FAMILIES, build


@torch.no_grad()
@pytest.mark.parametrize("indices,rows", [
    ([0, 2], [0, 2]), ((2, 2), [2, 2]), (np.array([1, 0]), [1, 0]), (slice(1, None), [1, 2]),
    (slice(None, None, 2), [0, 2]), (torch.tensor([True, False, True]), [0, 2]), ([True, False, False], [0]),
    (torch.tensor(1), [1]), (-1, [2])])
@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_sequences_are_selected_as_stock_caches_select_them(indices, rows, family):
    if family not in FAMILIES:
        pytest.skip("this transformers has no hybrid models")
    model, _ = build(family)
    tokens = torch.randint(3, 128, (3, 60), generator=torch.Generator().manual_seed(2))
    cache = lowkv.Cache.from_model(model, "exact")
    cache.batch_select_indices(indices)  # of an empty one
    model(tokens, past_key_values=cache)
    whole = cache.full(1)
    cache.batch_select_indices(indices)
    assert all(torch.equal(got, want[rows]) for got, want in zip(cache.full(1), whole, strict=True))
    model(tokens[rows, :1], past_key_values=cache)
    with pytest.raises((lowkv.Error, IndexError)):
        cache.batch_select_indices([7])


@torch.no_grad()
def test_a_copy_is_a_fork():
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model)
    model(torch.arange(3, 43)[None], past_key_values=cache)
    again = copy.copy(cache)
    model(torch.arange(3, 43)[None], past_key_values=again)
    assert (cache.get_seq_length(), again.get_seq_length()) == (40, 80)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="threads are counted as Linux lists them")
def test_no_pool_of_threads_stays_for_each_number_that_there_was():
    code = '''
import lowkv, re, torch
from families import build
model, _ = build("llama")
cache = lowkv.Cache.from_model(model)
def threads():
    return int(re.search("Threads:\\s+([0-9]+)", open("/proc/self/status").read())[1])
with torch.no_grad():
    model(torch.arange(3, 43)[None], past_key_values=cache)
    before = threads()
    for count in (2, 3, 5, 6, 7, 9, 2):
        torch.set_num_threads(count)
        model(torch.tensor([[5]]), past_key_values=cache)
        torch.set_num_threads(1)
print(threads() - before)
'''
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parent)
    assert int(done.stdout) <= 9 + 9 + 2  # the last two numbers' pools, and torch's own
