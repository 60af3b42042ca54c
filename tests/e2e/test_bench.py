"""lowkv-bench: its figures as JSON, and what it refuses."""

import json
import subprocess

import pytest
from plugin_tools import BUILD, Run, environment


def bench(*args):
    done = subprocess.run([str(BUILD / "bin/lowkv-bench"), *map(str, args)], env=environment(None), capture_output=True,
                          text=True, timeout=300)
    return Run(done)


@pytest.mark.parametrize("args, words", [
    (("attention", "--heads", "7/2"), "7/2"),
    (("attention", "--device", "gpu"), "device 'gpu'"),
    (("nonsense",), "there is no command nonsense; there are attention"),
])
def test_wrong_arguments_say_what_is_right(args, words):
    run = bench(*args)
    assert run.code in (1, 2) and words in run.err, run.both


def test_attention_measures_each_scheme(tmp_path):
    file = tmp_path / "bench.json"
    run = bench("attention", "--head-dim", 64, "--heads", "9/3", "--tokens", 512,
                "--threads", 1, "--schemes", "kivi2", "--peers", "f16", "--op", "decode",
                "--json", file, "--device", "cpu")
    assert run.code == 0, run.both
    rows = json.loads(file.read_text())
    assert [row["scheme"] for row in rows] == ["kivi2", "ggml-f16"]
    expected = {"op", "head_dim", "q_heads", "kv_heads", "tokens", "threads", "scheme", "ms",
                "floor_ms", "bytes", "device"}
    assert all(expected <= set(row) for row in rows)
    assert rows[0]["bytes"] < rows[1]["bytes"]
