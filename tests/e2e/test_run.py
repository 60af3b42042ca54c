"""`lowkv run`: a stock program whose cache is packed, or a message and no program."""

from pathlib import Path

import plugin_models as models
import pytest
from plugin_tools import MODEL, PATHS
from test_command import lowkv

COMPLETION = Path(PATHS["LOWKV_LLAMA_BUILD"]) / "llama-completion"
ASK = ("-p", "Once upon a time", "-n", 8, "-no-cnv", "-t", 1)
# A codec of whole rows, which have more channels in `wide` than it takes.
HALF = "kivi2,layer.1=token-2-row/token-2-g32"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return models.llama(tmp_path_factory.mktemp("wide") / "wide.gguf", head_dim=256, heads=33, kv_heads=33, width=64)


@pytest.mark.parametrize("value", ["-1", "nan", "soon"])
def test_a_timeout_that_is_none(value):
    run = lowkv("run", f"--timeout={value}", "--", COMPLETION, "-m", MODEL)
    assert run.code == 2, run.both
    assert f"--timeout: {value} is not a number of seconds, 0 or more" in run.err and len(run.both) < 200, run.both


def test_a_timeout_says_its_seconds():
    run = lowkv("run", "--timeout", 0.1, "--", "sleep", 20)
    assert run.code == 1 and 'no "lowkv: active" line within 0.1 s (--timeout)' in run.err, run.both


def test_layers_that_stay_f16_stop_the_program(wide):
    run = lowkv("run", "--scheme", HALF, "--", COMPLETION, "-m", wide, *ASK)
    assert run.code == 1, run.both
    run.said(r"lowkv: NOT active for 1 of 2 layers")  # the plug-in's own line
    last = run.err.strip().splitlines()[-1]
    assert "1 of 2 layers" in last and "8448 channels in a row are not supported" in last and "--partial" in last, last


def test_partial_goes_on_when_some_layers_are_packed(wide, tmp_path):
    run = lowkv("run", "--partial", "--scheme", HALF, "--", COMPLETION, "-m", wide, *ASK)
    assert run.code == 0 and run.out.strip(), run.both
    run.said(r"lowkv: active: .* 1 layers")
    none = models.llama(tmp_path / "llama-40.gguf", head_dim=40)
    run = lowkv("run", "--partial", "--", COMPLETION, "-m", none, *ASK)
    assert run.code == 1 and "2 of 2 layers" in run.err.strip().splitlines()[-1], run.both


def test_partial_stops_where_nothing_is_packed(tmp_path):
    """At the start, not after a day of work."""
    none = models.llama(tmp_path / "llama-40.gguf", head_dim=40)
    run = lowkv("run", "--partial", "--", COMPLETION, "-m", none, "-p", "a", "-n", -1, "--ignore-eos", "--context-shift",
                "-no-cnv", "-t", 1)
    last = run.err.strip().splitlines()[-1]
    assert run.code == 1 and "llama-completion was stopped: lowkv can't pack 2 of 2 layers" in last, run.both
    assert "head_dim 40" in last and "not for all" in last, last
    run = lowkv("run", "--partial", "--", COMPLETION.with_name("llama-bench"), "-m", none, "-p", 0, "-n", 2, "-r", 1)
    assert run.code == 1 and "llama-bench ended (status 0): lowkv can't pack 2 of 2 layers" in run.err, run.both


@pytest.mark.parametrize("scheme, code", [
    ("kivi2,layer.0=token-2-row/token-2-g32", 0), ("k=token-2-row,v=token-2-g32", 1)])
def test_partial_counts_the_layers_of_two_caches(tmp_path, scheme, code):
    """Gemma 2's: that of the layers that slide, 0 here, is decided first. Codecs of whole rows take heads of 256."""
    wide = models.gemma2(tmp_path / "wide.gguf", head_dim=320, layers=2)
    run = lowkv("run", "--partial", "--scheme", scheme, "--", COMPLETION, "-m", wide, *ASK)
    assert run.code == code, run.both
    assert ("nothing is packed" in run.err) == (code == 1), run.both


@pytest.mark.parametrize("program, options", [
    ("llama-completion", ("-ngl", 10, *ASK)), ("llama-completion", ("-ngl", 30, *ASK)),
    ("llama-bench", ("-ngl", "0,99", "-p", 0, "-n", 2, "-r", 1, "-t", 1))])
