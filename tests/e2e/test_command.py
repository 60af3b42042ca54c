"""The command `lowkv` on the real model: what a user types, and what goes wrong when it is wrong."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import plugin_models as models
import pytest
from plugin_tools import BUILD, MODEL, PATHS, ROOT, Run, environment

sys.path.insert(0, str(ROOT / "deps"))
import scheme_tables

COMMAND = BUILD / "bin/lowkv"
TEXT = PATHS["LOWKV_DEMO_TEXT"]


def lowkv(*args, stdin="", **env):
    done = subprocess.run([str(COMMAND), *map(str, args)], env=environment(None, **env),
                          input=stdin, capture_output=True, text=True, errors="replace", timeout=300)
    return Run(done)


@pytest.mark.long
def test_compare_measures_against_exact(tmp_path):
    file = tmp_path / "compare.json"
    run = lowkv("compare", "-m", MODEL, "-f", TEXT, "--schemes", "exact,kivi4,kivi2", "--stock",
                "f16", "--tokens", 512, "--chunk", 64, "--skip", 256, "--no-speed", "--json", file,
                "--positions")
    assert run.code == 0, run.both
    found = json.loads(file.read_text())
    rows = {row["scheme"]: row for row in found["rows"]}
    for row in rows.values():
        assert len(row["klds"]) == found["positions"]
        assert statistics.mean(row["klds"]) == pytest.approx(row["mean_kld"])
    assert set(rows) == {"exact", "kivi4", "kivi2", "stock f16"}
    assert rows["exact"]["reference"] and rows["exact"]["compression"] == pytest.approx(1, abs=0.1)
    assert 0 < rows["stock f16"]["mean_kld"] < 0.01
    assert rows["kivi4"]["mean_kld"] < rows["kivi2"]["mean_kld"] < 0.3
    assert rows["kivi2"]["kv_bytes"] < rows["kivi4"]["kv_bytes"] < rows["exact"]["kv_bytes"]


def test_generate_streams_from_a_packed_cache():
    run = lowkv("generate", "-m", MODEL, "--no-chat", "-n", 16, "--temp", 0, "--scheme", "kivi2",
                stdin=Path(TEXT).read_text()[:2500])
    assert run.code == 0, run.both
    assert run.out.strip()
    run.said(r"packed")


def test_generate_refuses_what_does_not_fit():
    run = lowkv("generate", "-m", MODEL, "-c", 256, "-f", TEXT)
    assert run.code != 0 and not run.out.strip()
    run.said("256")


@pytest.mark.parametrize("args, words", [
    (("generate", "-m", "/no/such.gguf", "-p", "x"), "/no/such.gguf"),
    (("compare", "-m", MODEL, "-f", "/no/such.txt"), "/no/such.txt"),
    (("generate", "-m", MODEL, "-p", "x", "--scheme", "kivi3"), "kivi2"),
    (("schemes", "k=channel-5-g32,v=token-2-g32"), "2, 3, 4"),
    (("schemes", "k=channel-2-g32-normal,v=token-2-g32"), "scale per token"),
    (("schemes", "k=token-2-g32,v=token-2-g32-mean"), "mean is for keys"),
    (("schemes", "lowkv5"), "lowkv2.8"),
    (("bench", "attention", "--quick"), "bench is a program of its own, lowkv-bench"),
    (("nonsense",), "nonsense"),
])
def test_wrong_arguments_say_what_is_right(args, words):
    run = lowkv(*args)
    assert run.code not in (0, -6, -11), run.both
    assert words in run.both, run.both


@pytest.mark.parametrize("args", [
    ("generate", "-m", MODEL, "-p", "x", "-n", 2),
    ("compare", "-m", MODEL, "-f", TEXT, "--tokens", 300, "--chunk", 64, "--no-speed"),
])
def test_an_implementation_that_is_not_there_fails(args):
    run = lowkv(*args, LOWKV_IMPLEMENTATION="nonsense")
    assert run.code == 1 and not run.out.strip(), run.both
    run.said("nonsense")


def test_environment_sets_the_default_scheme():
    args = ("generate", "-m", MODEL, "--no-chat", "-p", "Once upon a time", "-n", 2)
    lowkv(*args, LOWKV_SCHEME="kivi4").said("scheme kivi4")
    lowkv(*args, "--scheme", "kivi2", LOWKV_SCHEME="kivi4").said("scheme kivi2")
    for command in (args, ("run", "--", "true")):
        wrong = lowkv(*command, LOWKV_SCHEME="kivi3")
        assert wrong.code == 2 and "kivi2" in wrong.both, wrong.both


def test_an_empty_text_is_said_to_be_empty(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    run = lowkv("compare", "-m", MODEL, "-f", empty)
    assert run.code == 1 and f"the text file {empty} is empty" in run.both, run.both


PRESETS = {preset["name"]: preset for preset in scheme_tables.ask(BUILD / "bin/lowkv", "schemes")["presets"]}


def explanation(scheme):
    """What `lowkv schemes SCHEME` says: one line of words, and label -> text of the first ones."""
    run = lowkv("schemes", scheme)
    assert run.code == 0, run.both
    assert max(map(len, run.out.split("Bits per number")[0].splitlines())) <= 100, run.out
    labels = dict(re.findall(r"^  ([a-z]+) +(\S.*(?:\n {11}.*)*)", run.out, re.M))
    return " ".join(run.out.split()), {k: " ".join(v.split()) for k, v in labels.items()}


def listing(*args):
    """What `lowkv schemes` says, the presets of its table and what each is for."""
    out = lowkv("schemes", *args).out
    table = re.findall(r"^\| (\S+) +\| +[\d.]+ ", out, re.M)
    uses = re.findall(r"^  (\S+) +(\S.*)", out.split("What each is for:")[1].split("The default")[0], re.M)
    return out, table, dict(uses)


def test_schemes_lists_what_one_would_use_and_all_presets_if_asked():
    out, table, uses = listing()
    assert table == list(uses) == list(PRESETS)[:6] and "axis" not in out
    assert f"{len(PRESETS) - 6} more presets" in out
    out, table, uses = listing("--all")
    assert table == list(uses) == list(PRESETS) and "more presets" not in out
    assert [name for name in PRESETS if "(the default)" in uses[name]] == ["lowkv2.8"]
    assert re.search(r"^    hadamard +token: ", out, re.M), out
    assert "(the default)" in lowkv("schemes", "lowkv2.8").out
    assert "(the default)" not in lowkv("schemes", "lowkv3").out
    assert max(map(len, out.splitlines())) <= 100, out


@pytest.mark.parametrize("name", PRESETS)
def test_schemes_explains_each_preset(name):
    preset = PRESETS[name]
    _, said = explanation(name)
    out = lowkv("schemes", name).out
    size = next(size for size in preset["sizes"] if size["head_dim"] == 64)
    bits = sum(sum(scheme_tables.bits_of(preset, part, size).values()) for part in ("keys", "values")) / 2
    assert preset["source"] in said["source"] and re.search(rf"^\| 64 .* {bits:.2f} \|$", out, re.M), out
    calibrated = name.startswith(("skvq", "kvquant"))
    assert ("lowkv calibrate" if calibrated else "no calibration") in said["data"]
    assert ("measured against" if name == "exact" else
            f"mean KLD {preset['mean_kld']}, " if preset["mean_kld"] else "known of presets only") in said["quality"]
    assert listing("--all")[2][name].endswith(said["use"])


def test_schemes_says_how_to_measure_what_was_not_measured():
    _, said = explanation("kivi2,window=64")
    assert said["quality"].startswith("known of presets only")
    assert '--schemes "exact,kivi2+window=64"' in said["quality"]


@pytest.mark.parametrize("scheme, keys, values", [
    ("k=token-3-head-normal-hadamard-mean,v=exact",
     "token-3-head-normal-hadamard-mean token: GROUP channels of one token share a scale 3: eight levels head: token: "
     "all channels of a head normal: ", "exact: f16, as they come"),
    ("lowkv2.8", "sorted-5322-head-trellis-2rows-weighted sorted: keys, 4211 and the like, head: ",
     "token-2-head-trellis-hadamard-unbiased-e5m3 token: "),
    ("kvquant3-1%", "channel-3-static-learned-1%-pre channel: ", "token-3-row-learned-1% token: "),
])
def test_schemes_puts_any_codec_into_words(scheme, keys, values):
    """Word by word, as `lowkv schemes --all` does."""
    text, said = explanation(scheme)
    assert said["keys"].startswith(keys) and said["values"].startswith(values), text
    everything = " ".join(lowkv("schemes", "--all").out.split())
    for codec in (said["keys"], said["values"]):
        words, _, meanings = codec.partition(" ")
        for word in re.findall(r"(?<= )([a-z]\S+): ", meanings):
            assert word not in words.split("-") or f" {word} " in everything, word
    if "=" in scheme:
        assert "no preset" in said["source"] and "use" not in said, text
        assert scheme.replace(",", "+") in said["quality"], text


def test_schemes_explains_each_layer():
    text, _ = explanation("lowkv2,layer.3=kivi2")
    assert "Layer 3: keys channel-2-g32 channel: GROUP tokens of one channel share a scale 2: four levels" in text


def test_schemes_says_what_a_filter_does():
    words, _ = explanation("kivi2,filter=heavy,keep=5%,evict=50%")
    for word in ("window=128: the newest N", "sinks=5: ", "keep=5%: so many", "evict=50%: ", "filter=heavy: which"):
        assert word in words, words
    assert "for the C++ library only" in words


def test_doctor():
    run = lowkv("doctor")
    assert run.code == 0, run.both
    run.said("implementation")
    assert re.search(r"^ok +plug-in +\S+ loads, and computes rightly$", run.out, re.M), run.out
    assert lowkv("doctor", LOWKV_IMPLEMENTATION="vax").code != 0


def test_devices():
    run = lowkv("doctor")
    assert run.code == 0, run.both
    for kind, option, none in (("opencl", "LOWKV_OPENCL=ON", "No OpenCL platform"),
                               ("cuda", "LOWKV_CUDA=ON", "There is no CUDA device")):
        assert option in run.out or f"{kind}:" in run.out or none in run.out
        if option in run.out:  # refused by name, with what to do
            there = lowkv("doctor", LOWKV_DEVICE=kind)
            assert there.code != 0 and f"device '{kind}': this build has none such" in there.out, there.both
    run = lowkv("doctor", LOWKV_DEVICE="npu")
    assert run.code != 0 and "there is no device 'npu': it is 'cpu'" in run.out, run.both


def test_doctor_names_the_variables_that_keep_the_cache_away():
    wrong = {"LLAMA_ARG_FLASH_ATTN": "off", "LLAMA_ARG_NO_KV_OFFLOAD": "1", "LLAMA_ARG_DEVICE": "none"}
    run = lowkv("doctor", **wrong, LLAMA_ARG_N_GPU_LAYERS="99")
    assert run.code == 1 and "3 problems." in run.out, run.both
    for name, value in wrong.items():
        assert f"{name}={value} keeps the cache away from lowkv" in run.out, run.both


def test_run_serves_and_fails_closed(tmp_path):
    tools = Path(PATHS["LOWKV_LLAMA_BUILD"])
    args = ("-m", MODEL, "-p", "Once", "-n", 4, "-no-cnv", "-t", 1)
    run = lowkv("run", "--scheme", "kivi4", "--", tools / "llama-completion", *args)
    assert run.code == 0, run.both
    run.said("active: scheme kivi4")
    assert lowkv("run", "--", tools / "llama-completion", *args, "-ctk", "q8_0").code != 0
    assert lowkv("run", "--", "/no/such/tool").code != 0


def test_texts_must_be_text(tmp_path):
    text = tmp_path / "text"
    for data, byte in ((b"abc\0def", "byte 3 is 0"), (b"ab\xff", "byte 2 is 255"), (b"ab\xe2\x82", "byte 2 is 226")):
        text.write_bytes(data)
        run = lowkv("generate", "-m", MODEL, "-f", text, "-n", 1)
        assert run.code == 1 and f"{text} is no UTF-8 text: {byte}" in run.err, run.both


def test_what_is_read_is_not_overwritten(tmp_path):
    text, model = tmp_path / "text", tmp_path / "model.gguf"
    text.write_text("some words")
    model.write_bytes(Path(MODEL).read_bytes()[:1 << 20])
    for args in (("compare", "-m", model, "-f", text, "--json", text),
                 ("plan", "-m", model, "--json", tmp_path / "." / "model.gguf"),
                 ("calibrate", "-m", model, "--text", text, "--scheme", "kvquant2", "-o", model)):
        run = lowkv(*args)
        assert run.code == 2 and "it is what is read" in run.err, run.both
    assert text.read_text() == "some words" and model.stat().st_size == 1 << 20


def test_layers_that_the_model_lacks_are_refused():
    for args in (("generate", "-p", "hi", "-n", 1, "--scheme", "lowkv2,layer.30=kivi4"),
                 ("plan", "--schemes", "lowkv2+layer.0-30=kivi4")):
        run = lowkv(args[0], "-m", MODEL, *args[1:])
        assert run.code != 0 and "override of layer 30, but this model has 30 layers, numbered 0 to 29" in run.err


@pytest.mark.parametrize("codec, words", [
    ("token-2-g32-hadamrd", '"hadamrd" at position 15 does not belong to a codec; legal: axis-bits-group, then'),
    ("token-2-g32-mean-normal", '"normal" at position 20 stands in the wrong place; legal: axis-bits-group, then')])
def test_words_of_a_codec(codec, words):
    run = lowkv("schemes", f"k={codec},v=token-2-g32")
    assert run.code != 0 and words in run.err, run.both


def test_doctor_proves_it_on_the_model(tmp_path):
    run = lowkv("doctor", "-m", MODEL)
    assert run.code == 0, run.both
    line = run.said(r"scheme lowkv2.8: 30 of 30 layers packed, (\d+) of (\d+) cells packed, "
                    r"mean KLD to exact ([\d.]+)")
    packed, cells, divergence = int(line.group(1)), int(line.group(2)), float(line.group(3))
    assert 0 < packed < cells and 0 < divergence < 0.01
    run = lowkv("doctor", "-m", MODEL, "--scheme", "lowkv2.8,layer.3=exact")
    assert run.code == 0, run.both
    run.said("0 to [1-9][0-9]* of")


def test_doctor_of_a_scheme_that_packs_nothing():
    run = lowkv("doctor", "-m", MODEL, "-s", "exact")
    assert run.code == 0 and "layers packed" not in run.out, run.both
    run.said(r"ok +cache +scheme exact: 30 of 30 layers held exactly, \d+ cells, none packed: it is to compare with\n")


def test_doctor_names_the_layers_that_stay_f16(tmp_path):
    wide = models.llama(tmp_path / "wide.gguf", head_dim=256, heads=33, kv_heads=33, width=64)
    run = lowkv("doctor", "-m", wide, "--scheme", "kivi2,layer.1=token-2-row/token-2-g32")
    assert run.code == 1, run.both
    run.said(r"PROBLEM +cache +.*1 of 2 layers packed")
    run.said(r"1 stay f16: .*8448 channels in a row are not supported")
    run = lowkv("doctor", "-m", models.llama(tmp_path / "llama-40.gguf", head_dim=40))
    assert run.code == 1 and "0 of 2 layers packed" in run.out and "head_dim 40" in run.out, run.both


def test_doctor_checks_overrides_and_calibrations(tmp_path):
    run = lowkv("doctor", "-m", MODEL, "--scheme", "lowkv2.8,layer.30=kivi4")
    assert run.code == 1 and "override of layer 30, but this model has 30 layers" in run.out, run.both
    run = lowkv("doctor", "-m", MODEL, "--scheme", "skvq-k2v2")
    assert run.code == 1 and "needs a calibration of the model" in run.out, run.both
    assert lowkv("doctor", "--scheme", "kivi3").code == 2
