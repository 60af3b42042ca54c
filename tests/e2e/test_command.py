"""The command `lowkv` on the real model: what a user types, and what goes wrong when it is wrong."""

import json
import subprocess
from pathlib import Path

import pytest
from plugin_tools import BUILD, MODEL, PATHS, Run, environment

COMMAND = BUILD / "bin/lowkv"
TEXT = PATHS["LOWKV_DEMO_TEXT"]


def lowkv(*args, stdin="", **env):
    done = subprocess.run([str(COMMAND), *map(str, args)], env=environment(None, **env),
                          input=stdin, capture_output=True, text=True, timeout=300)
    return Run(done)


def test_compare_measures_against_exact(tmp_path):
    file = tmp_path / "compare.json"
    picture = tmp_path / "compare.svg"
    run = lowkv("compare", "-m", MODEL, "-f", TEXT, "--schemes", "exact,kivi4,kivi2", "--stock",
                "f16", "--tokens", 512, "--chunk", 64, "--skip", 256, "--no-speed", "--json", file,
                "--plot", picture)
    assert run.code == 0, run.both
    rows = {row["scheme"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {"exact", "kivi4", "kivi2", "stock f16"}
    assert rows["exact"]["reference"] and rows["exact"]["compression"] == pytest.approx(1, abs=0.1)
    assert 0 < rows["stock f16"]["mean_kld"] < 0.01
    assert rows["kivi4"]["mean_kld"] < rows["kivi2"]["mean_kld"] < 0.3
    assert rows["kivi2"]["kv_bytes"] < rows["kivi4"]["kv_bytes"] < rows["exact"]["kv_bytes"]
    assert picture.read_text().lstrip().startswith("<?xml")


def test_generate_streams_from_a_packed_cache():
    run = lowkv("generate", "-m", MODEL, "--no-chat", "-n", 16, "--temp", 0, "--scheme", "kivi2",
                stdin=Path(TEXT).read_text()[:2500])
    assert run.code == 0, run.both
    assert run.out.strip()
    run.said(r"packed")


def test_generate_refuses_what_does_not_fit():
    run = lowkv("generate", "-m", MODEL, "-c", 256, "-f", TEXT)
    assert run.code != 0 and not run.out.strip()
    run.said("256")


@pytest.mark.parametrize("args, words", [
    (("generate", "-m", "/no/such.gguf", "-p", "x"), "/no/such.gguf"),
    (("compare", "-m", MODEL, "-f", "/no/such.txt"), "/no/such.txt"),
    (("generate", "-m", MODEL, "-p", "x", "--scheme", "kivi3"), "kivi2"),
    (("schemes", "k=channel-5-g32,v=token-2-g32"), "2, 3, 4"),
    (("bench", "attention", "--heads", "7/2"), "7/2"),
    (("nonsense",), "nonsense"),
])
def test_wrong_arguments_say_what_is_right(args, words):
    run = lowkv(*args)
    assert run.code not in (0, -6, -11), run.both
    assert words in run.both, run.both


@pytest.mark.parametrize("args", [
    ("generate", "-m", MODEL, "-p", "x", "-n", 2),
    ("compare", "-m", MODEL, "-f", TEXT, "--tokens", 300, "--chunk", 64, "--no-speed"),
])
def test_an_implementation_that_is_not_there_fails(args):
    run = lowkv(*args, LOWKV_IMPLEMENTATION="nonsense")
    assert run.code == 1 and not run.out.strip(), run.both
    run.said("nonsense")


def test_environment_sets_the_default_scheme():
    args = ("generate", "-m", MODEL, "--no-chat", "-p", "Once upon a time", "-n", 2)
    lowkv(*args, LOWKV_SCHEME="kivi4").said("scheme kivi4")
    lowkv(*args, "--scheme", "kivi2", LOWKV_SCHEME="kivi4").said("scheme kivi2")
    for command in (args, ("run", "--", "true")):
        wrong = lowkv(*command, LOWKV_SCHEME="kivi3")
        assert wrong.code == 2 and "kivi2" in wrong.both, wrong.both


def test_an_empty_text_is_said_to_be_empty(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    run = lowkv("compare", "-m", MODEL, "-f", empty)
    assert run.code == 1 and f"the text file {empty} is empty" in run.both, run.both


def test_schemes_and_doctor():
    assert "kivi2" in lowkv("schemes").out
    assert "3.00" in lowkv("schemes", "kivi2").out
    run = lowkv("doctor", "-m", MODEL)
    assert run.code == 0, run.both
    run.said("implementation")
    assert lowkv("doctor", LOWKV_IMPLEMENTATION="vax").code != 0


def test_run_serves_and_fails_closed(tmp_path):
    tools = Path(PATHS["LOWKV_LLAMA_BUILD"])
    args = ("-m", MODEL, "-p", "Once", "-n", 4, "-no-cnv", "-t", 1)
    run = lowkv("run", "--scheme", "kivi4", "--", tools / "llama-completion", *args)
    assert run.code == 0, run.both
    run.said("active: scheme kivi4")
    assert lowkv("run", "--", tools / "llama-completion", *args, "-ctk", "q8_0").code != 0
    assert lowkv("run", "--", "/no/such/tool").code != 0


def test_bench_attention_checks_its_results(tmp_path):
    file = tmp_path / "bench.json"
    run = lowkv("bench", "attention", "--head-dim", 64, "--heads", "9/3", "--tokens", 512,
                "--threads", 1, "--schemes", "kivi2", "--peers", "f16", "--op", "decode",
                "--refcheck", "--json", file)
    assert run.code == 0, run.both
    rows = json.loads(file.read_text())
    assert [row["scheme"] for row in rows] == ["kivi2", "ggml-f16"]
    expected = {"op", "head_dim", "q_heads", "kv_heads", "tokens", "threads", "scheme", "ms",
                "floor_ms", "bytes"}
    assert all(expected <= set(row) for row in rows)
    assert rows[0]["bytes"] < rows[1]["bytes"]
