"""`lowkv run`: a stock program whose cache is packed, or a message and no program."""

import http.client
import re
import subprocess
from pathlib import Path

import plugin_models as models
import pytest
from models import decoder
from plugin_tools import BUILD, MODEL, PATHS, ROOT, assert_same_text, complete, free_port, server
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
    run = lowkv("run", "--partial", "--", COMPLETION, "-m", none, "-p", "a", "-n", -1, "--ignore-eos",
                "--context-shift", "-no-cnv", "-t", 1)
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


@pytest.mark.parametrize("name, layers", [
    ("deepseek2-27", 27), pytest.param("kimi-k2", 61, marks=pytest.mark.long),
    pytest.param("glm-4.7-flash", 47, marks=pytest.mark.long)])
def test_latent_attention_is_packed(tmp_path, name, layers):
    model = models.write_model(name, tmp_path / f"{name}.gguf")
    run = lowkv("run", "--", COMPLETION, "-m", model, *ASK)
    assert run.code == 0, run.both
    run.said(rf"lowkv: active: scheme lowkv2.8, {layers} layers, {layers * 1152} -> ")
    # One that turns keys can't pack them, and the program runs as stock does.
    texts = {}
    for scheme in (None, "turboquant3"):
        by_hand = complete(tokens=24, model=model, scheme=scheme)
        assert by_hand.code == 0 and "ABORT" not in by_hand.both and "lowkv: active" not in by_hand.both, by_hand.both
        texts[scheme] = by_hand.out
    by_hand.said(rf"lowkv: NOT active for {layers} of {layers} layers, which stay f16: token-3-\S+ turns keys")
    assert_same_text(texts[None], texts["turboquant3"], at_least=20)


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


# Its log goes nowhere, to stdout, or to people alone.
QUIET = [(), ("-lv", 0), ("--log-disable",), ("--log-jsonl",), ("-v",)]


@pytest.mark.parametrize("quiet", QUIET)
@pytest.mark.parametrize("partial", [(), ("--partial",)])
def test_a_server_whose_whole_cache_is_elsewhere_is_stopped_whatever_it_logs(partial, quiet):
    run = lowkv("run", "--timeout", 20, *partial, "--", COMPLETION.with_name("llama-server"), "-m", MODEL, "-t", 1,
                "-ngl", 1, *quiet, "--port", free_port(), "--no-ui")
    last = run.err.strip().splitlines()[-1]
    assert run.code == 1 and "lowkv can't pack any layer: the KV cache is in CPU memory" in last, run.both[-3000:]
    assert "(-ngl 1 keeps some there: leave it out)" in last and "none on the device LOWKV" in last, last


@pytest.mark.parametrize("quiet", QUIET[1:4])
def test_a_quiet_server_whose_cache_is_packed_goes_on(tmp_path, quiet):
    tiny = models.llama(tmp_path / "llama.gguf")
    by = (BUILD / "bin/lowkv", "run", "--timeout", 3, "--")
    with server(tmp_path, "-c", 512, *quiet, scheme=None, model=tiny, by=by) as s:
        assert s.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            s.process.wait(5)
        assert s.complete("Once", tokens=4)["timings"]["predicted_n"] == 4
        assert "lowkv: active" in s.log_text()


def test_a_model_without_a_cache_is_not_said_to_have_one(tmp_path):
    encoder = decoder.eurobert(tmp_path / "encoder.gguf")
    run = lowkv("run", "--", COMPLETION.with_name("llama-server"), "-m", encoder, "-t", 1, "--port", free_port(),
                "--no-ui")
    last = run.err.strip().splitlines()[-1]
    assert run.code == 1 and "without the plug-in" not in last and "would have been" not in last, run.both[-3000:]
    assert "an encoder, as for embeddings and reranking, has none: start it without lowkv run" in last, last


@pytest.mark.parametrize("options, words", [
    ((), ("--embeddings", "--pooling", "mean")), (("--if-possible",), ()),
    ((), ("--reranking", "--pooling", "mean"))])
