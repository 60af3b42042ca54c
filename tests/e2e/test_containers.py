"""What control groups leave is the machine: threads, memory, llama.cpp's -fit; and what a kill means. In real groups,
where they may be made."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from control_groups import limit, quota
from plugin_models import llama
from plugin_tools import BUILD, MODEL, TOOLS, environment, server, text
from test_command import lowkv

LOWKV = BUILD / "bin/lowkv"


def inside(start, *words, **more):
    done = subprocess.run([*start, *map(str, words)], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          env=environment(None, **more), timeout=120)
    return done.returncode, done.stdout + done.stderr


several = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")


@several
@pytest.mark.parametrize("processors", [0.5, 1, 1.9])
def test_a_quota_is_the_number_of_threads(processors):
    words = [LOWKV, "run", "--", TOOLS / "llama-bench", "-m", MODEL, "-p", 0, "-n", 1, "-r", 1, "-o", "json"]
    with quota(processors) as start:
        code, said = inside(start, *words)
        assert code == 0 and '"n_threads": 1,' in said, said
        assert "the CPU quota of this container leaves 1 of" in said, said
        code, said = inside(start, *words, "-t", 2)
        assert code == 0 and '"n_threads": 2,' in said and "quota" not in said, said
        code, said = inside(start, LOWKV, "doctor")
        assert re.search(r"threads +1 by default", said), said


def test_a_wide_quota_changes_nothing():
    with quota(4096) as start:
        code, said = inside(start, LOWKV, "run", "--", TOOLS / "llama-bench", "-m", MODEL, "-p", 0, "-n", 1, "-r", 1)
        assert code == 0 and "quota" not in said, said


def test_a_limit_is_the_memory():
    with limit(300) as start:
        code, said = inside(start, LOWKV, "plan", "-m", MODEL, "-c", 131072)
        assert code == 0 and "memory 300.0 MiB" in said, said
        assert not re.search(r"\| f16 .* yes ", said), said
        code, said = inside(start, LOWKV, "doctor")
        assert re.search(r"memory +(29\d|2[0-8]\d)\.\d MiB free of 300\.0 MiB", said), said


def test_fit_plans_for_the_container():
    """The context is what fits beside the weights; one that was asked for and does not fit ends it."""
    weights = Path(MODEL).stat().st_size >> 20
    with limit(weights + 400) as start:
        _, said = inside(start, LOWKV, "run", "--", TOOLS / "llama-completion", "-m", MODEL, "-lv", 5, "-p", "a", "-n",
                         1, "-no-cnv")
        free = int(re.search(r"vs\. (\d+) MiB of free device memory", said).group(1))
        assert free <= weights + 400, said
        code, said = inside(start, LOWKV, "run", "--", TOOLS / "llama-completion", "-m", MODEL, "-c", 1 << 20, "-p",
                            "a", "-n", 1, "-no-cnv")
        assert code in (1, 137) and "smaller -c" in said.strip().splitlines()[-1], said


def test_a_kill_is_named():
    command = [LOWKV, "run", "--", TOOLS / "llama-completion", "-m", MODEL, "-p", "a", "-n", "-1", "--ignore-eos",
               "--context-shift", "-no-cnv", "-t", "1"]
    running = subprocess.Popen(list(map(str, command)), env=environment(None), text=True, stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said = ""
    while "lowkv: active" not in said:
        said = running.stderr.readline()
        assert said, running.wait()
    child = subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True).stdout
    os.kill(int(child), signal.SIGKILL)
    last = running.stderr.read().strip().splitlines()[-1]
    assert running.wait(20) == 128 + signal.SIGKILL
    assert last.startswith("lowkv: llama-completion was killed (SIGKILL, status 137)"), last


def test_a_container_that_is_too_small_says_so():
    """The kernel's own kill."""
    with limit(60) as start:
        code, said = inside(start, LOWKV, "run", "--", TOOLS / "llama-completion", "-m", MODEL, "-fit", "off", "-c",
                            1 << 20, "-p", "a", "-n", 1, "-no-cnv")
    last = said.strip().splitlines()[-1]
    assert code == 137 and "this container may use 60.0 MiB" in last, said


@pytest.mark.parametrize("given", [(), ("-cram", "512")])
def test_the_prompt_cache_is_sized_by_what_it_takes(given):
    run = lowkv("run", "--", TOOLS / "llama-server", "-m", MODEL, *given, "--port", "1", "--host", "256.0.0.1")
    counted, before = map(int, run.said(r"lowkv: -cram (\d+) in place of (\d+)").groups())
    assert before == (512 if given else 8192)
    if given:
        assert 3 * before < counted < 8 * before, run.both
    run.said(r"(\d+) conversations of 4,096 tokens that wait take [\d.]+ [MG]iB")


@pytest.mark.parametrize("given", [("-cram", "0"), ("-cram", "-1")])
def test_other_prompt_caches_are_left_alone(given):
    run = lowkv("run", "--", TOOLS / "llama-server", "-m", MODEL, *given, "--port", "1", "--host", "256.0.0.1")
    assert "in place of" not in run.both, run.both


@pytest.mark.long
def test_what_waits_in_memory_takes_its_packed_size(tmp_path):
    """Eight conversations, and their hits when each goes on."""
    fat = llama(tmp_path / "fat.gguf", head_dim=128, heads=8, kv_heads=8, layers=8, keys={"context_length": 32768})
    resident = {}
    for name, by in (("stock", ()), ("lowkv", [LOWKV, "run", "--"])):
        with server(tmp_path, "-c", 8192, "-fa", "on", scheme=None, by=by, model=fat) as running:
            answers = [running.complete(text(i, 2000), 4) for i in range(8)]
            pid = running.process.pid
            if by:
                pid = int(subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout)
            resident[name] = int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()).group(1))
            hits = [running.complete(text(i, 2000) + answers[i]["content"] + " and", 1)["timings"]["cache_n"]
                    for i in range(8)]
            assert min(hits) > 1900, hits
    assert resident["lowkv"] < 0.4 * resident["stock"], resident
