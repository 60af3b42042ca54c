"""lowkv.llama_cpp without llama-cpp-python: what is refused before it is needed, and where the plug-in is looked
for. tests/e2e/test_llama_cpp_python.py does the rest."""

import importlib.util

import lowkv
import lowkv.llama_cpp as subject
import pytest


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """No plug-in named, and no command on the PATH."""
    monkeypatch.delenv("LOWKV_PLUGIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="llama-cpp-python is there")
def test_without_llama_cpp_python():
    with pytest.raises(lowkv.Error, match="needs llama-cpp-python: pip install llama-cpp-python"):
        subject.enable()


@pytest.mark.parametrize("scheme", [None, 2, ""])
def test_a_scheme_is_text(scheme):
    with pytest.raises(lowkv.Error, match=r"scheme must be a str such as 'lowkv2\.8'"):
        subject.enable(scheme)


def test_calibrations_are_files_without_colons(tmp_path):
    with pytest.raises(lowkv.Error, match=r"there is no file .*none; expected one that `lowkv calibrate` wrote"):
        subject.enable("kvquant3", calibration=tmp_path / "none")
    (tmp_path / "a:b").touch()
    with pytest.raises(lowkv.Error, match="a:b has a colon"):
        subject.enable("kvquant3", calibration=[str(tmp_path / "a:b")])


def test_nothing_is_told_before_it_is_enabled():
    for ask in (subject.active, subject.stats):
        with pytest.raises(lowkv.Error, match=r"enable\(\) has not been called"):
            ask()


def test_a_named_plugin_goes_first(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).touch()
    monkeypatch.setenv("LOWKV_PLUGIN", str(tmp_path / "second"))
    assert subject.plugin_path(tmp_path / "first") == tmp_path / "first"
    assert subject.plugin_path() == tmp_path / "second"
    assert lowkv.plugin_path() == tmp_path / "second"
    wrong = r"plugin=.*third: there is no file .*expected the plug-in, libggml-lowkv\.so"
    with pytest.raises(lowkv.Error, match=wrong):
        subject.plugin_path(tmp_path / "third")
    monkeypatch.setenv("LOWKV_PLUGIN", str(tmp_path / "third"))
    with pytest.raises(lowkv.Error, match=r"LOWKV_PLUGIN=.*third: there is no file"):
        subject.plugin_path()


def test_one_beside_the_command_is_taken(tmp_path):
    with pytest.raises(lowkv.Error, match=r"there is no libggml-lowkv\.so: install lowkv.s wheel"):
        subject.plugin_path()
    (tmp_path / "bin/lowkv").touch(0o755)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libggml-lowkv.so").touch()
    assert subject.plugin_path() == tmp_path / "lib/libggml-lowkv.so"
