"""`lowkv run --budget` with stock llama.cpp: exact while it fits, then packed, never more than the budget."""

import subprocess

import plugin_models as models
import pytest
from plugin_tools import BUILD, MODEL, TOOLS, Run, assert_same_text, complete, environment, free_port, server, text
from prometheus_client.parser import text_string_to_metric_families

STORY = "The lighthouse keeper wrote down every ship that passed, its name, its flag and its hour. "
TOKEN = 23040  # bytes of SmolLM2's cache in f16


def lowkv_run(*args, **env):
    done = subprocess.run([str(BUILD / "bin/lowkv"), "run", *map(str, args)], env=environment(None, **env),
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                          timeout=300)
    return Run(done)


def completion(*args, budget, scheme="lowkv2", tokens=64, prompt=STORY, **env):
    return lowkv_run("--scheme", scheme, "--budget", budget, "--", TOOLS / "llama-completion", "-m", MODEL, "-p",
                     prompt, "-n", tokens, "--temp", 0, "-no-cnv", "--ignore-eos", "-t", 1, *args, **env)


def figures(path):
    return {s.name.removeprefix("lowkv_cache_") + (s.labels.get("state") or ""): s.value
            for f in text_string_to_metric_families(path.read_text()) for s in f.samples}


@pytest.mark.long
def test_a_large_budget_is_exact():
    ours = completion("-c", 1024, budget="1GiB", prompt=STORY * 15)
    exact = complete("-c", 1024, prompt=STORY * 15, tokens=64, scheme="exact")
    assert ours.code == 0, ours.both
    assert_same_text(ours.out, exact.out, at_least=1000)


@pytest.mark.long
def test_a_full_budget_is_kept_and_the_text_goes_on(tmp_path):
    stats = tmp_path / "stats"
    run = completion("-c", 4096, "-ub", 128, budget="24MiB", prompt=STORY * 110, LOWKV_STATS=str(stats),
                     LOWKV_VERBOSE="1")
    assert run.code == 0, run.both
    seen = figures(stats)
    assert seen["cellspacked"] > 1500
    # A step's rows, and the blocks that they begin.
    assert seen["peak_bytes"] <= 24 * 2**20 + 3 * 128 * TOKEN
    assert seen["bytespacked"] + seen["bytesexact"] > 16 * 2**20
    words = run.out[len(STORY * 110):].split()
    assert len(words) > 20 and sum(w.strip(".,").isalpha() for w in words) > 0.8 * len(words)


@pytest.mark.parametrize("unified, mib", [([], 4.25), (["--kv-unified", "--no-cache-idle-slots"], 3.5)])
def test_slots_share_it(tmp_path, unified, mib):
    stats = tmp_path / "stats"
    model = models.llama(tmp_path / "model.gguf", layers=3)
    budget = int(mib * 2**20)
    with server(tmp_path, "-c", 8192, "-np", 4, "-ub", 64, "-cram", 0, *unified, scheme="lowkv2", model=model,
                env={"LOWKV_BUDGET": str(budget), "LOWKV_STATS": str(stats)}) as s:
        for turn in range(3):
            for slot in range(4):
                answer = s.complete(text(slot, 600 * (turn + 1)), tokens=8, id_slot=slot)
                assert answer["tokens_predicted"] == 8
    seen = figures(stats)
    assert seen["coarsened_blocks_total"] > 0
    assert seen["peak_bytes"] < 1.5 * budget


@pytest.mark.parametrize("write", [models.llama, models.gemma3], ids=["llama", "gemma3, sliding"])
def test_the_size_that_a_refusal_names_would_do(tmp_path, write):
    model = write(tmp_path / "model.gguf")
    prompt = text(3, 3000)

    def run(budget):
        return lowkv_run("--scheme", "lowkv2", "--budget", budget, "--", TOOLS / "llama-completion", "-m", model, "-p",
                         prompt, "-n", 16, "-c", 4096, "-ub", 64, "--temp", 0, "-no-cnv", "--ignore-eos", "-t", 1,
                         LOWKV_STATS=str(tmp_path / "stats"))

    refused = run("10KB")
    assert refused.code != 0
    enough = float(refused.said(r"tokens take ([\d.]+) MiB at lowkv2")[1]) + 0.1
    taken = run(f"{enough}MiB")
    assert taken.code == 0, taken.both
    peak = sum(s.value for f in text_string_to_metric_families((tmp_path / "stats").read_text())
               for s in f.samples if s.name == "lowkv_cache_peak_bytes")
    assert peak < 1.6 * enough * 2**20


@pytest.mark.parametrize("budget, scheme, said", [
    ("1MiB", "lowkv2",
     r"a budget of 1.0 MiB \(LOWKV_BUDGET or --budget\) is too little: 4096 tokens take [\d.]+ MiB at lowkv2"),
    ("lots", "lowkv2", "--budget=lots is no size: say 24MiB"),
    ("24MiB", "kivi2", "--budget is for the schemes lowkv4"),
])
def test_what_can_not_be_is_refused_with_what_would_do(budget, scheme, said):
    run = completion("-c", 4096, budget=budget, scheme=scheme, tokens=4)
    assert run.code != 0
    run.said(said)
    assert run.out.strip() in ("", STORY.strip())


@pytest.mark.parametrize("quiet", [(), ("-lv", 0)])
def test_a_server_with_too_little_is_stopped_with_what_would_do(quiet):
    """It would listen, and fail every request."""
    run = lowkv_run("--budget", "1MiB", "--timeout", 20, "--", TOOLS / "llama-server", "-m", MODEL, "-c", 4096, "-t", 1,
                    "--port", free_port(), "--no-ui", *quiet)
    last = run.err.strip().splitlines()[-1]
    assert run.code == 1 and "lowkv can't pack any layer: a budget of 1.0 MiB" in last and "give more" in last, run.both
