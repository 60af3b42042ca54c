"""The caches' threads in a container: at most as many as its CPU quota has processors, whatever torch takes."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "e2e"))
from control_groups import quota

# Threads of the process that a layer's rows add to those of torch, which has two.
SCRIPT = """
import os, torch
from lowkv._core import Store, parse_scheme
from lowkv.layer import Layer

torch.set_num_threads(2)
layer = Layer(0, parse_scheme("kivi2,window=0,sinks=0"), None, Store("cpu"))
layer.append(torch.randn(1, 4, 512, 64), torch.randn(1, 4, 512, 64))
before = len(os.listdir("/proc/self/task"))
layer.pack()
layer.full()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize("processors, threads", [(1, 0), (1.9, 0), (2, 1)])
def test_a_quota_limits_the_threads(processors, threads):
    with quota(processors) as start:
        done = subprocess.run([*start, sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and int(done.stdout) == threads, done.stdout + done.stderr
