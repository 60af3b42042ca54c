"""The plug-in's DLL in llama.cpp for Windows: the pinned one, built by MinGW as the plug-in is, and DLLs that others
have built with MSVC."""

from pathlib import Path

import plugin_tools
import pytest
from plugin_tools import PATHS, assert_same_text
from wine import BUILD, MODEL, run, windows

STORY = ("The old lighthouse keeper counted seven ships, two whales and a red balloon before breakfast. "
         "He wrote them all down in a green book, closed the window and went to feed the cat. ")
PLUGIN = BUILD / "lib/ggml-lowkv.dll"
LLAMA = {"mingw": Path(PATHS["LOWKV_LLAMA_WINDOWS"]) / "libllama.dll",
         "msvc": Path(PATHS["LOWKV_LLAMA_MSVC"]) / "llama.dll"}


@pytest.fixture(params=LLAMA)
def llama(request):
    return LLAMA[request.param]


def write(llama, prompt, scheme=None, plugin=PLUGIN, **env):
    """What the small host (host.cpp) continues a prompt with."""
    if scheme:
        env.update(LOWKV_SCHEME=scheme, GGML_BACKEND_PATH=windows(plugin))
    done = run(BUILD / "bin/test_windows_host.exe", windows(llama), windows(MODEL), 32, prompt, env=env)
    assert done.code == 0, done.both[-3000:]
    return done


def test_exact_writes_what_stock_writes(llama):
    ours = write(llama, STORY * 8, "exact")
    ours.said("lowkv: active: scheme exact")
    assert_same_text(ours.out, write(llama, STORY * 8).out, at_least=100)


def test_exact_writes_what_linux_writes(llama):
    linux = plugin_tools.complete(prompt=STORY * 8, scheme="exact").out
    ours = write(llama, STORY * 8, "exact")
    assert_same_text(ours.out, linux[linux.index(STORY * 8) + len(STORY * 8):], at_least=100)


def test_packed_cache_is_read_well(llama):
    told = write(llama, STORY * 14, "lowkv2.8", LOWKV_VERBOSE="1")
    told.said("lowkv: active: scheme lowkv2.8, 30 layers, 23040 -> 4005 bytes per token")
    assert int(told.said(r"cache freed: .*cells packed (\d+)").group(1)) >= 256
    assert STORY.startswith(told.out.lstrip()[:90]), told.out


def test_wrong_scheme_is_refused(llama):
    run(BUILD / "bin/test_windows_host.exe", windows(llama), windows(MODEL), 4, "Once",
        env={"LOWKV_SCHEME": "lowkv9", "GGML_BACKEND_PATH": windows(PLUGIN)}).said("lowkv9")


def test_figures_are_written_where_the_name_has_other_letters(llama, tmp_path):
    write(llama, STORY, "lowkv2", LOWKV_STATS=windows(tmp_path / "Zähler 数.txt"))
    assert "lowkv_cache_layers{" in (tmp_path / "Zähler 数.txt").read_text()
