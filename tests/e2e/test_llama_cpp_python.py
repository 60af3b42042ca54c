"""lowkv.llama_cpp with a real llama-cpp-python: its Llama has a packed cache, or there is a clear message.

Not a part of `make test`: `make test-llama-cpp-python` builds llama-cpp-python, which takes minutes."""

import functools
import json
import os
import socket
import subprocess
import textwrap
import urllib.request
from pathlib import Path

import pytest

PYTHON, MODEL = os.environ.get("LOWKV_LLAMA_CPP_PYTHON"), os.environ.get("LOWKV_MODEL")
PACKAGE = Path(__file__).resolve().parents[2] / "build" / "python" / "site"

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="llama-cpp-python: LOWKV_LLAMA_CPP_PYTHON is not set; make test-llama-cpp-python does")

PROMPT = "The history of the kingdom begins with a river. " * 70
# Each script runs in a process of its own: a plug-in stays loaded. `say` adds to what run() gives back.
BEGIN = f"""
import json, sys
import lowkv, lowkv.llama_cpp
import llama_cpp
said = {{}}

def say(**values):
    said.update(values)

def make(**arguments):
    return llama_cpp.Llama({MODEL!r}, n_ctx=1024, n_threads=2, verbose=False,
                           **{{"n_gpu_layers": -1, "flash_attn": True, **arguments}})

def generate(llama):
    return llama.create_completion({PROMPT!r}, max_tokens=48, temperature=0.0)["choices"][0]["text"]

def refused(call):
    try:
        call()
    except lowkv.Error as error:
        return str(error)
"""


