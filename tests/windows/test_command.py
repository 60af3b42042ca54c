"""lowkv.exe out of the zip of `make dist-windows`, unpacked where names have spaces and other letters, in an empty Wine
prefix."""

import json
import os
import shutil
import signal
import subprocess
import time
import zipfile
from pathlib import Path

import pytest
import wine
from plugin_tools import PATHS, ROOT
from wine import BUILD, MODEL, WINE, run, windows

FOLDER = "Höhle 洞窟 of lowkv"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The unpacked zip and the model beside it."""
    folder = tmp_path_factory.mktemp("windows") / FOLDER
    archive = next((ROOT / "dist").glob("lowkv-*-windows-x86_64.zip"))
    with zipfile.ZipFile(archive) as unpacked:
        unpacked.extractall(folder)
    (folder / "Modell ß.gguf").symlink_to(MODEL)
    return folder


@pytest.fixture(scope="module", autouse=True)
def prefix(tmp_path_factory):
    """Of Wine: nothing but what Wine makes itself."""
    made = tmp_path_factory.mktemp("prefix")
    before, wine.PREFIX = wine.PREFIX, made
    path = os.environ.pop("WINEPATH", None)
    yield made
    wine.PREFIX = before
    if path is not None:
        os.environ["WINEPATH"] = path


def lowkv(home, *args, **how):
    return run(next(home.glob("lowkv-*")) / "lowkv.exe", *args, **how)


def model(home):
    return windows(home / "Modell ß.gguf")


def test_version_and_help(home):
    assert lowkv(home, "--version").out.startswith("lowkv ")
    assert "Examples:" in lowkv(home, "--help").out
    assert lowkv(home, "shemes").code == 2


def test_schemes(home):
    told = lowkv(home, "schemes", "kivi2")
    assert told.code == 0 and "kivi2" in told.out
    wrong = lowkv(home, "schemes", "lowkv2,widow=3")
    assert wrong.code == 2
    wrong.said("window")


def test_plan_reads_a_model_by_an_awkward_name(home):
    told = lowkv(home, "plan", "-m", model(home))
    assert told.code == 0, told.both
    told.said("Modell ß")
    missing = lowkv(home, "plan", "-m", windows(home / "keins ß.gguf"))
    assert missing.code == 1
    missing.said("keins ß.gguf")


def test_doctor_finds_the_plugin_beside_it(home):
    told = lowkv(home, "doctor")
    assert told.code == 0, told.both
    told.said(r"ggml-lowkv\.dll loads, and computes rightly")
    told.said("No problems")


def test_doctor_says_what_does_not_load(home, tmp_path):
    (tmp_path / "broken.dll").write_bytes(b"MZ")
    told = lowkv(home, "doctor", "--plugin", windows(tmp_path / "broken.dll"))
    assert told.code == 1
    told.said(r"broken\.dll: does not load: .*\(error 193\)")


def test_generate_from_a_file(home, tmp_path):
    text = tmp_path / "Märchen.txt"
    text.write_text("Es war einmal ein König. " * 4, encoding="utf-8")
    told = lowkv(home, "generate", "-m", model(home), "-f", windows(text), "-n", 8, "--temp", 0, "--no-chat")
    assert told.code == 0 and told.out.strip(), told.both
    packed = lowkv(home, "generate", "-m", model(home), "-p", "Grüße", "-n", 4, "--temp", 0, "-q")
    assert packed.code == 0 and packed.out.strip(), packed.both


def test_plan_writes_a_file_by_an_awkward_name(home, tmp_path):
    out = tmp_path / "Maße 尺.json"
    told = lowkv(home, "plan", "-m", model(home), "--json", windows(out))
    assert told.code == 0, told.both
    assert json.loads(out.read_text())


def host_words(home):
    """The small host under `lowkv run`, with the DLLs that others have built."""
    program = home / "a host ß.exe"
    if not program.exists():
        shutil.copy(BUILD / "bin/test_windows_host.exe", program)
    dll = windows(Path(PATHS["LOWKV_LLAMA_MSVC"]) / "llama.dll")
    return ["run", "--scheme", "lowkv2", "--", windows(program), dll]


def host(home, *args, **how):
    return lowkv(home, *host_words(home), *args, **how)


def test_run_serves_a_program(home):
    told = host(home, model(home), 4, "Grüße aus der Höhle")
    assert told.code == 0, told.both
    told.said("lowkv: active: scheme lowkv2, 30 layers")


def test_run_gives_back_the_exit_code(home):
    failed = host(home, windows(home / "keins.gguf"), 4, "Once")
    assert failed.code == 1
    failed.said("host: can't load the model")
    missing = lowkv(home, "run", "--", "no-such-program", "-m", model(home))
    assert missing.code == 2
    missing.said("there is no program no-such-program")


def test_a_program_ends_with_lowkv_run(home):
    """Whoever ends `lowkv run` by force ends its program, too."""
    tokens = "5003"
    command = [WINE, str(next(home.glob("lowkv-*")) / "lowkv.exe"), *host_words(home), model(home), tokens, "Once"]
    started = subprocess.Popen(command, env=wine.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE)
    for line in started.stderr:
        if b"lowkv: active" in line:
            break
    assert len(running(tokens)) == 2
    started.send_signal(signal.SIGKILL)
    started.wait()
    started.stderr.close()
    for _ in range(100):
        if not running(tokens):
            return
        time.sleep(0.1)
    raise AssertionError("the host goes on")


def running(word):
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if ".exe" in line and word in line]
