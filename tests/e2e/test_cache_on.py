"""The cache on another device: LOWKV_DEVICE, `lowkv run --cache-on`. LOWKV_DEVICE=opencl and a build with OpenCL have
it there (make test-cache-on, which runs other tests of the plug-in so, too)."""

import re
import subprocess

import plugin_models as models
import pytest
from plugin_tools import DEVICE, MODEL, TOOLS, assert_same_text, complete, server, text, tool
from test_command import lowkv
from test_weights_elsewhere import rpc_server

COMPLETION = TOOLS / "llama-completion"
PROMPT = "Once upon a time there was a lighthouse keeper. " * 24  # more than one block of 128 tokens
ASK = ("-p", PROMPT, "-n", 24, "--temp", 0, "-no-cnv", "--ignore-eos", "-t", 1)
on_device = pytest.mark.skipif(DEVICE in (None, "cpu"), reason="LOWKV_DEVICE names no device")


@pytest.mark.parametrize("name, words", [("tpu", "there is no device 'tpu': it is 'cpu', 'opencl'"),
                                         ("cuda:77", "this build has none such; configure one with -DLOWKV_CUDA=ON")])
def test_a_device_that_there_is_not_is_refused_before_the_program_starts(name, words):
    run = lowkv("run", "--cache-on", name, "--", COMPLETION, "-m", MODEL, *ASK)
    assert run.code == 2 and words in run.err and "--cache-on: " in run.err, run.both
    run = lowkv("run", "--", COMPLETION, "-m", MODEL, *ASK, LOWKV_DEVICE=name)
    assert run.code == 2 and words in run.err and "LOWKV_DEVICE: " in run.err, run.both
    run = complete(scheme="lowkv2.8", env={"LOWKV_DEVICE": name})
    assert run.code != 0 and words in run.both and not run.out.strip(), run.both
    assert words in lowkv("doctor", LOWKV_DEVICE=name).out


def test_the_processor_by_its_name():
    run = complete(scheme="lowkv2.8", env={"LOWKV_DEVICE": "cpu"})
    run.said(r"active: scheme lowkv2.8, 30 layers, .* implementation ")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """SmolLM2's quantized weights round activations to 8 bits, which makes much of a last bit's difference."""
    return models.llama(tmp_path_factory.mktemp("models") / "llama.gguf", layers=3, head_dim=64)


@on_device
def test_the_text_is_the_processors(tiny):
    there = complete(prompt=text(2, 700), model=tiny, tokens=48, scheme="exact")
    there.said(rf"active: scheme exact, 3 layers, .* on {re.escape(DEVICE)}")
    here = complete(prompt=text(2, 700), model=tiny, tokens=48, scheme="exact", env={"LOWKV_DEVICE": "cpu"})
    assert_same_text(there.out, here.out, 700)


@on_device
def test_losses_are_the_processors(tmp_path, tiny):
    """Beside unquantized rows; attention on the processor rounds queries to 8 bits."""
    book, base = tmp_path / "book.txt", tmp_path / "base"
    book.write_text(text(1, 6000))
    args = ("-f", book, "-c", 1024, "-b", 1024, "-ub", 64, "--chunks", 2, "--kl-divergence-base", base)
    assert tool("llama-perplexity", *args, model=tiny, scheme="exact", env={"LOWKV_DEVICE": "cpu"}).code == 0

    def loss(scheme, device, worst=False):
        run = tool("llama-perplexity", *args, "--kl-divergence", model=tiny, scheme=scheme,
                   env={"LOWKV_DEVICE": device})
        run.said(rf"active: scheme {scheme}, 3 layers")
        return float(run.said(rf"{'Maximum' if worst else 'Mean'} +KLD: +(\S+)").group(1))

    assert loss("exact", DEVICE, worst=True) < 1e-3
    for scheme in ("lowkv2.8,window=64", "kivi2,window=64", "turboquant4,window=64", "lowkv2,window=64,sinks=2"):
        assert loss(scheme, DEVICE) == pytest.approx(loss(scheme, "cpu"), rel=0.02), scheme