def test_an_encoder_starts_plain_with_one_line(tmp_path, options, words):
    encoder = decoder.eurobert(tmp_path / "encoder.gguf")
    with server(tmp_path, *words, scheme=None, model=encoder, by=(BUILD / "bin/lowkv", "run", *options, "--")) as s:
        assert "embedding" not in words or s.request("POST", "/embedding", {"content": "Once"})[0] == 200
        ours = [line for line in s.log_text().splitlines() if line.startswith("lowkv")]
        assert ours[-1] == "lowkv: the model has no KV cache, so that nothing is packed", ours
        assert len(ours) == 1 or options, ours  # a server of another kind hears of -cram first


def test_a_cache_elsewhere_goes_on_only_if_possible(tmp_path):
    none = models.llama(tmp_path / "llama-40.gguf", head_dim=40)
    run = lowkv("run", "--if-possible", "--", COMPLETION, "-m", none, *ASK)
    assert run.code == 0 and run.out.strip(), run.both
    assert "lowkv: nothing is packed: lowkv can't pack 2 of 2 layers" in run.err, run.both


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


@pytest.mark.parametrize("words, env, said", [
    ((), {"LOWKV_BUDGET": "lots"}, "LOWKV_BUDGET=lots is no size"),
    (("--budget", "lots"), {}, "--budget=lots is no size"),
    (("--scheme", "kivi4"), {"LOWKV_BUDGET": "1GiB"}, "LOWKV_BUDGET is for the schemes"),
    (("--budget", "1GiB"), {"LOWKV_SCHEME": "kivi4"}, "--budget is for the schemes"),
    ((), {"LOWKV_SCHEME": "kivi3"}, 'LOWKV_SCHEME: scheme "kivi3"'),
    (("--scheme", "kivi3"), {"LOWKV_SCHEME": "kivi2"}, 'scheme "kivi3"'),
    ((), {"LOWKV_SCHEME": "kivi2,layer.40=kivi4"}, "LOWKV_SCHEME: kivi2,layer.40=kivi4 has an override of layer 40"),
    ((), {"LOWKV_SCHEME": "kivi2,filter=heavy,keep=50%"},
     "LOWKV_SCHEME=kivi2,filter=heavy,keep=50%: filter=, keep= and"),
    (("--scheme", "kivi2,filter=heavy,keep=50%"), {}, "--scheme kivi2,filter=heavy,keep=50%: filter=, keep= and"),
    ((), {"LOWKV_STATES": "F16"}, "LOWKV_STATES=F16 is neither packed nor f16"),
    ((), {"LOWKV_DEVICE": "npu"}, "LOWKV_DEVICE: there is no device 'npu'"),
    (("--cache-on", "npu"), {}, "--cache-on: there is no device 'npu'"),
    (("--calibration", "/no"), {}, "--calibration: /no: there is no such file"),
    (("--calibration", "/dev/null"), {}, "--calibration: /dev/null: it is no regular file"),
    ((), {"LOWKV_CALIBRATION": "/dev/null"}, "LOWKV_CALIBRATION: /dev/null: it is no regular file"),
    ((), {"LOWKV_CALIBRATION": "/no"}, "LOWKV_CALIBRATION: /no: there is no such file")])
def test_what_is_wrong_is_named_as_it_was_given(words, env, said):
    run = lowkv("run", *words, "--", COMPLETION, "-m", MODEL, *ASK, **env)
    assert run.code in (1, 2) and run.both.startswith(f"lowkv: {said}") and len(run.both.splitlines()) == 1, run.both


# What is no value of them, or why they have none that is wrong.
VARIABLES = {"LOWKV_STATS": None, "LOWKV_VERBOSE": None, "LOWKV_RUN_MARK": None,  # texts
             "LOWKV_PLOT_PYTHON": None, "LOWKV_KEEP_MALLOC": None, "LOWKV_LLAMA_CPP": None,  # not of this command
             "LOWKV_TRIED": None}  # set by it


@pytest.mark.parametrize("name", re.findall(r"^\| `(LOWKV_\w+)`", (ROOT / "docs/reference/variables.md").read_text(),
                                            re.M))
