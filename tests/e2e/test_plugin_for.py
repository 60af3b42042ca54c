"""deps/plugin_for.py: what it finds at a path. What it builds is tested in tests/matrix."""

import subprocess
import sys
from pathlib import Path

import pytest
from plugin_tools import BUILD, MODEL, PATHS, PLUGIN, TOOLS, environment

TREE = Path(PATHS["LOWKV_LLAMA_SOURCE"])
OWN = PATHS["LOWKV_GGML_VERSION"]
ROOT = Path(__file__).resolve().parents[2]


SCRIPT = [sys.executable, str(ROOT / "deps/plugin_for.py")]


def plugin_for(path, cache, *words):
    return subprocess.run([*SCRIPT, *words, "--for", str(path)], env=environment(None, LOWKV_CACHE_DIR=str(cache)),
                          capture_output=True, text=True, timeout=120)


def look(path, cache):
    """What would be built for a path, and for which ggml: an empty cache knows no plug-in that `make` has built."""
    done = plugin_for(path, cache, "--cached")
    assert done.returncode == 1 and done.stdout == ""
    return done.stderr


def fake_ggml(folder, version):
    """Two libraries that look like ggml's and tell a version."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "version.c"
    source.write_text(f'const char * ggml_version(void) {{ return "{version}"; }}\n')
    for name in ("ggml-base", "ggml"):
        subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,lib{name}.so.0", "-o", folder / f"lib{name}.so",
                        source], check=True)
    return folder


@pytest.mark.parametrize("path", [TOOLS, TOOLS / "llama-completion", TOOLS / "libllama.so", TREE],
                         ids=["libraries", "program", "library", "tree"])
def test_finds_the_version(path, tmp_path):
    assert f"no plug-in for {path}, which has ggml {OWN}, is built yet" in look(path, tmp_path)


def test_finds_installations_and_environments(tmp_path):
    prefix = tmp_path / "usr"
    fake_ggml(prefix / "lib", "0.20.0")
    assert "which has ggml 0.20.0" in look(prefix, tmp_path)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    assert "has no llama_cpp" in look(venv, tmp_path)
    site = next(venv.glob("lib/python*/site-packages"))
    fake_ggml(site / "llama_cpp" / "lib", "0.13.1")
    (site / "llama_cpp" / "__init__.py").write_text("raise SystemExit('must not be imported')\n")
    for path in (venv, venv / "bin/python", site / "llama_cpp"):
        assert "which has ggml 0.13.1" in look(path, tmp_path)


def test_refusals_say_what_would_do(tmp_path):
    assert "there is no /nowhere" in look("/nowhere", tmp_path)
    assert "no libggml.so and libggml-base.so in" in look(tmp_path, tmp_path)
    assert "is not linked with libggml.so" in look("/bin/ls", tmp_path)
    assert "lowkv needs 0.11.0 or newer" in look(fake_ggml(tmp_path / "old", "0.10.2"), tmp_path)
    static = tmp_path / "llama-static"
    static.write_bytes(b"\x7fELF GGML_BACKEND_PATH")
    assert "has ggml linked into it" in look(static, tmp_path)
    unknown = plugin_for(fake_ggml(tmp_path / "new", "0.99.0"), tmp_path / "cache")
    assert unknown.returncode == 1 and unknown.stdout == ""
    assert "lowkv has no headers of ggml 0.99.0: name the llama.cpp tree" in unknown.stderr


@pytest.mark.skipif(not PLUGIN.startswith(str(ROOT / "build/release")), reason="another build is tested")
@pytest.mark.parametrize("version", ["0.11.0", "0.25.2", OWN])
def test_one_plugin_is_for_many_versions(version, tmp_path):
    """Nothing is built, and nothing fetched."""
    done = subprocess.run([*SCRIPT, "--for", str(fake_ggml(tmp_path, version))], env=environment(None),
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and Path(done.stdout.strip()).samefile(PLUGIN), done.stderr


def test_an_interrupted_build_is_not_taken(tmp_path):
    """Half a plug-in lies in a draft folder without its stamp."""
    draft = tmp_path / "plugins" / "draft"
    draft.mkdir(parents=True)
    (draft / "libggml-lowkv.so").write_bytes(b"half")
    assert "no plug-in for" in look(TOOLS, tmp_path)


def test_run_refuses_a_program_of_another_ggml(tmp_path):
    fake_ggml(tmp_path, "0.99.0")
    source = tmp_path / "main.c"
    source.write_text("const char * ggml_version(void); int main(void) { return ggml_version()[0] == 0; }\n")
    program = tmp_path / "llama-fake"
    subprocess.run(["cc", source, "-o", program, "-L", tmp_path, "-Wl,--no-as-needed", "-lggml", "-lggml-base"],
                   check=True)
    for name in ("ggml", "ggml-base"):
        (tmp_path / f"lib{name}.so.0").symlink_to(tmp_path / f"lib{name}.so")
    env = environment(None, LOWKV_CACHE_DIR=str(tmp_path / "cache"), LD_LIBRARY_PATH=str(tmp_path))
    done = subprocess.run([str(BUILD / "bin/lowkv"), "run", "--", str(program), "-m", MODEL], env=env,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "this program's ggml is newer than this lowkv knows, and does not fit" in done.stderr
