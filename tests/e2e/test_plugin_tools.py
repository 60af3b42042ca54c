"""The plug-in in stock llama.cpp's command line tools, on the real model."""

import re
import subprocess

import plugin_models as models
import pytest
from plugin_tools import MODEL, PLUGIN, TOOLS, assert_same_text, complete, environment, tool

LEGAL = r"legal: exact, lowkv1.5, lowkv2, lowkv2.8, lowkv3, lowkv4, kivi2, kivi4"


@pytest.mark.parametrize("scheme, packed", [
    ("exact", 23040), ("kivi4", 7200), ("kivi2", 4320), ("lowkv2.8", 4005), ("lowkv2", 3285),
    ("lowkv1.5", 2205), ("turboquant3-qr", 4680),
    ("k=channel-2-g32-search,v=token-2-g32", 4320)])
def test_active_line(scheme, packed):
    run = complete(tokens=4, scheme=scheme)
    assert run.code == 0
    line = run.said(r"lowkv: active: scheme (\S+), 30 layers, 23040 -> (\d+) bytes per token "
                    r"\((\S+)x smaller\), implementation (\w+)")
    assert line.group(1) == scheme and int(line.group(2)) == packed
    assert float(line.group(3)) == pytest.approx(23040 / packed, abs=0.05)


def test_default_scheme_is_the_flagship():
    run = complete(tokens=2, scheme="", env={"GGML_BACKEND_PATH": PLUGIN})
    run.said("lowkv: active: scheme lowkv2.8")


@pytest.mark.parametrize("scheme", ["kivi2", "lowkv2.8"])
def test_kv_buffer_line_shows_the_packed_size(scheme):
    run = complete("-c", 8192, "-v", tokens=2, scheme=scheme)
    sizes = [float(m) for m in re.findall(r"LOWKV KV buffer size =\s+(\S+) MiB", run.both)]
    assert 30 < max(sizes) < 45  # f16: 180


def test_end_statistics():
    run = complete("-c", 1024, tokens=300, scheme="kivi2", env={"LOWKV_VERBOSE": "1"})
    line = run.said(r"lowkv: cache freed: .*cells packed (\d+), exact (\d+),.*reopened blocks (\d+)")
    packed, exact, reopened = map(int, line.groups())
    # 304 tokens; the newest 128, a partial block and the sinks' block stay exact.
    assert 96 <= packed <= 160 and packed + exact >= 290 and reopened == 0


@pytest.mark.parametrize("name", ["llama-completion", "llama-bench"])
def test_wrong_scheme_stops(name):
    args = ("-p", "a", "-n", 2, "-no-cnv") if name == "llama-completion" else ("-p", 0, "-n", 2, "-r", 1)
    run = tool(name, *args, scheme="kivi3", device=name != "llama-bench")
    assert run.code != 0
    run.said(r"LOWKV_SCHEME=kivi3 is not a scheme")
    run.said(LEGAL)
    assert "active: scheme" not in run.both


@pytest.mark.parametrize("name", ["llama-completion", "llama-bench"])
def test_a_layer_beyond_the_model_makes_no_context(name):
    args = ("-p", "a", "-n", 2, "-no-cnv") if name == "llama-completion" else ("-p", 0, "-n", 2, "-r", 1)
    run = tool(name, *args, scheme="lowkv2.8,layer.40=exact", device=name != "llama-bench")
    assert run.code != 0
    run.said(r"lowkv: the scheme lowkv2.8,layer.40=exact speaks of layer 40, but the model's last layer with a cache "
             r"is 29\n")
    assert "active: scheme" not in run.both
    fits = tool(name, *args, scheme="lowkv2.8,layer.29=exact", device=name != "llama-bench")
    assert fits.code == 0
    fits.said("lowkv: active: scheme lowkv2.8,layer.29=exact")


def test_layers_of_two_caches_are_one_models(tmp_path):
    """Gemma 2's caches are made one by one: the layers that slide, and the others."""
    model = models.gemma2(tmp_path / "gemma2.gguf")
    run = complete(tokens=2, scheme="kivi2,layer.3=kivi4", model=model)
    assert run.code == 0, run.both
    run.said("lowkv: active: scheme kivi2,layer.3=kivi4")
    run = complete(tokens=2, scheme="kivi2,layer.4=kivi4", model=model)
    assert run.code != 0
    run.said("speaks of layer 4, but the model's last layer with a cache is 3")


def test_a_filter_is_refused_not_ignored():
    run = complete(tokens=2, scheme="kivi2,filter=heavy,keep=5%")
    assert run.code != 0
    run.said(r"filter=, keep= and evict= are not served in llama.cpp")
    assert "is not a scheme" not in run.both
    assert "active: scheme" not in run.both


def test_wrong_implementation_stops():
    run = complete(tokens=2, scheme="kivi2", env={"LOWKV_IMPLEMENTATION": "vax"})
    assert run.code != 0
    run.said(r"LOWKV_IMPLEMENTATION=vax is not in this build; this CPU runs: ")
    assert "active: scheme" not in run.both


def test_bench_loads_it_without_dev():
    run = tool("llama-bench", "-p", 0, "-n", 4, "-r", 1, scheme="kivi2", device=False)
    assert run.code == 0
    run.said("lowkv: active: scheme kivi2")


@pytest.mark.parametrize("options, like, why", [
    (("-fa", "off"), (), r"NOT active for 30 of 30 layers.*-fa off"),
    (("-ctk", "q8_0", "-ctv", "q8_0"), (), r"NOT active for 30 of 30 layers.*-ctk"),
    # llama.cpp turns flash attention off when the cache is not on the layers' device.
    (("-nkvo",), ("-fa", "off"), r"NOT active: the KV cache is in CPU memory.*-nkvo"),
    (("-ngl", "0"), (), r"NOT active: the KV cache is in CPU memory.*-ngl"),
])
def test_options_that_turn_it_off_are_reported_and_right(options, like, why):
    stock = complete(*options, *like, tokens=24)
    ours = complete(*options, tokens=24, scheme="kivi2")
    assert ours.code == 0
    ours.said(why)
    assert_same_text(ours.out, stock.out, at_least=60)


@pytest.mark.long
@pytest.mark.parametrize("scheme, cells", [
    ("kivi2,window=32", 256), ("lowkv3,window=32", 512)])
def test_context_shift_goes_on_packed(scheme, cells):
    run = complete("-c", cells, "--context-shift", tokens=cells + 150, scheme=scheme,
                   env={"LOWKV_VERBOSE": "1"})
    assert run.code == 0
    line = run.said(r"cells packed (\d+), exact (\d+)")
    assert int(line.group(1)) >= 64
    words = run.out.split()
    assert len(words) > 100  # text, not noise: shifted keys that were wrong would end in symbols
    assert sum(w.strip(".,!?'\"()-;:*").isalpha() for w in words) > 0.6 * len(words)


def test_another_ggml_is_refused(tmp_path):
    """A ggml that reports another version: the plug-in names both and stays out."""
    fake = tmp_path / "version.c"
    fake.write_text('const char * ggml_version(void) { return "9.9.9"; }\n')
    library = tmp_path / "version.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, fake], check=True)
    command = [TOOLS / "llama-completion", "-m", MODEL, "-dev", "LOWKV", "-p", "a", "-n", "1"]
    env = environment("kivi2", LD_PRELOAD=str(library))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "but this program has ggml 9.9.9" in done.stderr + done.stdout