def test_a_wrong_variable_is_named_and_nothing_else(name):
    if VARIABLES.get(name, "") is None:
        pytest.skip("no value of it is wrong")
    run = lowkv("run", "--", COMPLETION, "-m", MODEL, *ASK, **{name: "/vax"})
    assert run.code != 0, run.both
    lines = [line for line in run.both.splitlines() if "/vax" in line]
    assert lines and all(line.startswith((f"lowkv: {name}", "lowkv: the plug-in /vax")) for line in lines), run.both
    assert "--scheme" not in lines[0] and (name == "LOWKV_SCHEME" or "LOWKV_SCHEME" not in lines[0]), lines


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


def said(run):
    """All of a command line that was refused before anything started."""
    assert run.code == 2 and len(run.both.splitlines()) == 1, run.both
    return run.both


WEIGHTS = "puts weights on the device LOWKV, which holds caches only"


@pytest.mark.parametrize("option, value, words", [
    ("-sm", "tensor", "splits layers among devices"), ("-sm", "row", "whole layers only"),
    ("-ot", r"blk\.1\.attn_k.*=LOWKV", WEIGHTS),
    ("-ot", "a=CPU,b=LOWKV", WEIGHTS), ("-otd", "a=LOWKV", WEIGHTS), ("-ctkd", "q8_0", "--scheme says"),
    ("-ctvd", "q4_0", "--scheme says"), ("-devd", "none", "use -devd LOWKV"), ("-ngld", "0", "draft model's"),
    ("-ctk", "q8_0", "--scheme says"), ("-ctv", "q8_0", "--scheme says"), ("-fa", "off", "use -fa on"),
    ("-ngl", "0", "leave it out"), ("-dev", "none", "use -dev LOWKV")])
def test_every_spelling_of_an_option_is_refused_before_the_start(option, value, words):
    """llama-server's own help names them, and the variable."""
    text = lowkv("run", "--", COMPLETION.with_name("llama-server"), "--help").out
    # An entry is names, a placeholder of the value, and what it does, in later lines or behind blanks.
    entries = [entry for entry in re.split(r"^(?=-)", text, flags=re.M) if re.match(rf"(?:\S+, +)*{option}[, ]", entry)]
    assert len(entries) == 1, option
    spellings = re.findall(r"--?[a-z][a-z-]*", re.match(r"(?:--?[a-z-]+, +)*--?[a-z-]+", entries[0]).group())
    assert option in spellings and len(spellings) > 1, entries[0]
    for name in spellings:
        run = lowkv("run", "--", COMPLETION.with_name("llama-server"), "-m", MODEL, name, value)
        assert said(run).startswith(f"lowkv: {option} {value} ") and words in run.both, run.both
    variable = re.search(r"\(env: (\w+)\)", entries[0])
    if variable and option != "-dev":  # `lowkv run` itself names the device
        run = lowkv("run", "--", COMPLETION.with_name("llama-server"), "-m", MODEL, **{variable.group(1): value})
        assert said(run).startswith(f"lowkv: {variable.group(1)}={value} "), run.both


def test_what_a_configuration_file_keeps_away_is_said(tmp_path):
    file = tmp_path / "llama.cpp/config.ini"
    file.parent.mkdir()
    words = ("run", "--", COMPLETION, "-m", MODEL, *ASK)
    for text, why in (("cache-type-k = q8_0", "its cache type is not f16"),
                      ("[default]\nkv-offload = off", "the KV cache is in CPU memory")):
        file.write_text(text + "\n")
        run = lowkv(*words, XDG_CONFIG_HOME=str(tmp_path))
        assert run.code == 1 and why in run.both, run.both


def tools_of_the_source():
    """Those that parse llama.cpp's common options and make a context, with their targets' names."""
    source = Path(PATHS["LOWKV_LLAMA_SOURCE"])
    for file in [*source.glob("tools/*/*.cpp"), *source.glob("tools/mtmd/debug/*.cpp"),
                 *source.glob("examples/*/*.cpp")]:
        text = file.read_text()
        if "common_params_parse(" not in text or not re.search("common_init_from_params|llama_init_from_model", text):
            continue
        yield {"server": "llama-server", "finetune": "llama-finetune", "tokenize": None}.get(
            file.stem, f"llama-{file.stem}")


