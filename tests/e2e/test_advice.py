"""Which scheme for a model: what `lowkv plan -m` and `lowkv doctor -m` say of files of each family, and
what they say of a budget of memory."""

import functools
import json
import re
import subprocess

import gguf
import numpy as np
import plugin_models as models
import pytest
from plugin_tools import BUILD, MODEL, Run, environment

PLAIN, NORMED, BIASED = "SmolLM2 135M", "Gemma 3 270M", "SmolLM2 135M with biases of Qwen2.5's size"
LATENT = "SmolLM2 135M written with latent rows"


def lowkv(*args, **env):
    done = subprocess.run([str(BUILD / "bin/lowkv"), *map(str, args)], env=environment(None, **env),
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=120)
    return Run(done)


def planned(tmp_path, model, *args):
    file = tmp_path / "plan.json"
    run = lowkv("plan", "-m", model, *args, "--json", file)
    assert run.code == 0, run.both
    out = json.loads(file.read_text())
    # What the file has is what was shown, but for the ends of lines.
    shown = " ".join(run.out.split())
    assert all(line in shown for line in out["advice"]["lines"]), run.out
    return out


@pytest.mark.parametrize("name, measured_on, growing", [
    ("llama", PLAIN, None),
    ("qwen2", PLAIN, None),  # its random biases are small
    ("phi3", PLAIN, None),
    ("gptneox", PLAIN, None),
    ("qwen3", NORMED, None),
    ("qwen3moe", NORMED, None),
    ("minimax-m2", NORMED, None),
    ("gemma2", PLAIN, "2 of 4"),
    ("gemma3", NORMED, "1 of 6"),
    ("gpt-oss", PLAIN, "1 of 2"),
    ("granitehybrid", PLAIN, "1 of"),
    ("nemotron_h", PLAIN, "1 of"),
    ("jamba", PLAIN, "1 of"),
    ("lfm2", NORMED, "1 of"),
    ("falcon-h1", PLAIN, None),
    ("qwen3next", NORMED, "2 of 8"),
    ("qwen35", NORMED, "2 of 8"),
    ("deepseek2", LATENT, None),
    ("kimi-linear", LATENT, "1 of 4"),
])
def test_families(tmp_path, name, measured_on, growing):
    advice = planned(tmp_path, models.write_model(name, tmp_path / "model.gguf"))["advice"]
    assert advice["scheme"] == "lowkv2.8" and advice["measured_on"] == measured_on
    assert f": measured on {measured_on}, reckoned for other models" in advice["lines"][0]
    assert len(advice["lines"]) == (1 if growing is None else 2)
    if growing:
        assert advice["lines"][1].startswith(f"Only {growing} ")


def test_a_model_that_stays_f16_says_what_happens(tmp_path):
    run = lowkv("plan", "-m", models.write_model("qwen4exp", tmp_path / "model.gguf"))
    assert run.code == 1 and not run.out, run.both
    run.said("sparse attention.*every layer stays f16 and `lowkv run` stops; run it without lowkv")


def model_with(path, **tensors):
    """A model of two layers, the second with these tensors: 4 query heads, 2 kv heads of 32."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    for name, values in tensors.items():
        writer.add_tensor(f"blk.1.{name.replace('__', '.')}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def biases(norm, front=0, back=0):
    """Of two heads, the second larger, among other numbers that don't count."""
    keys = np.zeros(64)
    keys[3] = norm / 2
    keys[40], keys[41] = 0.6 * norm, -0.8 * norm
    return np.concatenate([np.full(front, 1000.0), keys, np.full(back, 1000.0)])


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm, measured_on", [(29, PLAIN), (31, BIASED)])
def test_biases_of_keys_are_measured(tmp_path, kind, fused, norm, measured_on):
    name, values = ("attn_qkv__bias", biases(norm, 128, 64)) if fused else ("attn_k__bias", biases(norm))
    advice = planned(tmp_path, model_with(tmp_path / "model.gguf", **{name: values.astype(kind)}))["advice"]
    assert advice["measured_on"] == measured_on
    assert (f"large biases, of {norm} a head:" in advice["lines"][0]) == (measured_on == BIASED)


def test_a_file_that_ends_before_its_biases(tmp_path):
    model = model_with(tmp_path / "model.gguf", attn_k__bias=biases(50).astype(np.float32))
    model.write_bytes(model.read_bytes()[:-200])
    run = lowkv("plan", "-m", model)
    assert run.code == 1 and "cut short" in run.err, run.both


def test_only_a_file_is_advised_on(tmp_path):
    run = lowkv("plan", "--shape", "qwen2.5-7b", "--json", tmp_path / "plan.json")
    assert "Advice" not in run.out and json.loads((tmp_path / "plan.json").read_text())["advice"] is None


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
    run.said("- +advice +lowkv2.8. Keys without norms or large biases: measured on SmolLM2 135M")
    run.said(r"ok +LOWKV_BUDGET +1\.0 MiB")
    run.said("- +budget +within 1.0 MiB tokens stay unquantized up to [\\d,]+, then lowkv4 up to")
    # The scheme is proved without the budget, within which nothing would be packed.
    assert int(re.search("2 of 2 layers packed, ([\\d,]+) of", run.out)[1].replace(",", "")) > 0
    wrong = lowkv("doctor", "-m", model, "-s", "kivi2", LOWKV_BUDGET="1MiB")
    assert wrong.code == 1
    wrong.said("PROBLEM +budget +1MiB with kivi2\n.*LOWKV_BUDGET is for the schemes")
    assert lowkv("doctor", LOWKV_BUDGET="lots").said("PROBLEM +LOWKV_BUDGET +lots\n.*is no size")
