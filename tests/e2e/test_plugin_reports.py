"""What people do with a server or a program, and would report if it failed: most on the real model."""

import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import plugin_models as models
import pytest
from plugin_tools import BUILD, MODEL, PATHS, PLUGIN, TOOLS, assert_same_text, complete, environment, server, text
from test_command import lowkv

pytestmark = pytest.mark.long

COMPLETION = TOOLS / "llama-completion"
STORY = Path(PATHS["LOWKV_DEMO_TEXT"]).read_text()
ASK = ("-p", "Once upon a time", "-n", 8, "-no-cnv", "-t", 1)


def assert_active(log):
    assert "lowkv: active" in log and "NOT active" not in log and "GGML_ASSERT" not in log, log[-3000:]


def test_a_prompt_cache(tmp_path):
    """--prompt-cache: written by one process, read by the next, also by one with another scheme or without."""
    prompt, file = STORY[:1500], tmp_path / "prompt.bin"

    def ask(scheme, *more):
        return complete("--prompt-cache", file, *more, prompt=prompt, tokens=16, scheme=scheme)

    for scheme in ("exact", "lowkv2.8"):
        file.unlink(missing_ok=True)
        first, again = ask(scheme, "--prompt-cache-all"), ask(scheme, "--prompt-cache-ro")
        assert first.code == 0 and again.code == 0, again.both[-3000:]
        again.said(r"session file|loaded a session|using .* tokens")
        assert_active(again.both)
    stock = ask(None, "--prompt-cache-ro")
    assert stock.code == 0 and stock.out.strip(), stock.both[-3000:]
    other = ask("kivi4", "--prompt-cache-ro")
    other.said("lowkv: a state was restored that another scheme than kivi4 had saved")
    assert other.code != 0, other.both[-3000:]


def test_a_server_that_sleeps(tmp_path):
    """--sleep-idle-seconds frees model and caches, and makes them again at the next request."""
    with server(tmp_path, "-c", 1024, "-np", 1, "--sleep-idle-seconds", 1, scheme="lowkv2.8",
                env={"LOWKV_VERBOSE": "1"}) as s:
        first = s.complete(STORY[:1200], tokens=8)
        time.sleep(3)
        again = s.complete(STORY[:1200], tokens=8)
        assert again["content"] == first["content"]
        assert s.log_text().count("lowkv: active") >= 2, s.log_text()[-3000:]
        assert_active(s.log_text())


def test_paths_of_other_letters(tmp_path):
    folder = tmp_path / "Ordner für Wörter 模型 'x'"
    folder.mkdir()
    model, plugin, stats = folder / "ein Modell.gguf", folder / "lib ggml.so", folder / "Zahlen.prom"
    model.symlink_to(MODEL)
    plugin.symlink_to(PLUGIN)
    run = lowkv("run", "--plugin", plugin, "--", COMPLETION, "-m", model, *ASK, LOWKV_STATS=str(stats))
    assert run.code == 0, run.both[-3000:]
    assert_active(run.both)
    assert "lowkv_cache_bytes" in stats.read_text()
    doctor = lowkv("doctor", "-m", model)
    assert doctor.code == 0, doctor.both


@pytest.mark.parametrize("part", [0, 0.0001, 0.5, 0.999])
def test_a_model_cut_off(tmp_path, part):
    data = Path(MODEL).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(part * len(data))])
    for words in (("run", "--", COMPLETION, "-m", cut, *ASK), ("doctor", "-m", cut), ("plan", "-m", cut),
                  ("generate", "-m", cut, "-p", "a", "-n", 1)):
        run = lowkv(*words)
        assert run.code in (1, 2) or (words[0] == "plan" and part >= 0.5), (words[0], run.code, run.both[-2000:])


def test_too_little_memory(tmp_path):
    """ulimit -v: a message and an end, at whatever point memory is short."""
    command = [BUILD / "bin/lowkv", "run", "--", COMPLETION, "-m", MODEL, "-c", "8192", *ASK]
    for mib in (260, *range(300, 480, 20), 600):
        def limit(mib=mib):
            resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))
        done = subprocess.run(list(map(str, command)), env=environment(None), capture_output=True, text=True,
                              errors="replace", timeout=200, preexec_fn=limit)
        assert done.returncode >= 0 and done.returncode < 128, (mib, done.returncode, done.stderr[-2000:])
        assert done.returncode != 0 or "lowkv: active" in done.stderr