def test_every_tool_of_the_pinned_llama_cpp_gets_the_device(tmp_path):
    # The server's context is made in another source file than its options are parsed in.
    tools = {tool for tool in tools_of_the_source() if tool} | {"llama-server", "llama-cli"}
    assert len(tools) > 20
    for tool in sorted(tools):
        fake = tmp_path / tool
        fake.write_text('#!/bin/sh\necho "$@"\necho lowkv: active$LOWKV_RUN_MARK >&2\n')
        fake.chmod(0o755)
        run = lowkv("run", "--", fake, "-m", "x", "-n", 1)  # a llama-server without a model is a router
        assert run.code == 0 and "-dev LOWKV" in run.out, (tool, run.both)
    fake = tmp_path / "llama"
    fake.write_text('#!/bin/sh\necho "$@"\necho lowkv: active$LOWKV_RUN_MARK >&2\n')
    fake.chmod(0o755)
    assert lowkv("run", "--", fake, "serve", "-m", "x").out.startswith("serve ")
    assert "-dev LOWKV" in lowkv("run", "--", fake, "cli", "-m", "x").out
    assert "-dev" not in lowkv("run", "--", fake, "bench", "-m", "x").out
    assert lowkv("run", "--", fake, "serve", "-dev", "LOWKV", "-dev", "CUDA0").code == 2
    for simple in ("llama-simple", "llama-simple-chat"):  # they know three options
        fake = tmp_path / simple
        fake.write_text('#!/bin/sh\necho "$@"\necho lowkv: active$LOWKV_RUN_MARK >&2\n')
        fake.chmod(0o755)
        assert lowkv("run", "--", fake, "-m", "x").out == "-m x\n"


@pytest.mark.parametrize("more", [(), ("-v",)])
def test_partial_goes_on_whatever_is_logged(more):
    run = lowkv("run", "--partial", "--", COMPLETION, "-m", MODEL, "-ngl", 20, *more, *ASK)
    assert run.code == 0, run.both[-3000:]


@pytest.mark.parametrize("options, words", [
    (("-fit", "on", "-fitt", 100000000), "-fitt 100000000 asks for more free memory than there is"),
    (("-ngl", 20), "-ngl 20 keeps some there: leave it out")])
def test_the_option_that_keeps_layers_away_is_named(options, words):
    run = lowkv("run", "--", COMPLETION, "-m", MODEL, *options, *ASK)
    last = run.err.strip().splitlines()[-1]
    assert run.code == 1 and words in last and "-nkvo" not in last, run.both[-3000:]


def test_what_a_client_sends_is_not_taken_for_the_plug_ins_words(tmp_path):
    """llama-server quotes in its log what it can't parse."""
    tiny = models.llama(tmp_path / "llama.gguf")
    with server(tmp_path, "-c", 512, scheme=None, model=tiny, by=(BUILD / "bin/lowkv", "run", "--")) as s:
        for words in ("lowkv: NOT active for x", "lowkv: NOT active: nothing is packed", "starting router server"):
            connection = http.client.HTTPConnection("127.0.0.1", s.port, timeout=30)
            connection.request("POST", "/completion", body='{"' + words, headers={"Content-Type": "application/json"})
            assert connection.getresponse().status >= 400
        assert s.complete("Once", tokens=4)["timings"]["predicted_n"] == 4
        log = s.log_text()
    assert "lowkv: NOT active for x" in log and "lowkv: active: scheme" in log and "\x1f" not in log, log


def test_words_of_an_unknown_program_are_its_own(tmp_path):
    script = tmp_path / "serve.sh"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    run = lowkv("run", "--", script, "-h", "0.0.0.0")
    assert run.code == 1 and "never lowkv's" in run.err, run.both
    assert lowkv("run", "--", script, "--help").code == 0
