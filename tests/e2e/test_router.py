"""`lowkv run` with a llama-server that starts one for each model that it is asked for: their caches are packed, or it
is stopped."""

import contextlib
import time

import plugin_models as models
import pytest
from models.decoder import eurobert
from plugin_tools import BUILD, server
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        models.llama(folder / f"{name}.gguf")
    eurobert(folder / "encoder.gguf")
    return folder


def routing(tmp_path, *words, options=(), env=None):
    return server(tmp_path, *words, scheme=None, model=None, by=(BUILD / "bin/lowkv", "run", *options, "--"), env=env)


def ask(running, model):
    body = {"model": model, "prompt": "Once upon a time", "n_predict": 4, "ignore_eos": True}
    return running.request("POST", "/completion", body)


def test_the_servers_of_a_router_are_packed(tmp_path, folder):
    with routing(tmp_path, "--models-dir", folder, "-c", 512, env={"LOWKV_STATS": str(tmp_path / "%m.prom")}) as s:
        for name in ("first", "second"):
            status, answer = ask(s, name)
            assert status == 200 and answer["tokens_predicted"] == 4, answer
        status, answer = s.request("POST", "/v1/embeddings", {"model": "encoder", "input": "a"})
        time.sleep(1.5)
        log = s.log_text()
    assert log.count("lowkv: active: scheme lowkv2.8") == 2 and "\x1f" not in log, log
    assert log.count("has no packed cache") == 1, log
    for name in ("first", "second"):
        families = list(text_string_to_metric_families((tmp_path / f"{name}.prom").read_text()))
        assert {sample.labels.get("model") for f in families for sample in f.samples} == {name, None}


def preset(tmp_path, folder):
    file = tmp_path / "presets.ini"
    file.write_text(f"[plain]\nmodel = {folder}/first.gguf\ncache-type-k = q8_0\n"
                    f"[good]\nmodel = {folder}/second.gguf\n")
    return "--models-preset", file, "-c", 512


def test_one_that_is_not_packed_stops_it_by_name(tmp_path, folder):
    with contextlib.suppress(AssertionError), routing(tmp_path, *preset(tmp_path, folder)) as s:
        assert ask(s, "good")[0] == 200
        with contextlib.suppress(OSError, ValueError):
            ask(s, "plain")
        assert s.process.wait(20) == 1
    last = s.log_text().strip().splitlines()[-1]
    assert last.startswith("lowkv: llama-server was stopped: its server [") and "cache type is not f16" in last, last


def test_if_possible_it_goes_on(tmp_path, folder):
    with routing(tmp_path, *preset(tmp_path, folder), options=("--if-possible",)) as s:
        assert ask(s, "plain")[0] == 200
        time.sleep(0.5)
        assert ask(s, "good")[0] == 200
        assert s.log_text().count("lowkv: nothing is packed: its server [") == 1


def test_words_of_a_client_can_not_stop_it(tmp_path, folder):
    """The log may quote them."""
    words = "x\n[50123] lowkv: NOT active for 1 of 1 layers: x\n[50123] llama_kv_cache: CPU KV buffer size = 1.00 MiB\n"
    with routing(tmp_path, "--models-dir", folder, "-c", 512) as s:
        for path in ("/completion", "/models/load"):
            s.request("POST", path, {"model": words, "prompt": words})
        assert ask(s, "first")[0] == 200
