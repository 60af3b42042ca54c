"""`lowkv run --weights-on`: weights on other devices, the cache packed here. A server of llama.cpp's RPC on loopback
stands for a GPU: its memory and its graphs are its own, and what it computes comes back as a GPU's would."""

import base64
import concurrent.futures
import contextlib
import re
import socket
import subprocess
import time

import plugin_models as models
import pytest
from models.projector import picture, projector
from plugin_tools import MODEL, TOOLS, assert_same_text, environment, free_port, server
from test_command import COMMAND, lowkv

COMPLETION = TOOLS / "llama-completion"
PROMPT = "Once upon a time there was a lighthouse keeper. " * 24  # more than one block of 128 tokens
SCHEMES = ("exact", "lowkv2.8")
ASK = ("-p", PROMPT, "-n", 24, "--temp", 0, "-no-cnv", "--ignore-eos", "-t", 1, "-fa", "on")


@contextlib.contextmanager
def rpc_server():
    port = free_port()
    command = [TOOLS / "ggml-rpc-server", "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(None))
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        else:
            raise AssertionError("ggml-rpc-server does not answer")
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def gpu():
    with rpc_server() as address:
        yield address


@pytest.fixture(scope="module")
def here():
    """The texts with everything on the CPU, by scheme."""
    return {scheme: lowkv("run", "--scheme", scheme, "--", COMPLETION, "-m", MODEL, *ASK).out for scheme in SCHEMES}


def buffers(run, device):
    """MiB of weights in a device's memory, by the program's own words."""
    return sum(float(x) for x in re.findall(rf"{re.escape(device)}\S* model buffer size = +([\d.]+) MiB", run.both))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_there_and_the_cache_is_packed_here(gpu, here, scheme):
    run = lowkv("run", "--weights-on", "RPC0", "--scheme", scheme, "--", COMPLETION, "-m", MODEL, *ASK, "--rpc", gpu,
                "-lv", 4)
    assert run.code == 0, run.both
    run.said(rf"lowkv: active: scheme {scheme}, 30 layers")
    # All but the embedding, which llama.cpp looks up on the CPU.
    assert buffers(run, "RPC0") > 2 * buffers(run, "CPU") > 0, run.both
    assert_same_text(run.out, here[scheme], 200)


def test_own_overrides_come_first(gpu, here):
    """As -ot of experts to the CPU."""
    run = lowkv("run", "--weights-on", "RPC0", "--", COMPLETION, "-m", MODEL, *ASK, "--rpc", gpu, "-lv", 4,
                "-ot", "ffn_down=CPU", "-ot", "ffn_up=CPU")
    assert run.code == 0 and "DEPRECATED" not in run.both, run.both
    assert buffers(run, "RPC0") < 70 and buffers(run, "CPU") > 50, run.both
    assert_same_text(run.out, here["lowkv2.8"], 200)


def test_two_devices_share_the_layers(gpu, here):
    with rpc_server() as other:
        uneven = lowkv("run", "--weights-on", "RPC0=1,RPC1=5", "--", COMPLETION, "-m", MODEL, *ASK, "--rpc",
                       f"{gpu},{other}", "-lv", 5)
        unfair = lowkv("run", "--weights-on", "RPC0=1,RPC1=100", "--", COMPLETION, "-m", MODEL, "--rpc",
                       f"{gpu},{other}")
        layers = [set(map(int, re.findall(rf"blk\.(\d+)\..* overridden to RPC0\[{address}", uneven.both)))
                  for address in (gpu, other)]
        run = lowkv("run", "--weights-on", "RPC0,RPC1", "--", COMPLETION, "-m", MODEL, *ASK, "--rpc", f"{gpu},{other}",
                    "-lv", 4)
        shares = [buffers(run, f"RPC0[{address}]") for address in (gpu, other)]
    assert layers == [set(range(5)), set(range(5, 30))]
    assert_same_text(uneven.out, here["lowkv2.8"], 200)
    assert unfair.code == 2 and "gives RPC0 none of the 30 layers: leave it out" in unfair.err, unfair.both
    assert run.code == 0, run.both
    # One has the output besides its half of the layers.
    assert 30 < min(shares) < max(shares) < min(shares) + 32, shares
    assert_same_text(run.out, here["lowkv2.8"], 200)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_that_read_anothers_cache(gpu, tmp_path, name, scheme):
    """llama.cpp would give flash attention up if theirs were on the other device."""
    model = models.write_model(name, tmp_path / f"{name}.gguf")
    texts = []
    for words in ((), ("--weights-on", "RPC0")):
        program = (COMPLETION, "-m", model, *ASK[:-2], *(("--rpc", gpu, "-lv", 4) if words else ()))
        run = lowkv("run", *words, "--scheme", scheme, "--", *program)
        assert run.code == 0 and len(re.findall(rf"lowkv: active: scheme {scheme}", run.both)) == 2, run.both[-3000:]
        texts.append(run.out)
    assert buffers(run, "RPC0") > 3
    assert_same_text(*texts, at_least=20)


@pytest.mark.parametrize("words, device", [((), "CPU"), (("--weights-on", "RPC0"), "RPC0")])
def test_a_projector_is_where_the_weights_are(gpu, tmp_path, words, device):
    """Not on the device LOWKV, which llama.cpp would take as the first."""
    model = models.llama(tmp_path / "llama.gguf")
    by = [COMMAND, "run", *words, "--"]
    with server(tmp_path, "-lv", 4, "--mmproj", projector(tmp_path / "mmproj.gguf"), *(("--rpc", gpu) if words else ()),
                scheme=None, model=model, by=by) as running:
        marker = running.request("GET", "/props")[1]["media_marker"]
        image = base64.b64encode(picture()).decode()
        answer = running.complete({"prompt_string": f"{PROMPT[:400]}{marker} Once", "multimodal_data": [image]})
        log = running.log.read_text()
    assert answer["content"] and re.search(rf"CLIP using {device}", log), log[-3000:]
    assert re.search("lowkv: active: .* 2 layers", log)


def test_the_servers_of_a_router(gpu, tmp_path):
    models.llama(tmp_path / "one.gguf")
    by = [COMMAND, "run", "--weights-on", "RPC0", "--"]
    with server(tmp_path, "--models-dir", tmp_path, "--rpc", gpu, "-c", 512, scheme=None, model=None, by=by) as running:
        assert running.complete("Once upon a time", 4, model="one")["tokens_predicted"] == 4
        log = running.log_text()
    assert "lowkv: active: scheme lowkv2.8" in log, log[-3000:]


@pytest.mark.parametrize("requests", [16, pytest.param(200, marks=pytest.mark.long)])
def test_a_server_of_four_slots(gpu, tmp_path, requests):
    by = [COMMAND, "run", "--weights-on", "RPC0", "--"]
    with server(tmp_path, "--rpc", gpu, "-np", 4, "-c", 8192, "-fa", "on", scheme=None, by=by) as running:
        def ask(i):
            return running.complete(f"Story number {i % 7}. {PROMPT[:600]}", 4, cache_prompt=i % 2 == 0)["content"]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, range(requests)))
        log = running.log.read_text()
    assert len(answers) == requests and all(answers)
    assert re.search(r"lowkv: active: .*30 layers", log), log[-3000:]