def test_layers_in_other_memory_stop_the_program(program, options):
    words = ("--", COMPLETION.with_name(program), "-m", MODEL, *options)
    run = lowkv("run", *words)
    assert run.code == 1, run.both
    assert "lowkv can't pack every layer: the KV cache is in CPU memory" in run.err.strip().splitlines()[-1], run.both
    run = lowkv("run", "--partial", *words)
    assert run.code == 0, run.both


HINDERING = {"LLAMA_ARG_FLASH_ATTN": "off", "LLAMA_ARG_N_GPU_LAYERS": "0", "LLAMA_ARG_KV_OFFLOAD": "false",
             "LLAMA_ARG_NO_KV_OFFLOAD": "1", "LLAMA_ARG_CACHE_TYPE_K": "q8_0", "LLAMA_ARG_CACHE_TYPE_V": "q4_0"}


@pytest.mark.parametrize("name, value", HINDERING.items())
def test_a_variable_that_keeps_the_cache_away_starts_nothing(name, value):
    run = lowkv("run", "--", COMPLETION, "-m", MODEL, *ASK, **{name: value})
    assert run.code == 2, run.both
    assert run.both == f"lowkv: {name}={value} keeps the cache away from lowkv: unset it\n"


def test_a_variable_counts_where_it_is_read():
    run = lowkv("run", "--", COMPLETION, "-m", MODEL, "-fa", "on", "-ngl", 99, *ASK, LLAMA_ARG_FLASH_ATTN="off",
                LLAMA_ARG_N_GPU_LAYERS="0", LLAMA_ARG_CACHE_TYPE_K="f16", LLAMA_ARG_KV_OFFLOAD="1")
    assert run.code == 0, run.both
    run.said("lowkv: active: .* 30 layers")
    bench = lowkv("run", "--", COMPLETION.with_name("llama-bench"), "-m", MODEL, "-p", 0, "-n", 2, "-r", 1, "-t", 1,
                  LLAMA_ARG_FLASH_ATTN="off")
    assert bench.code == 0, bench.both
    bench.said("lowkv: active: .* 30 layers")


@pytest.mark.parametrize("words, env", [
    (("-m", MODEL), {}), ((f"--model={MODEL}",), {}), ((), {"LLAMA_ARG_MODEL": MODEL})])
def test_an_override_beyond_the_model_starts_nothing(words, env):
    run = lowkv("run", "--scheme", "lowkv2.8,layer.40=kivi4", "--", COMPLETION, *words, *ASK, **env)
    assert run.code == 2, run.both
    assert "override of layer 40, but this model has 30 layers, numbered 0 to 29" in run.err, run.both
    assert len(run.both.strip().splitlines()) == 1, run.both


def verdicts(run):
    """What `lowkv run` and the plug-in say of a program, but for its threads on a busy machine."""
    return [line for line in run.both.splitlines() if "lowkv:" in line and "other programs keep" not in line]


def test_a_model_that_is_not_there_is_the_programs_affair():
    run = lowkv("run", "--scheme", "lowkv2.8,layer.40=kivi4", "--", COMPLETION, "-m", "/no/such.gguf", *ASK)
    # Its own words are not asked for: stock llama-completion may end before its logger has said any.
    assert run.code == 1 and not verdicts(run), run.both


@pytest.mark.parametrize("words, code", [
    ((COMPLETION, "-m", "/no/such.gguf", *ASK), 1), ((COMPLETION, "-m", MODEL, "--no-such-option"), 1),
    ((COMPLETION, "-m", MODEL, "-f", "/no/such.txt"), 1),
    ((COMPLETION.with_name("llama-bench"), "-m", "/no/such.gguf"), 1), (("sh", "-c", "exit 7"), 7)])
def test_a_program_that_fails_by_itself_has_its_own_words(words, code):
    run = lowkv("run", "--", *words)
    assert run.code == code and not verdicts(run), run.both


def test_a_program_that_works_without_a_cache_fails():
    run = lowkv("run", "--", "sh", "-c", "exit 0")
    assert run.code == 1, run.both
    assert "lowkv: sh ended (status 0): its cache was never lowkv's" in run.err, run.both