@functools.cache
def plugin():
    """The library for its ggml, as users of a clone find it."""
    finder = PACKAGE.parents[2] / "deps/plugin_for.py"
    done = subprocess.run([finder, "--for", PYTHON], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def run(script, **environment):
    """What the script said, its stderr as `stderr`."""
    text = BEGIN + textwrap.dedent(script) + "\nprint(json.dumps(said))\n"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LOWKV_")}
    done = subprocess.run([PYTHON, "-c", text], capture_output=True, text=True, timeout=280, check=False,
                          env=variables | {"PYTHONPATH": str(PACKAGE), "LOWKV_PLUGIN": plugin(), **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


@pytest.fixture(scope="module")
def stock():
    """Without the plug-in, flash attention as with it."""
    return run("say(text=generate(make()))")["text"]


def packed(scheme):
    return run(f"""
        say(path=str(lowkv.llama_cpp.enable({scheme!r})))
        llama = make()
        say(early=refused(lowkv.llama_cpp.active), text=generate(llama))
        say(active=lowkv.llama_cpp.active(), stats=lowkv.llama_cpp.stats())
        llama.close()
        say(later=lowkv.llama_cpp.active())
    """)


def test_a_packed_cache(stock):
    found = packed("lowkv2.8")
    assert found["path"] == plugin()
    assert found["early"].startswith("the cache has no tokens yet")
    assert found["active"] is True and found["later"] is False
    assert found["stats"]["caches"] == 1 and found["stats"]["packed_layers"] == 30
    assert found["stats"]["scheme"] == "lowkv2.8" and found["stats"]["packed_bytes"] > 0
    assert "makes its caches as lowkv2.8 from here on" in found["stderr"]
    assert "lowkv: active: scheme lowkv2.8, 30 layers" in found["stderr"]
    assert len(found["text"]) > 50


def test_the_exact_scheme_gives_the_stock_text(stock):
    found = packed("exact")
    assert found["active"] is True and found["stats"]["packed_bytes"] == 0 < found["stats"]["exact_bytes"]
    assert found["text"] == stock


def test_the_scheme_of_later_caches_can_be_changed():
    found = run("""
        for number, scheme in enumerate(("kivi4", "lowkv2")):
            lowkv.llama_cpp.enable(scheme)
            llama = make()
            generate(llama)
            say(**{f"scheme{number}": lowkv.llama_cpp.stats()["scheme"]})
            llama.close()
    """)
    assert (found["scheme0"], found["scheme1"]) == ("kivi4", "lowkv2")


def test_of_two_schemes_the_newest_is_named_and_all_is_counted():
    found = run("""
        schemes, live, named = ["kivi4", "lowkv2", "exact", "kivi2", "lowkv2.8", "lowkv4"], [], []
        for scheme in schemes:
            lowkv.llama_cpp.enable(scheme)
            live.append(make())
            if len(live) > 2:
                live.pop(0).close()
            named.append(lowkv.llama_cpp.stats()["scheme"])
        for llama in live:
            llama.create_completion("Once upon a time", max_tokens=2)
        say(right=named == schemes, named=named, stats=lowkv.llama_cpp.stats(), active=lowkv.llama_cpp.active())
    """)
    assert found["right"], found["named"]
    assert found["stats"]["caches"] == 2 and found["stats"]["packed_layers"] == 60 and found["active"] is True


@pytest.mark.parametrize("arguments,words", [
    ("n_gpu_layers=0", "NOT active: no KV cache was placed"),
    ("flash_attn=False", "NOT active for 30 of 30 layers"),
    ("offload_kqv=False", "NOT active: no KV cache was placed"),
])
def test_a_plain_cache_is_told(arguments, words):
    found = run(f"""
        lowkv.llama_cpp.enable()
        llama = make({arguments})
        generate(llama)
        say(active=lowkv.llama_cpp.active())
    """)
    assert found["active"] is False
    assert words in found["stderr"]


def test_wrong_settings_are_refused():
    found = run("""
        say(scheme=refused(lambda: lowkv.llama_cpp.enable("kivi7")))
        say(calibration=refused(lambda: lowkv.llama_cpp.enable("kvquant3")))
        say(file=refused(lambda: lowkv.llama_cpp.enable("kvquant3", calibration=lowkv.__file__)))
        say(ask=refused(lowkv.llama_cpp.active))
    """)
    assert "LOWKV_SCHEME=kivi7 is not a scheme" in found["scheme"]
    assert "needs a calibration of the model" in found["calibration"] and "is not a scheme" not in found["calibration"]
    assert "and name it in calibration= or LOWKV_CALIBRATION" in found["calibration"]
    assert "LOWKV_CALIBRATION" in found["file"]
    assert "has failed" in found["ask"]


def test_a_wrong_scheme_leaves_no_plain_cache_behind():
    found = run("""
        say(refused=refused(lambda: lowkv.llama_cpp.enable("kivi7")))
        try:
            make()
        except Exception as error:
            say(failed=str(error))
        lowkv.llama_cpp.enable("kivi4")
        llama = make()
        generate(llama)
        say(active=lowkv.llama_cpp.active())
    """)
    assert found["refused"] and "failed" in found and found["active"] is True


def test_what_is_no_plugin_of_this_ggml_is_refused(tmp_path):
    (tmp_path / "text.so").write_text("no library")
    # The oldest version that it is for is changed, to one of the same length.
    other = Path(plugin()).read_bytes()
    assert b"0.11.0" in other
    (tmp_path / "other.so").write_bytes(other.replace(b"0.11.0", b"9.11.0"))
    found = run(f"""
        import ctypes.util
        for name in ("text.so", "other.so"):
            say(**{{name: refused(lambda: lowkv.llama_cpp.enable(plugin={str(tmp_path)!r} + "/" + name))}})
        say(stranger=refused(lambda: lowkv.llama_cpp.enable(plugin=lowkv._core.__file__)))
    """)
    assert "can't be loaded beside llama_cpp's ggml" in found["text.so"]
    assert "this plug-in is for ggml 9.11.0 to " in found["other.so"]
    assert "is not lowkv's plug-in for llama.cpp" in found["stranger"]


ALIEN = f"""
import site
site.addsitedir({str(PACKAGE)!r})  # whose .pth file is read, as that of an installed package
import llama_cpp
llama = llama_cpp.Llama({MODEL!r}, n_ctx=1024, n_threads=2, verbose=False)
print(llama.create_completion({PROMPT!r}, max_tokens=48, temperature=0.0)["choices"][0]["text"])
"""


@pytest.mark.parametrize("scheme", ["exact", "lowkv2.8"])
def test_a_program_that_knows_nothing_of_lowkv_is_given_a_packed_cache_by_a_variable(scheme, stock):
    done = subprocess.run([PYTHON, "-c", ALIEN], capture_output=True, text=True, timeout=280, check=True,
                          env={**os.environ, "LOWKV_PLUGIN": plugin(), "LOWKV_LLAMA_CPP": scheme})
    assert f"lowkv: active: scheme {scheme}, 30 layers" in done.stderr
    if scheme == "exact":
        assert done.stdout.strip() == stock.strip()


def test_without_the_variable_nothing_of_lowkv_is_imported():
    code = f"import site, sys; site.addsitedir({str(PACKAGE)!r}); print([m for m in sys.modules if 'lowkv' in m])"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LOWKV_")}
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, env=clean, check=True)
    assert done.stdout.strip() == "[]"


def test_a_llama_whose_cache_cannot_be_packed_is_not_made():
    done = subprocess.run([PYTHON, "-c", ALIEN.replace("verbose=False", "verbose=False, offload_kqv=False")],
                          capture_output=True, text=True, timeout=280, check=False,
                          env={**os.environ, "LOWKV_PLUGIN": plugin(), "LOWKV_LLAMA_CPP": "1"})
    assert done.returncode == 1 and "the cache of this Llama is not packed" in done.stderr


def test_attached_twice_a_llama_is_wrapped_once():
    found = run("""
        lowkv.llama_cpp.attach()
        stock = llama_cpp.Llama.__init__.__wrapped__
        lowkv.llama_cpp.attach("lowkv4")
        say(once=llama_cpp.Llama.__init__.__wrapped__ is stock)
    """)
    assert found["once"]


def test_its_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [PYTHON, "-m", "lowkv.llama_cpp", "--model", MODEL, "--port", str(port), "--n_ctx", "1024"],
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE), "LOWKV_PLUGIN": plugin(), "LOWKV_SCHEME": "lowkv2.8"})
    try:
        lines = iter(server.stderr.readline, "")
        assert any("lowkv: active: scheme lowkv2.8, 30 layers" in line for line in lines)
        assert any("Uvicorn running" in line for line in lines)
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body,
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
    finally:
        server.terminate()
        server.wait(timeout=60)