@pytest.mark.parametrize("words, command, said", [
    (["--weights-on", "CUDA7"], [], "--weights-on CUDA7: the program sees no such device, but RPC0"),
    (["--weights-on", "RPC0"], ["-ngl", 3], "--weights-on says where the weights go, and so does -ngl 3"),
    (["--weights-on", "RPC0"], ["-md", MODEL], f"--weights-on does not serve draft models, and there is -md {MODEL}"),
    (["--weights-on", "RPC0=0"], [], "--weights-on RPC0=0: a share is a number above 0, as in RPC0=2"),
    (["--weights-on", "RPC0=half"], [], "--weights-on RPC0=half: a share is"),
    (["--weights-on", ","], [], "--weights-on names no device"),
    (["--weights-on", ""], [], "--weights-on names no device"),
    (["--weights-on", "RPC0, RPC0=2"], [], "--weights-on names RPC0 twice"),
    (["--weights-on", "RPC0"], ["-ngl", 0], "and so does -ngl 0: leave one of them out"),
])
def test_what_it_refuses(gpu, words, command, said):
    run = lowkv("run", *words, "--", COMPLETION, "-m", MODEL, *ASK, "--rpc", gpu, *command)
    assert run.code == 2 and said in run.err, run.both


def test_it_names_the_variable_that_says_otherwise(gpu):
    for variable, value in (("LLAMA_ARG_N_GPU_LAYERS", "3"), ("LLAMA_ARG_SPEC_DRAFT_MODEL", MODEL)):
        run = lowkv("run", "--weights-on", "RPC0", "--", COMPLETION, "-m", MODEL, "--rpc", gpu, **{variable: value})
        assert run.code == 2 and f" {variable}={value}: leave one of them out" in run.err, run.both


def test_no_device_at_all():
    run = lowkv("run", "--weights-on", "CUDA0", "--", COMPLETION, "-m", MODEL, *ASK)
    assert run.code == 2 and "nor any other but the CPU: is its llama.cpp built for your GPU?" in run.err, run.both


def test_the_program_can_not_list_its_devices(gpu):
    run = lowkv("run", "--weights-on", "RPC0", "--", COMPLETION, "-m", MODEL, "--rpc", gpu, LLAMA_ARG_CTX_SIZE="many")
    assert run.code == 2 and "llama-completion --list-devices failed" in run.err, run.both
    assert "LLAMA_ARG_CTX_SIZE" in run.err, run.both
