"""`lowkv doctor -- PROGRAM`: where a program's weights are and what became of its cache, layer by layer."""

import re

import plugin_models as models
import pytest
from plugin_tools import MODEL, TOOLS, free_port
from test_command import lowkv
from test_weights_elsewhere import COMPLETION, rpc_server

ASK = ("-p", "Once upon a time", "-n", 2, "-no-cnv", "-t", 1)


@pytest.fixture(scope="module")
def gpu():
    with rpc_server() as address:
        yield address


def doctor(gpu, model, *more, program=COMPLETION, words=()):
    return lowkv("doctor", "--weights-on", "RPC0", *words, "--", program, "-m", model, *ASK, "--rpc", gpu, *more)


@pytest.mark.parametrize("program", ["llama-server", "llama-completion"])
def test_all_layers_are_where_they_should_be(gpu, program):
    ask = ("--port", free_port()) if program == "llama-server" else ASK
    run = lowkv("doctor", "--weights-on", "RPC0", "--", TOOLS / program, "-m", MODEL, "-t", 1, "--rpc", gpu, *ask)
    assert run.code == 0, run.both
    run.said(rf"ok +weights +CPU_Mapped 2\d.\d MiB, RPC0\[{gpu}\] 9\d.\d MiB with layers 0 to 29\n")
    run.said("ok +cache +scheme lowkv2.8: 30 of 30 layers' keys and values packed in RAM\n")


def test_two_devices_of_unequal_size(gpu):
    with rpc_server() as other:
        run = lowkv("doctor", "--weights-on", "RPC0=2,RPC1", "--", COMPLETION, "-m", MODEL, *ASK, "--rpc",
                    f"{gpu},{other}")
    assert run.code == 0, run.both
    for address, layers in ((gpu, "0 to 19"), (other, "20 to 29")):
        run.said(rf"weights .*RPC0\[{address}\] [\d.]+ MiB with layers {layers}\b")


def test_without_a_device(gpu):
    run = lowkv("doctor", "--scheme", "kivi2", "--", COMPLETION, "-m", MODEL, *ASK)
    assert run.code == 0, run.both
    run.said("ok +cache +scheme kivi2: 30 of 30 layers' keys")
    run = lowkv("doctor", "--weights-on", "RPC0")
    assert run.code == 2 and "--weights-on is of a program: lowkv doctor --weights-on DEVICE -- " in run.err, run.both


def test_weights_elsewhere_by_a_wish_and_without_one(gpu, tmp_path):
    model = models.llama(tmp_path / "llama.gguf")
    run = doctor(gpu, model, "-ot", "ffn_up=CPU")
    assert run.code == 0, run.both
    run.said(r"ok +weights .*; in RAM by your options: ffn_up.weight of layers 0 to 1\n")
    wrapper = tmp_path / "llama-completion"
    wrapper.write_text(f"""#!/bin/sh\nexec {COMPLETION} -ot 'blk.1.attn_k=CPU' "$@"\n""")
    wrapper.chmod(0o755)
    run = doctor(gpu, model, program=wrapper)
    assert run.code == 1, run.both
    run.said(r"PROBLEM +weights .*\n.*-> these are in RAM, not where --weights-on says: attn_k.weight of layer 1\n")


@pytest.mark.parametrize("name, notes", [
    ("gemma3n", ["layers 20 to 24 have none: they read that of layers 18 to 19"]),
    ("gemma4", ["layers 4 to 5 have none: they read that of layers 2 to 3"]),
    ("jamba", ["layers 0, 2 have no keys and values"]), ("gemma3", [])])
def test_layers_without_a_cache_of_their_own(gpu, tmp_path, name, notes):
    run = doctor(gpu, models.write_model(name, tmp_path / f"{name}.gguf"))
    assert run.code == 0, run.both
    assert re.findall(r"- +cache +(.*)", run.out) == notes, run.both
    run.said(r"ok +cache +scheme lowkv2.8: (\d+) of \1 layers' keys")


@pytest.mark.parametrize("name, why", [("llama-40", "head_dim 40"),
                                       ("deepseek2-old", "keys have 192 channels per head and its values 128")])
def test_a_cache_that_is_not_packed(gpu, tmp_path, name, why):
    run = doctor(gpu, models.write_model(name, tmp_path / f"{name}.gguf"))
    assert run.code == 1, run.both
    found = run.said(r"PROBLEM +program .*llama-completion failed\n.*-> (.*)")[1]
    assert "2 of 2 layers" in found and why in found, run.both


@pytest.mark.parametrize("more, why", [(("-ngl", 3), "and so does -ngl 3"), (("--no-such-option",), "no-such-option")])
def test_a_program_that_does_not_start(gpu, more, why):
    run = doctor(gpu, MODEL, *more)
    assert run.code == 1 and why in run.said(r"PROBLEM +program .*\n.*-> (.*)")[1], run.both


@pytest.mark.parametrize("program", ["llama-server", "llama-completion"])
def test_a_program_that_says_nothing(gpu, tmp_path, program):
    """A server does not end by itself."""
    ask = ("-t", 1, "--port", free_port()) if program == "llama-server" else ASK
    model = models.llama(tmp_path / "llama.gguf")
    run = lowkv("doctor", "--weights-on", "RPC0", "--", TOOLS / program, "-m", model, *ask, "--rpc", gpu,
                "--log-disable")
    assert run.code == 1, run.both
    run.said(r"PROBLEM +weights +the program's messages don't say where they are\n.*-> leave out .*--log-disable")