def test_an_interrupt_in_the_prompt(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text(STORY * 2)
    command = [BUILD / "bin/lowkv", "run", "--", COMPLETION, "-m", MODEL, "-f", file, "-c", "0", "-n", "4", "-no-cnv",
               "-t", "1"]
    log = tmp_path / "log"
    with open(log, "w") as out:
        process = subprocess.Popen(list(map(str, command)), env=environment(None), stdout=out, stderr=out,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            for _ in range(600):
                if "lowkv: active" in log.read_text(errors="replace"):
                    break
                time.sleep(0.1)
            time.sleep(1)
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
        finally:
            process.kill()
    assert code == 130, (code, log.read_text(errors="replace")[-2000:])


def test_two_servers_with_one_stats_file(tmp_path):
    path = tmp_path / "stats.prom"
    env = {"LOWKV_STATS": str(path)}
    with server(tmp_path, "-c", 512, scheme="lowkv2.8", env=env) as one, \
            server(tmp_path, "-c", 512, scheme="kivi2", env=env) as two:
        for i in range(3):
            for s in (one, two):
                s.complete(text(i, 60), tokens=4)
            time.sleep(1.1)
        read = path.read_text()
        assert "LOWKV_STATS" not in one.log_text() + two.log_text()
    # The file of the one that wrote last, whole.
    assert read.startswith("# HELP") and read.endswith("\n") and len(set(re.findall(r'scheme="(.*?)"', read))) == 1


@pytest.mark.parametrize("options", [("-t", 64), ("-t", 1), ("--numa", "distribute"), ("-lm", "mlock"), ("-lm", "none"),
                                     ("-lm", "dio"), ("-b", 1, "-ub", 1), ("-ub", 4096, "-b", 4096)])
def test_threads_and_memory_as_asked_for(options):
    base = complete("-fit", "off", prompt=STORY[:900], tokens=8, scheme="kivi2")
    run = complete(*options, "-fit", "off", prompt=STORY[:900], tokens=8, scheme="kivi2")
    assert run.code == 0, run.both[-3000:]
    assert_active(run.both)
    if "-b" not in options:
        assert_same_text(base.out, run.out, at_least=800)


def test_until_the_context_ends():
    run = complete("-c", 512, "--no-context-shift", prompt=STORY[:1200], tokens=-1, scheme="lowkv2.8")
    assert_active(run.both)
    stock = complete("-c", 512, "--no-context-shift", prompt=STORY[:1200], tokens=-1)
    assert run.code == stock.code


def test_folders_that_cannot_be_written(tmp_path):
    """HOME, TMPDIR and lowkv's cache."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    env = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), str(closed))
    run = lowkv("run", "--", COMPLETION, "-m", MODEL, *ASK, **env)
    assert run.code == 0, run.both[-3000:]
    assert_active(run.both)
    none = {name: "/no/such/folder" for name in env}
    run = lowkv("run", "--", COMPLETION, "-m", MODEL, *ASK, **none)
    assert run.code == 0, run.both[-3000:]
    assert os.listdir(closed) == []


@pytest.mark.parametrize("options", [("--swa-full",), ("-ctxcp", 0), ("-ctxcp", 2), ("-ctxcp", 32, "--swa-full")])
def test_sliding_caches_in_full_and_checkpoints(tmp_path, options):
    model = models.gemma3(tmp_path / "gemma3.gguf", window=96)
    answers = {}
    for scheme in (None, "exact", "lowkv2.8"):
        with server(tmp_path, "-c", 2048, "-np", 1, *options, scheme=scheme, model=model) as s:
            for i in range(3):
                answers.setdefault(scheme, []).append(s.complete(text(7, 500 - 100 * i), tokens=8)["content"])
        if scheme:
            assert_active(s.log_text())
    assert answers[None] == answers["exact"]

