"""What `lowkv plan -m` and `lowkv doctor -m` say of a budget of memory."""

import functools
import json
import re
import subprocess

import plugin_models as models
import pytest
from plugin_tools import BUILD, MODEL, Run, environment


def lowkv(*args, **env):
    done = subprocess.run([str(BUILD / "bin/lowkv"), *map(str, args)], env=environment(None, **env),
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=120)
    return Run(done)


def planned(tmp_path, model, *args):
    file = tmp_path / "plan.json"
    run = lowkv("plan", "-m", model, *args, "--json", file)
    assert run.code == 0, run.both
    return json.loads(file.read_text())


def steps(tmp_path, model, budget, *args):
    out = planned(tmp_path, model, "--budget", budget, *args)["budget"]
    return out["bytes"], {rung["scheme"]: rung["tokens"] for rung in out["rungs"]}


def test_steps_of_a_budget(tmp_path):
    size, reach = steps(tmp_path, MODEL, "24MiB", "--schemes", "lowkv2")
    assert size == 24 * 2**20 and list(reach) == ["exact", "lowkv4", "lowkv2.8", "lowkv2"]
    assert list(reach.values()) == sorted(reach.values())
    # 23,040 bytes a token; the block that is begun is counted whole.
    assert 24 * 2**20 / 23040 - 128 < reach["exact"] <= 24 * 2**20 / 23040
    # Two sequences have half each, and a scheme that ends earlier reaches less far.
    assert steps(tmp_path, MODEL, "48MiB", "--schemes", "lowkv2", "--batch", 2)[1] == reach
    assert list(steps(tmp_path, MODEL, "24MiB", "--schemes", "kivi2,lowkv4")[1]) == ["exact", "lowkv4"]
    assert list(steps(tmp_path, MODEL, "24MiB")[1])[-1] == "lowkv2.8"
    # A step that holds the longest context is the last.
    assert steps(tmp_path, MODEL, "6MiB")[1] == {"exact": 256}
    assert steps(tmp_path, MODEL, "1MiB")[1] == {"exact": 0}


@pytest.mark.parametrize("make", [models.llama, models.gemma3, functools.partial(models.deepseek2, latent=True)])
def test_the_plug_in_takes_the_longest_context_of_a_budget_and_no_longer(tmp_path, make):
    model = make(tmp_path / "model.gguf")
    # Latent rows have the same codec with lowkv2.8 already, and no step more.
    *_, longest = steps(tmp_path, model, "1MiB", "--schemes", "lowkv2")[1].values()
    assert longest > 0 and longest % 256 == 0

    def run(context):
        return lowkv("run", "--scheme", "lowkv2", "--budget", "1MiB", "--", "llama-completion", "-m", model, "-c",
                     context, "-p", "a", "-n", 1, "-no-cnv", "-t", 1)
    assert run(longest).code == 0
    assert run(longest + 256).said(r"a budget of 1.0 MiB \(LOWKV_BUDGET or --budget\) is too little")


@pytest.mark.parametrize("args, words", [
    (("--budget", "lots"), "LOWKV_BUDGET=lots is no size: say 24MiB"),
    (("--budget", "24MiB", "--schemes", "kivi2"), "LOWKV_BUDGET is for the schemes lowkv4"),
])
def test_a_wrong_budget(args, words):
    run = lowkv("plan", "-m", MODEL, *args)
    assert run.code == 1 and not run.out and words in run.err, run.both


def test_doctor_tells_of_the_model_and_of_the_budget(tmp_path):
    model = models.llama(tmp_path / "model.gguf")
    run = lowkv("doctor", "-m", model, "-s", "lowkv2", LOWKV_BUDGET="1MiB")
    run.said(r"ok +LOWKV_BUDGET +1\.0 MiB")
    run.said("- +budget +within 1.0 MiB tokens stay unquantized up to [\\d,]+, then lowkv4 up to")
    # The scheme is proved without the budget, within which nothing would be packed.
    assert int(re.search("2 of 2 layers packed, ([\\d,]+) of", run.out)[1].replace(",", "")) > 0
    wrong = lowkv("doctor", "-m", model, "-s", "kivi2", LOWKV_BUDGET="1MiB")
    assert wrong.code == 1
    wrong.said("PROBLEM +budget +1MiB with kivi2\n.*LOWKV_BUDGET is for the schemes")
    assert lowkv("doctor", LOWKV_BUDGET="lots").said("PROBLEM +LOWKV_BUDGET +lots\n.*is no size")


def test_a_model_that_stays_f16_says_what_happens(tmp_path):
    run = lowkv("plan", "-m", models.write_model("qwen4exp", tmp_path / "model.gguf"))
    assert run.code == 1 and not run.out, run.both
    run.said("sparse attention.*every layer stays f16 and `lowkv run` stops; run it without lowkv")
