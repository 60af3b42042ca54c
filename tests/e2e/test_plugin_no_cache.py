"""Programs and models without a KV cache: there is nothing to pack, and no advice that would be wrong."""

import re
import subprocess

import plugin_models as models
import pytest
from models.decoder import eurobert
from plugin_tools import BUILD, MODEL, environment, server, text, tool

COMMAND = BUILD / "bin/lowkv"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return eurobert(tmp_path_factory.mktemp("encoder") / "encoder.gguf")


def said_by_lowkv(log):
    return re.findall(r"lowkv: (.*)", log)


def embedding(running):
    status, answer = running.request("POST", "/embedding", {"content": text(1, 90)})
    assert status == 200, answer
    return answer[0]["embedding"][0]


def test_an_encoder_is_served_without_a_word(tmp_path, encoder):
    found = {}
    for scheme in (None, "lowkv2.8"):
        with server(tmp_path, "--embeddings", "--pooling", "mean", scheme=scheme, model=encoder) as s:
            found[scheme] = embedding(s)
        assert said_by_lowkv(s.log_text()) == []  # its last words included
    assert found["lowkv2.8"] == pytest.approx(found[None], abs=1e-3)  # flash attention or not


def test_doctor_says_that_an_encoder_has_no_cache(encoder):
    done = subprocess.run([COMMAND, "doctor", "-m", encoder], env=environment(None), capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 1
    assert "keeps no keys and values (an encoder" in done.stdout + done.stderr
    assert "report" not in done.stdout + done.stderr


def test_a_router_is_told_what_would_be_right_if_it_ran_a_model(tmp_path):
    with server(tmp_path, scheme="lowkv2.8", model=None) as s:
        assert s.request("GET", "/models")[0] == 200
    (last,) = said_by_lowkv(s.log_text())
    assert last == ("nothing was packed, as no context used the device LOWKV: name it by -dev LOWKV if "
                    "this program itself runs a model")


def test_a_program_that_fails_before_it_has_a_model_is_told_nothing():
    run = tool("llama-completion", "-p", "a", "-n", 2, "-no-cnv", model="/no/such.gguf", scheme="lowkv2.8")
    assert run.code == 1 and said_by_lowkv(run.both) == [], run.both


def test_a_cache_elsewhere_is_still_complained_of(tmp_path):
    model = models.llama(tmp_path / "llama.gguf")
    run = tool("llama-completion", "-p", "a", "-n", 2, "-no-cnv", "-nkvo", model=model, scheme="lowkv2.8")
    run.said(r"NOT active: the KV cache is in CPU memory.*-nkvo")
    run.said(r"NOT active: no KV cache was placed on the device LOWKV")
    bench = tool("llama-bench", "-p", 0, "-n", 2, "-r", 1, "-nkvo", 1, model=MODEL, scheme="lowkv2.8", device=False)
    bench.said(r"NOT active: no KV cache was placed on the device LOWKV")
