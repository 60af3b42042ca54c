"""Options that `lowkv run` refuses before the start, to a stock program with the plug-in in its environment alone: one
message of what is wrong, and no program that goes on."""

import plugin_models as models
import pytest
from plugin_tools import tool

ASK = ("-p", "abc", "-n", 2, "-no-cnv")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return models.llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


def ask(model, *options):
    run = tool("llama-completion", *ASK, *options, model=model, scheme="lowkv2.8", device=False,
               env={"LLAMA_ARG_DEVICE": "LOWKV"})
    return run, [line for line in run.both.splitlines() if "lowkv: " in line]


@pytest.mark.parametrize("more", [(), ("-fit", "off")])
@pytest.mark.parametrize("pattern, weight", [
    (r"blk\.1\.attn_k.*", "blk.1.attn_k.weight"), ("token_embd", "token_embd.weight"), (".*", "token_embd.weight")])
def test_weights_on_the_device_end_the_program(tiny, pattern, weight, more):
    run, said = ask(tiny, "-ot", f"{pattern}=LOWKV", *more)
    assert run.code == 1, run.both[-3000:]
    assert len(said) == 1, run.both[-3000:]
    assert f"the device LOWKV holds caches only, and {weight} is a weight: leave -ot ...=LOWKV out" in said[0]


def test_weights_on_the_cpu_are_llama_cpps_affair(tiny):
    run, said = ask(tiny, "-ot", r"blk\.1\.attn_k.*=CPU")
    assert run.code == 0 and "lowkv: active" in said[0], run.both[-3000:]


def test_rows_among_devices_end_the_program(tiny):
    run, said = ask(tiny, "-sm", "row")
    assert run.code == 1, run.both[-3000:]
    assert len(said) == 1 and "-sm row splits rows among devices, and LOWKV holds whole layers only" in said[0], said


def test_tensors_among_devices_are_told_before_ggml_aborts(tiny):
    run, said = ask(tiny, "-sm", "tensor")
    assert run.code != 0, run.both[-3000:]
    assert len(said) == 1 and "NOT active: -sm tensor" in said[0] and "leave it out" in said[0], run.both[-3000:]


@pytest.mark.parametrize("mode", ["none", "layer"])
def test_other_splits_are_served(tiny, mode):
    run, said = ask(tiny, "-sm", mode, "-mg", 0)
    assert run.code == 0 and "lowkv: active" in said[0] and len(said) == 1, run.both[-3000:]
