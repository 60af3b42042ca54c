"""Beside busy neighbours: how many threads `lowkv run` and the commands take, and how long they spin."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from plugin_tools import MODEL, PATHS
from test_command import lowkv

BENCH = Path(PATHS["LOWKV_LLAMA_BUILD"]) / "llama-bench"
CORES = len(os.sched_getaffinity(0))
several = pytest.mark.skipif(CORES < 2, reason="needs two processors")


@contextlib.contextmanager
def neighbours(count):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(1)  # they have started to run
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextlib.contextmanager
def one_processor():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bench(*args):
    run = lowkv("run", "--", BENCH, "-m", MODEL, "-p", 0, "-n", 1, "-r", 1, "-o", "json", *args)
    assert run.code == 0, run.both
    return json.loads(run.out)[0]["n_threads"], run


@several
def test_threads_keep_to_the_processors_that_may_be_used():
    with one_processor():
        assert bench()[0] == 1
        assert bench("-t", 2)[0] == 2


@several
def test_threads_leave_busy_processors_alone():
    with neighbours(os.cpu_count()):
        threads, run = bench()
        assert threads == 1
        run.said(rf"other programs keep {os.cpu_count()} of {os.cpu_count()} processors busy: 1 thread")
        run = lowkv("generate", "-m", MODEL, "-p", "x", "-n", 1)
        assert run.code == 0
        run.said(r"processors busy: 1 thread")
        assert "busy" not in lowkv("generate", "-m", MODEL, "-p", "x", "-n", 1, "-t", 2).err


@several
def test_threads_that_wait_for_busy_processors_spin_for_a_short_while():
    ask = ("run", "--", "sh", "-c", "echo spins $GOMP_SPINCOUNT $OMP_WAIT_POLICY")
    with neighbours(os.cpu_count()):
        assert "spins 2000\n" in lowkv(*ask).out
        assert "spins 70\n" in lowkv(*ask, GOMP_SPINCOUNT="70").out
        assert "spins active\n" in lowkv(*ask, OMP_WAIT_POLICY="active").out
