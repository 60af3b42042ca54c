"""What is particular to some builds of llama.cpp, and to how they are started (test_smoke.py runs on all)."""

import os
import re
import socket
import subprocess
import time

import pytest
from plugin_tools import MODEL, PLUGIN, Server, assert_same_text, environment
from test_smoke import COMMAND, NAMES, STORY, Build

needs = {name: pytest.mark.skipif(name not in NAMES, reason=f"LOWKV_MATRIX does not name {name}")
         for name in ("llama", "llama-dl", "llama-static")}
PROMPT = ("-m", MODEL, "-p", STORY * 7, "-n", 24, "--temp", 0, "-no-cnv", "--ignore-eos")


@pytest.fixture(scope="module")
def one_thread():
    return Build("llama").run("llama-completion", *PROMPT, "-t", 1, scheme="lowkv2.8").out.strip()


@needs["llama-static"]
def test_a_static_program_is_refused_by_name():
    program = Build("llama-static").folder / "llama-completion"
    done = subprocess.run([str(COMMAND), "run", "--", str(program), *map(str, PROMPT)], env=environment(None),
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"{program} has ggml linked into it" in done.stderr and "BUILD_SHARED_LIBS=ON" in done.stderr
    assert STORY not in done.stdout


@needs["llama-dl"]
def test_loadable_backends_read_the_variable_without_a_device():
    """Such builds load their backends at once, the one that GGML_BACKEND_PATH names among them."""
    build = Build("llama-dl")
    run = subprocess.run([str(build.folder / "llama-completion"), *map(str, PROMPT)],
                         env=environment(None, GGML_BACKEND_PATH=str(PLUGIN), LOWKV_SCHEME="lowkv2.8"),
                         capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    assert run.returncode == 0 and "lowkv: active: scheme lowkv2.8, 30 layers" in run.stderr


@needs["llama"]
@pytest.mark.parametrize("options", [
    ("--poll", 100), ("--poll", 0), ("-t", 2, "-tb", 1), ("-t", 1, "-tb", 2),
    ("-t", 1, "--cpu-mask", "1", "--cpu-strict", 1), ("-t", 1, "-tb", 1, "--cpu-mask-batch", "2"), ("--prio", 0)],
    ids=lambda options: " ".join(map(str, options)))
def test_threads_and_polling_do_not_change_the_text(one_thread, options):
    run = Build("llama").run("llama-completion", *PROMPT, *options, scheme="lowkv2.8")
    assert run.code == 0, run.both[-2000:]
    run.said("lowkv: active: scheme lowkv2.8, 30 layers")
    assert_same_text(run.out.strip(), one_thread, at_least=1000)


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("llama", "llama-dl")])
def test_a_server_that_gets_all_by_its_environment(name, tmp_path):
    """As a program starts it that knows nothing of lowkv: Ollama, whose order and options these are. It asks for
    the devices first, then gives its whole environment and no -dev; -np 1 and -t 2 are what a setting gives it."""
    build = Build(name)
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "LD_LIBRARY_PATH": str(build.folder),
             "LLAMA_ARG_DEVICE": "LOWKV", "GGML_BACKEND_PATH": str(PLUGIN)}
    program = build.folder / "llama-server"
    listed = subprocess.run([program, "--list-devices", "--offline", "--verbose"], env=clean, capture_output=True,
                            text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert re.search(r"^\s+LOWKV: .+ \(\d+ MiB, \d+ MiB free\)", listed.stdout, re.MULTILINE), listed.stdout
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--model", MODEL, "--port", str(port), "--host", "127.0.0.1", "--no-webui", "--offline",
               "-c", "1024", "-np", "1", "--log-verbosity", "4", "--no-log-prefix", "--no-log-timestamps",
               "--no-jinja", "--chat-template", "chatml", "--flash-attn", "on", "-b", "512", "-ub", "512", "-t", "2",
               "--context-shift"]
    log = tmp_path / "server.log"
    with open(log, "w") as out, subprocess.Popen(command, env=clean, stdout=out, stderr=out,
                                                 stdin=subprocess.DEVNULL) as process:
        try:
            running = Server(process, port, log)
            until = time.monotonic() + 120
            while not healthy(running):
                assert process.poll() is None and time.monotonic() < until, running.log_text()[-3000:]
                time.sleep(0.2)
            assert running.complete("Once upon a time", tokens=8)["content"]
            assert "lowkv: active: scheme lowkv2.8, 30 layers" in running.log_text()
        finally:
            process.terminate()


def healthy(running):
    try:
        return running.request("GET", "/health", timeout=5)[0] == 200
    except (OSError, ValueError):
        return False