@on_device
def test_a_saved_state_goes_to_the_processor_and_back(tmp_path):
    prompt, scheme = text(5, 1800), "lowkv2.8,window=64"
    model = models.llama(tmp_path / "llama.gguf", layers=3)
    answers = []
    for name in (DEVICE, "cpu", DEVICE):
        args = ("-np", 1, "-c", 4096, "--slot-save-path", tmp_path)
        with server(tmp_path, *args, scheme=scheme, model=model, env={"LOWKV_DEVICE": name}) as s:
            if answers:
                assert s.request("POST", "/slots/0?action=restore", {"filename": "slot"})[0] == 200
            answer = s.complete(prompt, tokens=24, id_slot=0)
            assert (answer["timings"]["prompt_n"] < 64) == bool(answers)
            answers.append(answer["content"])
            assert s.request("POST", "/slots/0?action=save", {"filename": "slot"})[0] == 200
    assert answers[1:] == answers[:1] * 2


FAILING_DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
typedef int call(void*, void*, unsigned, size_t, size_t, void*, unsigned, const void*, void*);
int clEnqueueReadBuffer(void* queue, void* from, unsigned waits, size_t at, size_t bytes, void* to, unsigned count,
                        const void* events, void* event) {
    if (access(getenv("FAILS_WHEN"), F_OK) == 0) return -5;
    void* real = dlsym(dlopen("libOpenCL.so.1", RTLD_LAZY), "clEnqueueReadBuffer");
    return ((call*)real)(queue, from, waits, at, bytes, to, count, events, event);
}
"""


@on_device
@pytest.mark.parametrize("scheme", ["exact", "lowkv2.8,window=64"])
def test_a_state_that_a_failed_device_saved_is_refused(tmp_path, tiny, scheme):
    source, driver, fails = tmp_path / "driver.c", tmp_path / "driver.so", tmp_path / "fails"
    source.write_text(FAILING_DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", driver, source, "-ldl"], check=True)
    args, prompt = ("-np", 1, "-c", 4096, "--slot-save-path", tmp_path), text(6, 900)
    with server(tmp_path, *args, scheme=scheme, model=tiny,
                env={"LD_PRELOAD": str(driver), "FAILS_WHEN": str(fails)}) as s:
        answer = s.complete(prompt, tokens=24, id_slot=0)["content"]
        fails.touch()
        s.request("POST", "/slots/0?action=save", {"filename": "slot"})
        status, refused = s.request("POST", "/completion", {"prompt": prompt + " on", "n_predict": 4, "id_slot": 0})
        assert status != 200, refused
        assert "lost or failed in reading its memory" in s.log_text()
    with server(tmp_path, *args, scheme=scheme, model=tiny, env={"LOWKV_DEVICE": "cpu"}) as s:
        s.request("POST", "/slots/0?action=restore", {"filename": "slot"})
        status, after = s.request("POST", "/completion", {"prompt": prompt, "n_predict": 24, "temperature": 0,
                                                          "ignore_eos": True, "cache_prompt": True, "id_slot": 0})
        assert status != 200, after
        assert "a state was restored that had not been taken over itself" in s.log_text()
        s.request("POST", "/slots/0?action=erase")
        assert s.complete(prompt, tokens=24, id_slot=0, cache_prompt=False)["content"] == answer


@on_device
def test_what_its_kernels_do_not_serve_stays_f16_by_name():
    run = lowkv("run", "--cache-on", DEVICE, "--scheme", "k=token-4-row,v=token-4-row", "--", COMPLETION, "-m", MODEL,
                *ASK)
    assert run.code == 1, run.both
    run.said(r"NOT active for 30 of 30 layers, which stay f16: .* has no kernels for keys of the quantizer 'row'")


@on_device
@pytest.mark.parametrize("scheme", ["exact", "lowkv2.8,window=64"])
def test_weights_on_one_device_and_the_cache_on_another(tiny, scheme):
    program = (COMPLETION, "-m", tiny, "-p", text(4, 600), "-n", 24, "--temp", 0, "-no-cnv", "--ignore-eos", "-t", 1)
    with rpc_server() as gpu:
        there = lowkv("run", "--scheme", scheme, "--weights-on", "RPC0", "--cache-on", DEVICE, "--", *program,
                      "--rpc", gpu)
    assert there.code == 0, there.both
    there.said(rf"active: scheme {scheme}, 3 layers, .* on {re.escape(DEVICE)}")
    here = lowkv("run", "--scheme", scheme, "--cache-on", DEVICE, "--", *program)
    assert_same_text(there.out, here.out, 600)


@on_device
def test_doctor_tries_the_device_that_is_named():
    run = lowkv("doctor", LOWKV_DEVICE=f"{DEVICE}:no such")
    assert run.code == 1, run.both
    run.said(rf"PROBLEM +device +{re.escape(DEVICE)}:no such")
